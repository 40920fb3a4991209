"""What would an indexer cost? Small ones are fitted to a frozen model's attention, and tried on other texts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.batches import Batch
from semdiag.capturing.call_strips import allowed_mask
from semdiag.capturing.rules import ByIndexer, Keep, RandomK, Rule, TopK, Window
from semdiag.capturing.sparsify import sparsify
from semdiag.measuring.outputs import IGNORED, Reader
from semdiag.selections.arrays import array_names, read_arrays
from semdiag.selections.dense import kept_in_rows, row_weights
from semdiag.selections.files import require_suffix, write_output
from semdiag_files import InputError
from semdiag_models.selection import Indexer

NO_MASK = "none"
_SINKS = 4  # first keys that a window keeps
_APART = "|"  # between the names of a module and of a tensor in a file
_MOMENTS = "exp_avg", "exp_avg_sq"  # of Adam, beside its step
_TEXTS = "fit|texts"
_OPTIONS = "fit|options"


@dataclass(frozen=True)
class FitOptions:
    """How indexers are fitted; one a layer, whose score is Σ_h w_h · ReLU(q_h · k / √width)."""

    width: int = 64  # of its queries and keys
    heads: int = 4  # of its queries; the keys have one
    passes: int = 8  # steps of Adam a text and layer
    rows: int = 256  # queries of each step, drawn
    rate: float = 0.003  # of Adam
    seed: int = 0  # of the first weights and of the drawn queries

    def __post_init__(self) -> None:
        if min(self.width, self.heads, self.passes, self.rows) < 1 or not self.rate > 0:
            raise InputError(f"Width, heads, passes, rows and rate of an indexer are above 0. Got {self}.")


@dataclass
class IndexerFit:
    """Fits an indexer to each layer of a model's attention, text by text.

    The target of query t is its attention, summed over heads and divided by its sum; the loss is
    KL(target ‖ softmax of the indexer's scores over the allowed keys). The model is frozen.

    Source: the warm-up of DeepSeek-V3.2's indexer. Deviation: it reads the layer's queries and keys (with their
    rotation) instead of hidden states.

    Attributes:
        options: how it fits.
        indexers: by module; of a module that attends several times, by ``module#1``, ``module#2`` … besides.
        texts: number of batches so far.
        losses: mean loss of the last batch by module, nats.

    Example:
        >>> from semdiag_models import Encoder, ModelConfig
        >>> model = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=6, blocks=1, heads=2)).eval()
        >>> fit = IndexerFit(FitOptions(width=4, heads=1))
        >>> fit.add(model, torch.tensor([[0, 1, 1, 0, 1, 0]]))
        >>> list(fit.indexers), fit.texts
        (['blocks.0.attention.core'], 1)
    """

    options: FitOptions = field(default_factory=FitOptions)
    indexers: dict[str, Indexer] = field(default_factory=dict)
    texts: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    _optimisers: dict[str, torch.optim.Adam] = field(default_factory=dict)

    def add(self, model: nn.Module, batch: Batch) -> None:
        """Run the model on a batch, and move every layer's indexer towards its attention.

        Raises:
            InputError: if the model has no attention with known queries and keys.
        """
        for number, call in enumerate(_calls_of(model, batch)):
            indexer = self._indexer(call, number)
            draws = np.random.SeedSequence([self.options.seed, self.texts, number]).generate_state(1)
            with torch.enable_grad():
                self.losses[name_of_call(call)] = self._step(indexer, call, int(draws[0]))
        self.texts += 1

    def _indexer(self, call: AttentionCall, number: int) -> Indexer:
        place = name_of_call(call)
        if place not in self.indexers:
            _, heads, _, head_width = call.q.shape
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.options.seed * 10_007 + number)
                shape = heads, head_width
                indexer = Indexer(shape, call.k.shape[1], self.options.width, self.options.heads)
            self._take(place, indexer)
        return self.indexers[place]

    def _take(self, place: str, indexer: Indexer) -> None:
        self.indexers[place] = indexer
        self._optimisers[place] = torch.optim.Adam(indexer.parameters(), self.options.rate)

    def _step(self, indexer: Indexer, call: AttentionCall, seed: int) -> float:
        draws = torch.Generator().manual_seed(seed)
        optimiser = self._optimisers[name_of_call(call)]
        losses = []
        for sample in range(len(call.q)):
            part = call.part(slice(sample, sample + 1))
            allowed = allowed_mask(part)[0].any(0).cpu()
            counted = (part.counted[0, 0].cpu() & allowed.any(1)).nonzero().squeeze(1)
            if not len(counted):
                continue
            target = row_weights(part, counted, allowed).sum(0)
            target = (target / target.sum(-1, keepdim=True)).float()
            for _ in range(self.options.passes):
                places = torch.randperm(len(counted), generator=draws)[: self.options.rows]
                rows = counted[places]
                scores = indexer(part.q[:, :, rows].cpu().float(), part.k.cpu().float(), None)[0]
                loss = divergence(target[places], scores, allowed[rows])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                losses.append(float(loss.detach()))
        return sum(losses) / max(1, len(losses))

    def save(self, path: Path) -> None:
        """Write indexers, and where the fit stands, to a .safetensors file.

        Raises:
            InputError: if the file has another suffix, or cannot be written.
        """
        from safetensors.torch import save

        require_suffix(path, "Indexers", ".safetensors")
        tensors = {_TEXTS: torch.tensor([self.texts]), _OPTIONS: _numbers(self.options)}
        for module, indexer in self.indexers.items():
            for name, parameter in indexer.named_parameters():
                place = f"{module}{_APART}{name}"
                tensors[place] = parameter.detach()
                state = self._optimisers[module].state[parameter]
                if state:
                    tensors[f"{place}{_APART}step"] = state["step"].reshape(1)
                    tensors |= {f"{place}{_APART}{moment}": state[moment] for moment in _MOMENTS}
        write_output(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))

    @classmethod
    def load(cls, path: Path, options: FitOptions | None = None) -> "IndexerFit":
        """Read what :meth:`save` wrote; the fit goes on as if it had not been interrupted.

        Args:
            path: the file.
            options: those that the file must have been fitted with; None: whatever they are.

        Raises:
            InputError: if the file holds no such indexers, or others than ``options`` say.
        """
        arrays = read_arrays(path, array_names(path))
        numbers = [arrays.get(name, torch.empty(0)).flatten().double() for name in (_OPTIONS, _TEXTS)]
        sizes = [len(each) for each in numbers]
        if sizes != [len(astuple(FitOptions())), 1] or not bool(torch.cat(numbers).isfinite().all()):
            raise InputError(f"{path} holds no fitted indexers. IndexerFit.save writes them.")
        width, heads, passes, rows, rate, seed = numbers[0].tolist()
        stored = FitOptions(int(width), int(heads), int(passes), int(rows), rate, int(seed))
        if options is not None and options != stored:
            raise InputError(f"{path} was fitted with {stored}. Got {options}: take another file, or the same.")
        fit = cls(stored, texts=int(numbers[1]))
        for module in dict.fromkeys(name.partition(_APART)[0] for name in arrays if not name.startswith("fit|")):
            fit._restore(path, module, arrays)
        return fit

    def _restore(self, path: Path, module: str, arrays: Mapping[str, Tensor]) -> None:
        inside = {name.partition(_APART)[2]: tensor for name, tensor in arrays.items() if _of(name, module)}
        try:
            heads, queries = inside["weight.weight"].shape
            width, keys = inside["key.weight"].shape
            indexer = Indexer((queries // keys, keys), 1, width, heads)
            state = {name: inside[name] for name, _ in indexer.named_parameters()}
            indexer.load_state_dict({**state, "steps": torch.zeros(())})
        except (KeyError, ValueError, RuntimeError, ZeroDivisionError) as error:
            reason = str(error).split("\n", 1)[0][:120]
            raise InputError(f"{path} holds no whole indexer of {module} ({reason}).") from None
        if not all(bool(parameter.isfinite().all()) for parameter in indexer.parameters()):
            raise InputError(f"{path}: the indexer of {module} holds numbers that are not finite.")
        self._take(module, indexer)
        for name, parameter in indexer.named_parameters():
            place = f"{name}{_APART}"
            if f"{place}step" not in inside:
                continue
            moments = {moment: inside.get(f"{place}{moment}", torch.empty(0)) for moment in _MOMENTS}
            step = inside[f"{place}step"]
            if step.numel() != 1 or any(moment.shape != parameter.shape for moment in moments.values()):
                raise InputError(f"{path}: the optimiser's state of {module} does not fit its indexer.")
            self._optimisers[module].state[parameter] = {"step": step.reshape(()).float(), **moments}


def _of(name: str, module: str) -> bool:
    return name.startswith(f"{module}{_APART}")


def _numbers(options: FitOptions) -> Tensor:
    return torch.tensor(astuple(options), dtype=torch.float64)


def divergence(target: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
    """Return the mean over rows of KL(target ‖ softmax of the scores over allowed keys), nats.

    Args:
        target: (R, L) weights, each row's sum 1, zero where forbidden.
        scores: (R, L).
        allowed: (R, L) bool.

    Example:
        >>> even = torch.full((1, 2), 0.5)
        >>> round(float(divergence(even, torch.tensor([[0.0, math.log(3)]]), even > 0)), 4)  # ln 2 − ½ ln 3
        0.1438
    """
    logarithms = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).log_softmax(-1)
    return (target.xlogy(target) - target * logarithms).sum(-1).mean()


def _calls_of(model: nn.Module, batch: Batch) -> list[AttentionCall]:
    """Run a model without gradients, and return its calls of attention whose queries and keys are known."""
    calls: list[AttentionCall] = []
    with torch.no_grad(), watch_attention(model, calls.append):
        batching.call(model, batch)
    factored = [call for call in calls if call.factored]
    if not factored:
        raise InputError("An indexer is fitted to attention with queries and keys, and this model shows none.")
    return factored


def name_of_call(call: AttentionCall) -> str:
    """Return the name under which an indexer of a call stands."""
    return f"{call.module}#{call.occurrence}" if call.occurrence else call.module


@dataclass(frozen=True, eq=False)
class IndexerPrice:
    """What indexers keep on texts, and what they cost.

    Attributes:
        heads: by module and head, means over queries with more than k allowed keys, as in
            :func:`~semdiag.selections.dense.kept_of_dense`: kept, oracle, window, top1, recall.
        masks: by mask: sum of the loss (nats) and number of targets.
        width: of the indexers.
    """

    heads: pd.DataFrame
    masks: pd.DataFrame
    width: int

    @property
    def share(self) -> float:
        """Weight that the indexers keep, relative to each head's own top-k."""
        return float(self.heads["kept"].mean() / self.heads["oracle"].mean())

    def perplexity(self, mask: str) -> float:
        """Return the relative change of the perplexity by a mask."""
        losses = self.masks["loss"] / self.masks["targets"]
        return math.expm1(losses[mask] - losses[NO_MASK])

    def __str__(self) -> str:
        """Return the answer in one line."""
        costs = f"costs {self.perplexity('indexer'):.1%} perplexity where exact top-k of each head costs"
        head = self.perplexity("topk")
        layer = self.perplexity("topk-layer")
        keeps = f"An indexer of {self.width} dimensions keeps {self.share:.0%} of what each head's top-k keeps"
        return f"{keeps} and {costs} {head:.1%}, of each layer {layer:.1%}."


def price_of_indexers(
    model: nn.Module,
    indexers: Mapping[str, Indexer],
    batches: Sequence[Batch],
    k: int,
    seed: int = 0,
    after_batch: Callable[[], None] = lambda: None,
) -> IndexerPrice:
    """Run a frozen model with its indexers' choices, on texts that they were not fitted to.

    The masks beside it: exact top-k of each head, and of each layer; the newest keys and four first ones; random.

    Args:
        model: in evaluation mode.
        indexers: by module, as :class:`IndexerFit` has them.
        batches: inputs of the model; targets are their next tokens, or their labels.
        k: number of keys that each query keeps.
        seed: random seed for the random keys.
        after_batch: called after each batch.

    Raises:
        InputError: if a module has no indexer, no query has more than k keys, or there are no targets.
    """
    choices: dict[int | str | tuple[str, int], Rule] = {}
    masks: dict[str, Keep] = {
        "indexer": choices,
        "topk": TopK(k),
        "topk-layer": TopK(k, shared="layer"),
        "window": Window(k, min(_SINKS, k - 1)),
        "random": RandomK(k, seed),
    }
    rows: list[pd.DataFrame] = []
    losses: list[tuple[str, float, int]] = []
    reader: Reader | None = None

    def run(batch: Batch) -> Any:
        return batching.call(model, batch)

    for batch in batches:
        for call in _calls_of(model, batch):
            place = name_of_call(call)
            if place not in indexers:
                raise InputError(f"{place} has no indexer; fitted were {', '.join(indexers)}.")
            choices[call.module, call.occurrence] = ByIndexer(k, _scorer(indexers[place]))
            rows += _kept(call, indexers[place], k)
        with torch.no_grad():
            reader = reader or Reader(model, batch, None, run)
            losses.append((NO_MASK, *_loss(reader, run(batch), batch)))
            for name, keep in masks.items():
                with sparsify(model, keep):
                    output = run(batch)
                losses.append((name, *_loss(reader, output, batch)))
        after_batch()
    if not rows:
        raise InputError(f"No query has more than k = {k} keys to choose from: take longer texts, or a smaller k.")
    heads = pd.concat(rows, ignore_index=True).groupby(["module", "head"], sort=False).mean().reset_index()
    sums = pd.DataFrame(losses, columns=["mask", "loss", "targets"]).groupby("mask", sort=False).sum()
    return IndexerPrice(heads, sums, next(iter(indexers.values())).width)


def _scorer(indexer: Indexer) -> Callable[[Tensor, Tensor], Tensor]:
    @torch.no_grad()
    def score(q: Tensor, k: Tensor) -> Tensor:
        scores: Tensor = indexer(q, k, None)
        return scores

    return score


@torch.no_grad()
def _kept(call: AttentionCall, indexer: Indexer, k: int) -> list[pd.DataFrame]:
    """Return what an indexer's choice keeps of the weights of a call, a table for each sample."""
    tables = []
    for sample in range(len(call.q)):
        part = call.part(slice(sample, sample + 1))
        allowed = allowed_mask(part)[0].any(0).cpu()
        rows = (part.counted[0, 0].cpu() & (allowed.sum(1) > k)).nonzero().squeeze(1)
        if not len(rows):
            continue
        scores = indexer(part.q[:, :, rows].cpu().float(), part.k.cpu().float(), None)[0]
        order = scores.masked_fill(~allowed[rows], -torch.inf).sort(descending=True, stable=True).indices
        choice = torch.zeros_like(allowed[rows]).scatter_(1, order[:, :k], True)
        weights = row_weights(part, rows, allowed)
        tables.append(kept_in_rows(weights, choice, allowed[rows], k).assign(module=name_of_call(call)))
    return tables


def _loss(reader: Reader, output: Any, batch: Batch) -> tuple[float, int]:
    """Return the sum of the cross-entropy over the targets of a batch, nats, and their number."""
    answers = reader.read(output, batch, None)
    if answers.targets is None:
        raise InputError("The price of an indexer is a loss: take a language model, or inputs with labels.")
    values = answers.values.flatten(0, 1).float()
    targets = answers.targets.flatten()
    loss = F.cross_entropy(values, targets, ignore_index=IGNORED, reduction="sum")
    return float(loss), int((targets != IGNORED).sum())
