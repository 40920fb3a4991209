"""Two models run on the same inputs, batch by batch, and compared call by call."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch, first_samples, samples_of
from semdiag.capturing.inputs import SUFFIXES, has_tokenizer, read_texts, tokeniser_of
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.pretrained import find_folder
from semdiag.mathematics.score_strips import as_mask, largest_scores
from semdiag.mathematics.selections import overlaps
from semdiag.measuring.calls.collector import NotAvailableError, SampleNumbers
from semdiag.measuring.calls.running import RandomNumbers, placed, running
from semdiag.measuring.encoders.traces import checked_batch
from semdiag.measuring.measure import DTYPES, Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.outputs import Answers, Reader, output_change, position_terms
from semdiag.measuring.progress import SurveyProgress
from semdiag.measuring.subject import Subject
from semdiag.measuring.survey import Inputs, has_diverged, inputs_of, survey
from semdiag.measuring.table import Table, columns_of
from semdiag.questions.compare import ComparePlan
from semdiag.questions.k_sweep.rerun import output_notes
from semdiag_files import InputError, require_memory
from semdiag_models import Encoder
from semdiag_models.train import find_device, with_float64

COMPARED_OUTPUTS = Table(
    "compared_outputs",
    "One row per sample: what the model answers, beside its base. Sums over the sample's targets (loss_base and "
    "loss, nats) and over its positions with a distribution (predictions; changed; divergence KL(base || model), "
    "nats); output_change: norm of the change of its outputs relative to their norm in the base.",
    columns_of(
        "model base str; sample int32; targets predictions changed int64; loss_base loss divergence output_change "
        "float64"
    ),
)
_SUMS = ("targets", "predictions", "changed", "loss", "divergence")


class _Outputs:
    """Compares the outputs of both models in float64, read as the base's are (:class:`Reader`)."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._reader: Reader | None = None
        self.rows: list[dict[str, Any]] = []
        self.reason = ""  # why they are not compared

    @property
    def notes(self) -> list[tuple[str, str]]:
        if self.reason:
            return [(f"outputs are not compared: {self.reason}", "outputs-not-compared")]
        return [] if self._reader is None else output_notes(self._reader)

    def add(self, before: Any, after: Any, batch: Batch, labels: Tensor | None, first: int) -> None:
        """Compare the outputs of the two models on a batch; the first batch shows how they are read."""
        if self.reason:
            return
        try:
            if self._reader is None:
                self._reader = Reader(self._module, batch, labels, partial(batching.call, self._module))
                self._reader.output = None
            shapes = [self._reader.shape(output, batch) for output in (before, after)]
            if shapes[0] != shapes[1]:
                raise InputError(f"they are of the shapes {shapes[0]} and {shapes[1]}")
            one, two = (self._reader.read(output, batch, labels) for output in (before, after))
        except (TypeError, InputError) as error:
            self.reason = str(error).removesuffix(".")
            self.rows = []
            return
        for at in range(len(one.values)):
            old = _sample(one, at)
            new = _sample(two, at)
            sums = {name: x.sum().item() for name, x in position_terms(old, new).items() if name in _SUMS}
            sums["loss_base"] = position_terms(old, old)["loss"].sum().item()
            self.rows.append({"sample": first + at, **sums, "output_change": output_change(old, new).item()})


def _sample(answers: Answers, at: int) -> Answers:
    """Return one sample's outputs in float64: a batch's logits over a vocabulary might not fit into memory."""
    part = slice(at, at + 1)
    return replace(
        answers,
        values=answers.values[part].double(),
        targets=None if answers.targets is None else answers.targets[part],
        counted=answers.counted[part],
    )


def own_copy(call: AttentionCall) -> AttentionCall:
    """Return a copy of a call without its L × L scores, in memory of its own."""
    plain = ("q", "k", "v", "queries", "selected", "sinks")
    masks = ("allowed", "bias")
    copies: dict[str, Any] = {name: _copy(x) for name in plain if (x := getattr(call, name)) is not None}
    copies |= {name: _narrow(x) for name in masks if (x := getattr(call, name)) is not None}
    return replace(call, **copies, mixed=_copy(call.mixed[..., :0]), fully_masked=None)


def _copy(values: Tensor) -> Tensor:
    return values.detach().to(with_float64(values.device)).clone(memory_format=torch.contiguous_format)


def _narrow(values: Tensor) -> Tensor:
    """Return a copy in which expanded axes (stride 0) have length 1."""
    for axis, step in enumerate(values.stride()):
        values = values.narrow(axis, 0, 1) if step == 0 else values
    return _copy(values)


def total_variation(before: Tensor, after: Tensor) -> Tensor:
    r"""Return the total variation of two rows of attention weights."""
    change = after - before
    return (change.abs().sum(-1) + change.sum(-1).abs()) / 2


def output_parts(before: Tensor, after: Tensor, values: Tensor, values_after: Tensor) -> tuple[Tensor, Tensor]:
    r"""Split the change of attention's outputs into that of the weights and that of the values."""
    return (after - before) @ values, after @ (values_after - values)


_ENTRIES = 2**20  # weights of each model that are held at a time
# Sums over the compared queries of a head, except for the largest; norms are squared.
SUMS = (
    "queries", "total_variation", "largest", "dispersion_base", "dispersion", "moved", "top_queries", "overlap",
    "output", "by_weights", "by_values", "change", "left_out",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Rows:
    """What some queries of a call attend to, in float64."""

    weights: Tensor  # (b, H, r, n); rows without keys are zeros
    attending: Tensor  # (b, H, r) bool, queries that are no padding and attend to a key
    dispersion: Tensor  # (b, H, r), δ in nats
    top: Tensor  # (b, H, r, k) int64, keys with the largest scores of those it attends to, -1 for none
    dropping: Tensor  # (b, H, r) bool, whether it may attend to other keys than these
    values: Tensor  # (b, H, n, d)


def mismatch(base: AttentionCall, variant: AttentionCall) -> str:
    """Return why two calls cannot be compared."""
    names = "samples", "heads", "queries", "keys", "numbers in a value"
    sizes = [(*call.q.shape[:3], call.k.shape[2], call.v.shape[3]) for call in (base, variant)]
    pairs = zip(names, *sizes, strict=True)
    return ", ".join(f"{one} {name} and {two}" for name, one, two in pairs if one != two)


def head_changes(base: AttentionCall, variant: AttentionCall, top: int) -> dict[str, Tensor]:
    """Compare the weights, scores and outputs of two attention calls."""
    batch, heads = base.q.shape[:2]
    sums = {name: torch.zeros(batch, heads, dtype=torch.float64, device=base.q.device) for name in SUMS}
    for samples, queries in _parts(base):
        one, two = (_rows(call.part(samples, queries), top) for call in (base, variant))
        for name, values in _compared(one, two).items():
            if name == "largest":  # NaN stays
                sums[name][samples] = torch.maximum(sums[name][samples], values.amax(-1))
            else:
                sums[name][samples] += values.sum(-1)
    return sums


def _parts(call: AttentionCall) -> Iterator[tuple[slice, slice]]:
    batch, heads, length, _ = call.q.shape
    rows = min(length, max(1, _ENTRIES // (heads * call.k.shape[2])))
    samples = max(1, _ENTRIES // (heads * call.k.shape[2] * length))
    for first in range(0, batch, samples):
        for start in range(0, length, rows):
            yield slice(first, first + samples), slice(start, start + rows)


def _rows(part: AttentionCall, top: int) -> _Rows:
    scores = part.scores(torch.float64)
    allowed = torch.ones_like(scores, dtype=torch.bool) if part.allowed is None else part.allowed
    allowed = allowed.expand(scores.shape)
    attended = allowed if part.selected is None else allowed & as_mask(part.selected, scores.shape[-1])
    number = attended.sum(-1)
    attended_scores = scores.masked_fill(~attended, -torch.inf)
    logits = attended_scores
    if part.sinks is not None:
        sink = part.sinks.double()[None, :, None, None].expand(*attended_scores.shape[:3], 1)
        logits = torch.cat([attended_scores, sink], -1)
    weights = logits.softmax(-1)[..., : attended_scores.shape[-1]]
    top = min(top, attended_scores.shape[-1])
    order = largest_scores(attended_scores, top)[1]
    ranks = torch.arange(top, device=attended_scores.device)
    return _Rows(
        weights=weights.masked_fill(number[..., None] == 0, 0),
        attending=part.counted & (number > 0),
        dispersion=attended_scores.amax(-1) - scores.masked_fill(~attended, torch.inf).amin(-1),
        top=order.masked_fill(ranks >= number[..., None], -1),
        dropping=allowed.sum(-1) > number.clamp(max=top),
        values=part.v.double().repeat_interleave(part.q.shape[1] // part.v.shape[1], 1),
    )


def _compared(base: _Rows, variant: _Rows) -> dict[str, Tensor]:
    """Return terms per query (b, H, r), 0 if the query does not count."""
    counts = base.attending & variant.attending
    by_weights, by_values = output_parts(base.weights, variant.weights, base.values, variant.values)
    output = base.weights @ base.values
    after = variant.weights @ variant.values
    norms = {"output": output, "by_weights": by_weights, "by_values": by_values, "change": after - output}
    dropping = base.dropping | variant.dropping
    chosen = (rows.top.flatten(0, 2).cpu() for rows in (base, variant))
    overlap = overlaps(*chosen).view(counts.shape).to(counts.device)
    variation = total_variation(base.weights, variant.weights)
    terms = {
        "queries": torch.ones_like(variation), "total_variation": variation, "largest": variation,
        "dispersion_base": base.dispersion, "dispersion": variant.dispersion,
        "moved": (variant.dispersion - base.dispersion).abs(), "top_queries": dropping.double(),
        "overlap": overlap.where(dropping, 0.0),
        **{name: values.square().sum(-1) for name, values in norms.items()},
    }  # fmt: skip
    masked = {name: values.where(counts, 0.0) for name, values in terms.items()}
    return masked | {"left_out": (base.attending != variant.attending).double()}


COMPARED = Table(
    "compared",
    "One row per sample, layer and head of a model, beside its base. queries: that attend to a key in both. Sums "
    "over these: total_variation of the weights (largest: of one query), δ (dispersion_base, dispersion, moved: "
    "|δ' − δ|; nats), top_queries (that may attend to keys beyond their top-k), overlap of the top-k of these; "
    "squared norms of PV (output), (P' − P)V (by_weights), P'(V' − V) (by_values) and P'V' − PV (change).",
    {
        **dict.fromkeys(("model", "base"), "str"),
        **dict.fromkeys(("sample", "layer", "head"), "int32"),
        **{name: "int64" if name in ("queries", "top_queries") else "float64" for name in SUMS[:-1]},
    },
)


class CallPairs:
    """Keeps the base's calls on a batch, and compares each with the other model's as that comes."""

    def __init__(self, base: str, variant: str, top: int) -> None:
        self._refused = f"{base} and {variant} cannot be compared:"
        self._top = top
        self._numbers = SampleNumbers()
        self._running = ""
        self._next = 0
        self._size = 0
        self._kept: list[AttentionCall | None] = []  # of the base, None once they are compared
        self._masks: list[Tensor] = []  # of them, each once
        self._parts: list[pd.DataFrame] = []
        self.left_out = 0

    @contextmanager
    def batch(self, samples: int) -> Iterator[None]:
        """Run both models on a batch inside the context."""
        self._kept = []
        self._masks = []
        self._size = 0
        self._next = 0
        self._numbers.start(samples)
        yield
        if self._next != len(self._kept):
            raise InputError(
                f"{self._refused} their attention is called {len(self._kept)} and {self._next} times in a forward."
            )

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Run one of the models inside the context: calls are its own, even if it is part of the other."""
        self._running = name
        try:
            yield
        finally:
            self._running = ""

    def keep(self, call: AttentionCall) -> None:
        """Keep a copy of a call of the base."""
        if self._running != "base":
            return
        copied = own_copy(call)
        copied = replace(copied, allowed=self._shared(copied.allowed), bias=self._shared(copied.bias))
        self._size += sum(x.nbytes for x in (copied.q, copied.k, copied.v))
        masks = sum(x.nbytes for x in self._masks)
        require_memory(self._size + masks, "To keep a batch of the attention of the base (see --batch-size)")
        self._kept.append(copied)

    def _shared(self, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        for held_mask in self._masks:
            if held_mask.dtype == mask.dtype and torch.equal(held_mask, mask):
                return held_mask
        self._masks.append(mask)
        return mask

    def match(self, call: AttentionCall) -> None:
        """Compare a call of the other model with the base's."""
        if self._running != "other":
            return
        place = self._next
        self._next = self._next + 1
        if place >= len(self._kept) or (base := self._kept[place]) is None:
            return  # refused at the end, which says how many there are
        self._kept[place] = None
        variant = own_copy(call)
        if reason := mismatch(base, variant):
            raise InputError(f"{self._refused} in layer {base.layer} they have {reason}.")
        changes = head_changes(base, variant, self._top)
        columns = {name: values.cpu() for name, values in changes.items()}
        if not all(bool(values.isfinite().all()) for values in columns.values()):
            raise InputError(f"{self._refused} in layer {base.layer} a score or a value is not a finite number.")
        self.left_out += int(columns.pop("left_out").sum())
        batch, heads = columns["queries"].shape
        place_of = {"layer": base.layer, "head": list(range(heads)) * batch}
        sample = self._numbers.of(batch).repeat(heads)
        flat = {name: values.flatten().numpy() for name, values in columns.items()}
        self._parts.append(pd.DataFrame({"sample": sample, **place_of, **flat}))

    def table(self, names: dict[str, str]) -> pd.DataFrame:
        """Return the table ``compared``; rows of the same sample, such as windows, are summed up."""
        calls = pd.concat(self._parts, ignore_index=True) if self._parts else COMPARED.empty()
        calls = calls[calls["queries"] > 0]
        if calls.empty:
            raise NotAvailableError("no query attends to a key in both models")
        statistics = {name: "max" if name == "largest" else "sum" for name in SUMS[:-1]}
        rows = calls.groupby(["sample", "layer", "head"], as_index=False).agg(statistics)
        return COMPARED.of_parts([rows.assign(**names)])


def comparison_tables(
    base: LoadedModel,
    variant: LoadedModel,
    batches: Sequence[Batch],
    top: int = ComparePlan.top,
    *,
    labels: Tensor | None = None,
    device: torch.device | str | None = None,
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
    after_batch: Callable[[int], None] = lambda samples: None,
    remark: Callable[[str, str], None] = lambda text, code: None,
) -> dict[str, pd.DataFrame]:
    """Run two models on the same batches, and compare their attention, call by call, and their outputs."""
    pair = CallPairs(base.path, variant.path, top)
    with (
        running(base, pair.keep, device, dtypes[0]) as one,
        running(variant, pair.match, device, dtypes[1]) as two,
    ):
        outputs = _Outputs(one.module)
        first = 0
        for batch in batches:
            _check_batch(base, batch)
            _check_batch(variant, batch)
            on_device = batching.moved(batch, one.device, one.dtype)
            size = samples_of(batch)
            batch_labels = None if labels is None else labels[first : first + size]
            random_numbers = RandomNumbers(one.device)
            with pair.batch(size):
                with pair.of("base"):
                    before = one(batch)
                random_numbers.again()
                with pair.of("other"):
                    after = two(batch)
            outputs.add(before, after, on_device, batch_labels, first)
            first += size
            after_batch(size)
    if pair.left_out:
        text = f"{pair.left_out:,} queries attend to a key in one of the two models alone, and are left out"
        remark(text, "queries-left-out")
    for text, code in outputs.notes:
        remark(text, code)
    names = {"model": variant.path, "base": base.path}
    rows = COMPARED_OUTPUTS.of_rows({**names, **row} for row in outputs.rows)
    return {"compared": pair.table(names), "compared_outputs": rows}


def _check_batch(model: LoadedModel, batch: Batch) -> None:
    if isinstance(model.module, Encoder):
        try:
            checked_batch(model.module, batch)
        except InputError as error:
            raise InputError(f"{model.path}: {error}") from None


def measure_comparison(subject: Subject, plan: ComparePlan) -> Mapping[str, pd.DataFrame]:
    """Return the tables of a plan."""
    base = subject.model if plan.base is None else plan.base
    subject.progress.expect(sum(map(samples_of, subject.batches)))
    return comparison_tables(
        base,
        subject.model,
        subject.batches,
        plan.top,
        labels=subject.labels,
        device=subject.device,
        dtypes=(plan.dtype or subject.dtype, subject.dtype),
        after_batch=subject.progress.advance,
        remark=subject.remark,
    )


def compare_survey(
    models: Sequence[LoadedModel],
    conditions: Conditions,
    progress: SurveyProgress | None = None,
    *,
    top: int = ComparePlan.top,
    dtype: str | None = None,
) -> Measurements:
    """Measure a base and a model on the base's inputs, and compare them."""
    progress = SurveyProgress() if progress is None else progress
    base = models[-1]
    variant = models[0]
    if len(models) == 1:
        variant = replace(base, path=f"{base.path} ({dtype or 'again'})", module=copy.deepcopy(base.module))
    device = find_device(conditions.device)
    of_base = conditions.decided([base, variant], device)
    of_other = of_base if dtype is None else replace(of_base, dtype=dtype).decided([variant], device)
    inputs = Inputs(*inputs_of(base, conditions), base)
    if len(models) > 1:
        _check_tokens(base, variant, inputs, conditions)
    for model, settings in ((base, of_base), (variant, of_other)):
        if model.external:
            placed(model.module, device, DTYPES[settings.dtype])
    dtypes = DTYPES[of_base.dtype], DTYPES[of_other.dtype]
    progress.announce("one sample of both", 0)
    comparison_tables(
        base, variant, list(first_samples(inputs.batches, 1)), top, labels=inputs.labels, device=device,
        dtypes=dtypes,
    )  # fmt: skip
    without_plan = replace(of_base, plans=())
    parts = [survey([base], without_plan, progress, may_move_models=True, inputs=inputs)]
    if has_diverged(parts[0]):
        raise InputError(f"{base.path} cannot be compared: its attention scores are not finite numbers.")
    plan = ComparePlan(top, base, dtypes[0])
    with_plan = replace(of_other, plans=(plan,))
    parts.append(survey([variant], with_plan, progress, may_move_models=True, inputs=inputs))
    joined = Measurements.concat(parts)
    if joined[COMPARED].empty:
        why = joined.remarks.loc[joined.remarks["code"] == "no-compare", "text"].iloc[0]
        raise InputError(f"{variant.path} cannot be compared: {why.partition(' because ')[2]}.")
    joined.provenance.update(parts[1].provenance | parts[0].provenance)
    joined.provenance.update(model_dtype=parts[1].provenance["dtype"])
    return joined


def _check_tokens(base: LoadedModel, variant: LoadedModel, inputs: Inputs, conditions: Conditions) -> None:
    if isinstance(base.module, Encoder) and isinstance(variant.module, Encoder):
        sizes = base.module.config.vocabulary_size, variant.module.config.vocabulary_size
        texts_of = [getattr(model.training, "text", None) for model in (base, variant)]
        pieces = [getattr(text, "model", None) for text in texts_of]  # what cuts texts into tokens
        if sizes[0] != sizes[1] or pieces[0] != pieces[1]:
            raise InputError(f"{base.path} and {variant.path} cannot be compared: their token ids differ.")
    file = conditions.inputs
    texts = conditions.texts
    if file is None or file.suffix not in SUFFIXES or texts.tokenizer is not None:
        return
    if {base.source, variant.source} != {"hugging face"} or not has_tokenizer(find_folder(variant.path)):
        return
    base_tokeniser = tokeniser_of(file, base, texts)
    other_tokeniser = tokeniser_of(file, variant, replace(texts, max_length=base_tokeniser.longest))
    for number, text in enumerate(read_texts(file).texts[: sum(map(samples_of, inputs.batches))], 1):
        if not torch.equal(base_tokeniser([text])["input_ids"], other_tokeniser([text])["input_ids"]):
            raise InputError(
                f"{base.path} and {variant.path} cannot be compared: the token ids of text {number} differ. If "
                f"the model was made to read those of the base, say so: --tokenizer {find_folder(base.path)}."
            )
