"""One input through every head: its tokens, and the scores that a page holds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Audit
from semdiag.capturing.batches import Batch, entries, longest, only_token_ids, samples_of, split
from semdiag.capturing.call_strips import CROSS
from semdiag.capturing.inputs import SUFFIXES, TextOptions, Tokeniser, read_texts, tokeniser_of
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.score_strips import as_mask
from semdiag.measuring.calls.collector import Layers
from semdiag.measuring.calls.counted_rows import Arrivals, CountedRows, counted_rows
from semdiag.measuring.calls.running import placed, running
from semdiag.measuring.encoders.traces import checked_tokens, fitting
from semdiag.measuring.measure import DTYPES, Conditions, no_attention
from semdiag.measuring.survey import inputs_of, remarks_on
from semdiag_files import InputError
from semdiag_models import Encoder
from semdiag_models.train import find_device, with_float64

LONGEST = 256  # tokens that a page shows
_OF_DECODER = ("decoder_input_ids", "decoder_inputs")


class Cut(Enum):
    """Why the last tokens are left out: the user's limit, the model's, the page's, or the size of the scores."""

    REQUESTED, MODEL, PAGE, SCORES = range(4)


@dataclass(frozen=True, eq=False)
class Sample:
    """One input of a model."""

    batch: Batch  # the model's arguments, one sample
    source: str  # where it comes from, in words
    tokens: list[str] | None  # the text of each token
    targets: list[str] | None = None  # the same for a decoder's own sequence; None: there is none
    cut: Cut | None = None  # why tokens at the end were left out; None: none were
    # the text, its model and options, to tokenise it again; None: it came as numbers
    text: tuple[str, LoadedModel, TextOptions] | None = None

    def shortened(self, most: int, why: Cut) -> "Sample | None":
        """Return the sample with at most ``most`` tokens; None if it is not made of token ids."""
        if self.text is not None:
            text, model, options = self.text
            return replace(_of_text(text, model, replace(options, max_length=most), self.source), cut=why)
        if not only_token_ids(self.batch):
            return None
        batch = _first_tokens(self.batch, most)
        words, targets = (None if texts is None else texts[:most] for texts in (self.tokens, self.targets))
        return Sample(batch, self.source, words, targets, why if longest(self.batch) > most else self.cut)


def _read_sample(model: LoadedModel, conditions: Conditions, text: str | None = None) -> Sample:
    options = conditions.texts
    file = conditions.inputs
    if options.max_length is not None and options.max_length > LONGEST:
        raise InputError(f"A page shows at most {LONGEST} tokens. Got --max-length {options.max_length}.")
    source = "--text"
    if text is None and file is not None and file.suffix in SUFFIXES and model.external:
        texts = read_texts(file).texts
        text = texts[0]
        source = f"{file}, the first of {len(texts)} texts" if len(texts) > 1 else str(file)
    if text is not None:
        return _of_text(text, model, replace(options, max_length=options.max_length or LONGEST), source)
    if file is None and model.batches is None and model.external:
        tokenizer = "" if model.source == "hugging face" else " and --tokenizer DIR"
        raise InputError(
            f"Name a text for {model.path} with --text TEXT{tokenizer}; or with --inputs FILE token ids (.npy, "
            ".npz, .pt), texts (.txt, .jsonl) or a .pt with a dictionary of the model's arguments."
        )
    batches, _, source = inputs_of(model, conditions)
    return _of_batch(model, batches[0], source if "first" in source else f"{source}, the first")


def given_sample(
    model: LoadedModel, inputs: str | Batch | Iterable[Batch], tokens: Sequence[str] | None
) -> Sample:
    """Return the input that a program gives."""
    if isinstance(inputs, str):
        if tokens is not None:
            raise InputError("tokens say what numbers mean: of a text the tokenizer says it.")
        return _of_text(inputs, model, TextOptions(LONGEST), "the text")
    batches = split(inputs, 1)
    if not batches:
        raise InputError("There is no input to look at: the number of samples is 0.")
    sample = _of_batch(model, batches[0], "the first sample given")
    return sample if tokens is None else replace(sample, tokens=[str(word) for word in tokens][:LONGEST])


def _fitting(words: list[str] | None, length: int) -> list[str]:
    """Return the words if there is one for each of ``length`` positions, else the positions."""
    return words if words is not None and len(words) == length else [str(place) for place in range(length)]


def _of_batch(model: LoadedModel, batch: Batch, source: str) -> Sample:
    if isinstance(model.module, Encoder):
        (batch,) = checked_tokens(model.module, [batch], ())
    sample = Sample(batch, source, _words(model, _ids(batch, False)), _words(model, _ids(batch, True)))
    return sample.shortened(LONGEST, Cut.PAGE) or sample


def _of_text(text: str, model: LoadedModel, options: TextOptions, source: str) -> Sample:
    tokenise = tokeniser_of(Path(source), model, options)
    batch: dict[str, Tensor] = tokenise([text])
    ids = _ids(batch, False)
    decoder = _ids(batch, True)
    words = None if ids is None else tokenise.pieces(ids)
    targets = None if decoder is None else tokenise.pieces(decoder)
    cut = None
    if tokenise.cut([text]):
        most = options.max_length or LONGEST
        too_long = tokenise.takes is not None and tokenise.takes <= most
        cut = Cut.MODEL if too_long else Cut.PAGE if most == LONGEST else Cut.REQUESTED
    return Sample(batch, source, words, targets, cut, (text, model, options))


def _ids(batch: Batch, decoder: bool) -> list[int] | None:
    """Return the token ids of a sample or of its decoder; None if there are none, or several candidates."""
    candidates = [
        (str(name), value)
        for name, value in entries(batch)
        if isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point() and len(value) == 1
    ]
    named = [ids for name, ids in candidates if (name in _OF_DECODER if decoder else name == "input_ids")]
    if not named and not decoder and len(candidates) == 1 and candidates[0][1].dtype != torch.bool:
        named = [candidates[0][1]]
    return [int(each) for each in named[0][0]] if named else None


def _words(model: LoadedModel, ids: list[int] | None) -> list[str] | None:
    if ids is None:
        return None
    try:
        tokenise: Tokeniser = tokeniser_of(Path(model.path), model, TextOptions())
        return tokenise.pieces(ids)
    except InputError:
        return [str(each) for each in ids]


def _first_tokens(batch: Any, most: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[:, :most] if batch.ndim == 2 else batch
    if isinstance(batch, Mapping):
        return {name: _first_tokens(value, most) for name, value in batch.items()}
    return tuple(_first_tokens(each, most) for each in batch) if isinstance(batch, tuple | list) else batch


_USUAL_K = 5
LARGEST = 12 * 2**20  # bytes of scores on a page, which writes four letters for three of them


@dataclass(frozen=True, eq=False)
class Head:
    """One head on one input."""

    scores: np.ndarray  # z of every query and the keys it may attend to, nats: query by query, keys in their order
    allowed: np.ndarray  # (Lq, Lk) bool, A_i; no key for a query that does not count
    selected: np.ndarray | None  # (Lq, Lk) bool, S_i; None: the head attends to every key it may
    sink: float | None  # one more logit in the softmax's denominator; None: there is none
    dispersion: float  # the median δ of its queries, nats, of what it attends to; NaN if none is finite
    entropy: float  # the mean entropy of its weights, nats
    first_weight: float  # the mean weight on the first key that is no padding

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Return its three numbers."""
        return self.dispersion, self.entropy, self.first_weight


@dataclass(frozen=True, eq=False)
class LayerView:
    """One place of a model where attention happens."""

    module: str  # its dotted name
    occurrence: int  # which call of the module in the forward
    queries: list[str]  # labels of the queries: tokens, or positions
    keys: list[str]  # labels of the keys
    crossing: bool  # whether the module's name says that the keys are of another sequence than the queries
    heads: list[Head]  # heads of the layer


@dataclass(frozen=True, eq=False)
class InputView:
    """What the heads of a model do with one input."""

    model: LoadedModel  # the model that ran
    sample: Sample  # its input
    layers: list[LayerView]  # in the order of their first calls
    audit: Audit  # what was not captured, and remarks on what was
    residual: float  # the largest deviation of the recomputed attention, in units of what rounding can do
    dtype: str  # in which it ran
    folded: list[str]  # modules with heads or windows in their batch axis, of which only the first row is shown

    @property
    def length(self) -> int:
        """Return the number of queries in the layer that has most."""
        return max(len(layer.queries) for layer in self.layers)


def fitting_k(view: InputView, k: int | None) -> int:
    """Return the k that is shown at first."""
    longest_row = max(int(head.allowed.sum(1).max()) for layer in view.layers for head in layer.heads)
    if k is None:
        return min(_USUAL_K, longest_row)
    if all(head.selected is not None for layer in view.layers for head in layer.heads):
        raise InputError(
            f"k applies only to models that attend to every key: {view.model.path} has a mask of its own."
        )
    fitting([k], longest_row, "the largest number of keys")
    return k


@dataclass
class _Collector:
    """Collects the calls of one forward. If they do not fit on a page, only their size is kept."""

    sample: Sample
    layers: Layers = field(default_factory=Layers)
    views: list[LayerView] = field(default_factory=list)
    folded: list[str] = field(default_factory=list)
    size: int = 0

    def add(self, call: AttentionCall) -> None:
        """Keep a call's first row of the batch axis: there is one sample."""
        if len(call.q) > max(samples_of(self.sample.batch), 1):
            self.folded.append(call.module)
        call = call.part(slice(0, 1))
        rows = counted_rows(call)
        arrivals = Arrivals()
        self.layers.add(rows, arrivals)
        arrivals.settle()
        exact = rows.statistics.kept_log_sum_exp.dtype
        self.size += exact.itemsize * int((rows.statistics.keys * rows.queries).sum())
        if self.size > LARGEST:
            self.views.clear()
            return
        module = call.module.lower()
        words = self.sample.tokens
        of_queries = self.sample.tokens
        crossing = any(word in module for word in CROSS)
        if self.sample.targets is not None and "decoder" in module:
            of_queries = self.sample.targets
        queries = _fitting(of_queries, call.q.shape[2])
        keys = _fitting(words if crossing else of_queries, call.k.shape[2])
        with torch.autocast(call.q.device.type, enabled=False):  # as for the statistics
            scores = call.scores(exact)
        heads = _heads(rows, scores)
        self.views.append(LayerView(call.module, call.occurrence, queries, keys, crossing, heads))


def see(
    model: LoadedModel,
    sample: Sample,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> InputView:
    """Run a model on one input and keep what every head does with it."""
    collector, audit, kind = _run(model, sample, device, dtype)
    if collector.size > LARGEST:
        share = math.sqrt(LARGEST / collector.size)  # scores grow as the square of the length
        fits = math.floor(share * longest(sample.batch)) - 1
        shorter = sample.shortened(fits, Cut.SCORES) if fits > 1 else None
        if shorter is not None:
            sample = shorter
            collector, audit, kind = _run(model, sample, device, dtype)
    if collector.size > LARGEST:
        raise InputError(
            f"{sample.source}: its scores take {collector.size / 2**20:.0f} MiB, and a page holds "
            f"{LARGEST / 2**20:.0f}. Give a smaller input."
        )
    if not collector.views:
        raise no_attention(model.path, audit)
    if not collector.size:
        raise InputError("There is no query to look at: every token of the input is padding.")
    for remark in remarks_on(model, [sample.batch], seed):
        audit.remarks[remark] += 1
    residual = collector.layers.largest("residual_over_rounding")
    name = str(kind).removeprefix("torch.")
    return InputView(model, sample, collector.views, audit, residual, name, collector.folded)


def _run(
    model: LoadedModel, sample: Sample, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[_Collector, Audit, torch.dtype]:
    collector = _Collector(sample)
    with running(model, collector.add, device, dtype) as run:
        run(sample.batch)
    return collector, run.audit, run.dtype


def _heads(rows: CountedRows, scores: Tensor) -> list[Head]:
    call = rows.call
    counted = rows.call.counted[..., None]
    allowed = (counted if call.allowed is None else counted & call.allowed).expand(scores.shape)
    selected = None if call.selected is None else allowed & as_mask(call.selected, scores.shape[-1])
    sinks = None if call.sinks is None else call.sinks.double().tolist()
    of_rows = (rows.attending, rows.statistics.dispersion(), rows.statistics.entropy, rows.first_weight())
    attending, spans, entropies, firsts = (values[0].cpu().numpy() for values in of_rows)
    on_cpu = [None if x is None else x[0].cpu().numpy() for x in (scores, allowed, selected)]
    heads = []
    for head in range(scores.shape[1]):
        z, is_allowed, is_selected = (None if x is None else x[head] for x in on_cpu)
        spread = spans[head][attending[head]]
        spread = spread[np.isfinite(spread)]
        heads.append(
            Head(
                scores=z[is_allowed],  # type: ignore[index]
                allowed=is_allowed,  # type: ignore[arg-type]
                selected=is_selected,
                sink=None if sinks is None else sinks[head],
                dispersion=float(np.median(spread)) if len(spread) else math.nan,
                entropy=_mean(entropies[head][attending[head]]),
                first_weight=_mean(firsts[head][attending[head]]),
            )
        )
    return heads


def _mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else math.nan


def see_loaded(model: LoadedModel, conditions: Conditions, text: str | None = None) -> InputView:
    """Run a model on its one input."""
    device = find_device(conditions.device)
    conditions = conditions.decided([model], device)
    if conditions.dtype == "float64":
        device = with_float64(device)
    if isinstance(model.module, Encoder):
        model.module.with_draws(conditions.seed)
    sample = _read_sample(model, conditions, text)
    if model.external:
        placed(model.module, device, DTYPES[conditions.dtype])  # in place: a copy may not fit into memory
    return see(model, sample, device, DTYPES[conditions.dtype], conditions.seed)
