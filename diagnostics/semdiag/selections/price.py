"""What fitted indexers keep on other texts, and what their choices cost, beside top-k, window and random."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch
from semdiag.capturing.call_strips import allowed_mask
from semdiag.capturing.choices import choice_of
from semdiag.capturing.kept_keys import all_kept
from semdiag.capturing.rules import ByIndexer, Keep, RandomK, Rule, TopK, Window, rule_for
from semdiag.capturing.sparsify import sparsify
from semdiag.measuring.outputs import IGNORED, Reader
from semdiag.selections.dense import row_weights
from semdiag.selections.learned import attention_target, calls_of, divergence, name_of_call
from semdiag_files import InputError
from semdiag_models.selection import Indexer

NO_MASK = "none"
MASKS = "indexer", "topk", "topk-layer", "window", "random"
_SINKS = 4  # first keys that a window keeps
_ROWS = 256  # queries whose weights are made at a time
_SUMS = ["kept", "recall", "divergence", "rows"]


@dataclass(frozen=True, eq=False)
class IndexerPrice:
    """What indexers keep on texts, and what they cost.

    Attributes:
        heads: by module, head and mask: rows, the number of queries with more than k allowed keys; kept, the mean
            weight on the mask's keys; recall, the mean share of the head's own top-k among them; divergence of
            the indexer from the layer's attention, nats.
        masks: by mask: sum of the loss (nats) and number of targets.
        width: of the indexers.
    """

    heads: pd.DataFrame
    masks: pd.DataFrame
    width: int

    @property
    def share(self) -> float:
        """Weight that the indexers keep, relative to each head's own top-k."""
        means = self.heads.groupby("mask")["kept"].mean()
        return float(means["indexer"] / means["topk"])

    @property
    def divergence(self) -> float:
        """Mean divergence over layers, nats."""
        return float(self.heads.groupby("module")["divergence"].first().mean())

    def loss(self, mask: str) -> float:
        """Return the mean loss with a mask, nats a target."""
        return float(self.masks["loss"][mask] / self.masks["targets"][mask])

    def perplexity(self, mask: str) -> float:
        """Return the relative change of the perplexity by a mask."""
        change = self.loss(mask) - self.loss(NO_MASK)
        return math.expm1(change) if change < math.log(1e300) else math.inf


class _Pricing:
    """Runs a model on texts as it is, and with each mask."""

    def __init__(self, model: nn.Module, indexers: Mapping[str, Indexer], k: int, seed: int) -> None:
        self._model = model
        self._indexers = indexers
        self._k = k
        self._choices: dict[int | str | tuple[str, int], Rule] = {}
        self._masks: dict[str, Keep] = {
            "indexer": self._choices,
            "topk": TopK(k),
            "topk-layer": TopK(k, shared="layer"),
            "window": Window(k, min(_SINKS, k - 1)),
            "random": RandomK(k, seed),
        }
        self._reader: Reader | None = None

    def _run(self, batch: Batch) -> Any:
        return batching.call(self._model, batch)

    def take_calls(self, batch: Batch) -> Iterator[pd.DataFrame]:
        """Learn which attention there is, and yield what the masks keep of it."""
        for call in calls_of(self._model, batch):
            place = name_of_call(call)
            if place not in self._indexers:
                raise InputError(f"{place} has no indexer; fitted were {', '.join(self._indexers)}.")
            indexer = self._indexers[place]
            self._choices[call.module, call.occurrence] = ByIndexer(self._k, scorer(indexer))
            for sample in range(len(call.q)):
                yield from self._kept(call.part(slice(sample, sample + 1)), indexer)

    @torch.no_grad()
    def _kept(self, part: AttentionCall, indexer: Indexer) -> Iterator[pd.DataFrame]:
        """Yield sums over the queries of a sample with more than k allowed keys, a row for each head and mask."""
        allowed, rows = _choosing_rows(part, self._k)
        if not len(rows):
            return
        kept_keys = {name: _mask_of(rule_for(keep, part), part, allowed) for name, keep in self._masks.items()}
        for some in torch.split(rows, _ROWS):
            weights = row_weights(part, some, allowed)
            diverged = _diverged(part, indexer, some, weights, allowed)
            best = kept_keys["topk"][:, some]
            for name, mask in kept_keys.items():
                chosen = mask[:, some]
                yield pd.DataFrame(
                    {
                        "module": name_of_call(part),
                        "head": range(len(weights)),
                        "mask": name,
                        "kept": (weights * chosen).sum((-2, -1)).numpy(),
                        "recall": (best & chosen).sum((-2, -1)).numpy() / self._k,
                        "divergence": diverged * len(some),
                        "rows": len(some),
                    }
                )

    @torch.no_grad()
    def losses(self, batch: Batch) -> Iterator[tuple[str, float, int]]:
        """Yield the loss without and with each mask: name, sum, number of targets."""
        self._reader = self._reader or Reader(self._model, batch, None, self._run)
        yield NO_MASK, *loss_of(self._reader, self._run(batch), batch)
        for name, keep in self._masks.items():
            with sparsify(self._model, keep):
                output = self._run(batch)
            yield name, *loss_of(self._reader, output, batch)


def _choosing_rows(part: AttentionCall, k: int) -> tuple[Tensor, Tensor]:
    """Return which keys the queries of a sample may attend to, (Lq, Lk), and which of them have more than k."""
    allowed = allowed_mask(part)[0].any(0).cpu()
    return allowed, (part.counted[0, 0].cpu() & (allowed.sum(1) > k)).nonzero().squeeze(1)


def _diverged(part: AttentionCall, indexer: Indexer, rows: Tensor, weights: Tensor, allowed: Tensor) -> float:
    """Return the mean divergence of an indexer from the attention of some queries of a sample, nats."""
    scores = scorer(indexer)(part.q[:, :, rows.to(part.q.device)], part.k)[0].cpu()
    return float(divergence(attention_target(weights), scores, allowed[rows]))


@torch.no_grad()
def divergence_of(model: nn.Module, indexers: Mapping[str, Indexer], batches: Sequence[Batch], k: int) -> float:
    """Return the mean divergence over layers, nats, as :attr:`IndexerPrice.divergence`, without any mask."""
    sums: dict[str, float] = defaultdict(float)
    numbers: dict[str, int] = defaultdict(int)
    for batch in batches:
        for call in calls_of(model, batch):
            place = name_of_call(call)
            for sample in range(len(call.q)):
                part = call.part(slice(sample, sample + 1))
                allowed, rows = _choosing_rows(part, k)
                for some in torch.split(rows, _ROWS) if len(rows) else ():
                    weights = row_weights(part, some, allowed)
                    sums[place] += len(some) * _diverged(part, indexers[place], some, weights, allowed)
                    numbers[place] += len(some)
    means = [sums[place] / numbers[place] for place in sums]
    return sum(means) / len(means)


def check_model(model: nn.Module, batch: Batch, k: int) -> float:
    """Refuse a model of which indexers have no price, as :func:`price_of_indexers` would; return a run's seconds.

    Raises:
        InputError: if its attention is not known or not finite, no query has more than k keys, or it has no loss.
    """
    calls = calls_of(model, batch)
    for call in calls:
        if not bool(call.q.isfinite().all() and call.k.isfinite().all()):
            raise InputError(f"queries and keys of {call.module or 'the model'} are not finite.")
    if not any(len(_choosing_rows(call.part(slice(0, 1)), k)[1]) for call in calls):
        raise InputError(f"no query has more than k = {k} keys to choose from: take a smaller k.")
    with torch.no_grad():
        reader = Reader(model, batch, None, partial(batching.call, model))
        begun = time.monotonic()
        output = batching.call(model, batch)
        seconds = time.monotonic() - begun
    loss, targets = loss_of(reader, output, batch)
    if not targets or not math.isfinite(loss):
        raise InputError(f"the model's loss on {targets} targets is {loss}, without any mask.")
    return seconds


def _mask_of(rule: Rule, part: AttentionCall, allowed: Tensor) -> Tensor:
    """Return the keys that a rule keeps in a sample, (H, Lq, Lk) or broadcastable to it."""
    kept_keys = all_kept(choice_of(rule, part))
    return allowed[None] if kept_keys is None else kept_keys[0][0].cpu()


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
        indexers: by module, as :class:`~semdiag.selections.learned.IndexerFit` has them.
        batches: inputs of the model; targets are their next tokens, or their labels.
        k: number of keys that each query keeps.
        seed: random seed for the random keys.
        after_batch: called after each batch.

    Raises:
        InputError: if a module has no indexer, no query has more than k keys, or there are no targets.
    """
    pricing = _Pricing(model, indexers, k, seed)
    rows: list[pd.DataFrame] = []
    losses: list[tuple[str, float, int]] = []
    for batch in batches:
        rows += pricing.take_calls(batch)
        losses += pricing.losses(batch)
        after_batch()
    if not rows:
        raise InputError(f"No query has more than k = {k} keys to choose from: take longer texts, or a smaller k.")
    places = ["module", "head", "mask"]
    heads = pd.concat(rows, ignore_index=True).groupby(places, sort=False)[_SUMS].sum().reset_index()
    for name in ("kept", "recall", "divergence"):
        heads[name] /= heads["rows"]
    masks = pd.DataFrame(losses, columns=["mask", "loss", "targets"]).groupby("mask", sort=False).sum()
    return IndexerPrice(heads, masks, next(iter(indexers.values())).width)


def scorer(indexer: Indexer) -> Callable[[Tensor, Tensor], Tensor]:
    """Return an indexer as a function of queries and keys on any device."""

    @torch.no_grad()
    def score(q: Tensor, k: Tensor) -> Tensor:
        scores: Tensor = indexer(q.cpu().float(), k.cpu().float(), None)
        return scores.to(q.device)

    return score


def loss_of(reader: Reader, output: Any, batch: Batch) -> tuple[float, int]:
    """Return the sum of the cross-entropy over the targets of a batch, nats, and their number.

    Raises:
        InputError: if there are no targets.
    """
    answers = reader.read(output, batch, None)
    if answers.targets is None:
        raise InputError("The price of an indexer is a loss: take a language model, or inputs with labels.")
    values = answers.values.flatten(0, 1).float()
    targets = answers.targets.flatten()
    loss = float(F.cross_entropy(values, targets, ignore_index=IGNORED, reduction="sum"))
    return loss, int((targets != IGNORED).sum())
