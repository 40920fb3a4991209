"""Key budgets by layer and head: the table, and the budgets that keep a share of the attention weight."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch, first_samples, samples_of, without_first
from semdiag.capturing.call_strips import allowed_mask, ordered, real_first
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.rules import Keep, RandomK, Rule, TopK, TopP, Window
from semdiag.capturing.sparsify import ENGINE_KINDS, engine_rule
from semdiag.mathematics.block_estimates import block_scores
from semdiag.measuring.calls.running import running
from semdiag.measuring.table import Table, columns_of
from semdiag.measuring.words import counted
from semdiag.questions.k_sweep.rerun import NO_MASK, TOLERANCES, mean_change, measure_of, rerun
from semdiag_files import InputError

BUDGET_TABLE = Table(
    "budgets",
    "One row per budget, layer and head. k: keys, or blocks of keys if block is above 1, that each query keeps. "
    "Sums over the samples on which it was chosen: all_keys of the queries, and kept_keys, those that it keeps.",
    columns_of("model budget str; block layer head int64; module str; occurrence k all_keys kept_keys int64"),
)
BY_WEIGHT = (0.95, 0.99)  # of the attention weight
QUERIES = 0.95  # share of a head's queries for which its k must keep that weight
BLOCKS = (1, 64, 128)
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_AT_ONCE = 2**22
GREEDY = "loss"  # name of the budget that keeps the loss
Place = tuple[str, int]  # module, occurrence


@dataclass
class NeededKeys:
    """Counts how many of its largest keys, or blocks of keys, each query needs for a share of its weight."""

    min_keys: int = 1  # queries with fewer keys are left out
    layers: dict[Place, int] = field(default_factory=dict)  # number of each place
    # by place, block and level: (H, 1 + most) queries that need so many
    counts: dict[tuple[Place, int, float], NDArray[np.int64]] = field(default_factory=dict)
    ranked: dict[tuple[Place, int], NDArray[np.int64]] = field(default_factory=dict)

    def add(self, call: AttentionCall) -> None:
        """Count the queries of a call."""
        batch, heads, queries, _ = call.q.shape
        size = max(1, _AT_ONCE // (heads * queries * call.k.shape[2]))
        for at in range(0, batch, size):
            self._add(call.part(slice(at, min(at + size, batch))), call)

    def _add(self, part: AttentionCall, call: AttentionCall) -> None:
        place = call.module, call.occurrence
        self.layers.setdefault(place, call.layer)
        allowed = allowed_mask(part)
        several = part.counted & (allowed.sum(-1) >= max(1, self.min_keys))
        order = real_first(allowed.any(1).any(1), call)
        allowed = ordered(allowed, order)
        scores = ordered(part.scores(torch.float64), order)
        scores = scores.masked_fill(~allowed, -torch.inf)
        weights = scores.softmax(-1).masked_fill(~allowed, 0)
        for block in BLOCKS:
            falling = block_scores(scores, block).argsort(dim=-1, descending=True, stable=True)
            ranked = _by_block(allowed.long(), block).gather(-1, falling) * several[..., None]
            old = self.ranked.get((place, block), np.zeros((1, 1), np.int64))
            self.ranked[place, block] = _padded_sum(old, ranked.sum((0, 2)).cpu().numpy())
            if block > 1 and weights.shape[-1] <= block:
                continue
            kept = _by_block(weights, block).gather(-1, falling).cumsum(-1)
            heads = kept.shape[1]
            wide = kept.shape[-1] + 1
            first = wide * torch.arange(heads, device=kept.device)[:, None]  # of each head among all counts
            for level in LEVELS:
                need = first + 1 + (kept < level).sum(-1).clamp(max=wide - 2)
                counts = torch.bincount(need[several], minlength=heads * wide).view(heads, wide)
                old = self.counts.get((place, block, level), np.zeros((1, 1), np.int64))
                self.counts[place, block, level] = _padded_sum(old, counts.cpu().numpy())

    def smallest(self, level: float, block: int = 1) -> dict[Place, list[int]]:
        """Return the smallest k of each head with which 95% of its queries keep a share of their weight."""
        places = [place for place in self.layers if (place, block, level) in self.counts]
        shares = {place: self.counts[place, block, level].cumsum(1) for place in places}
        enough = {place: x >= QUERIES * np.maximum(x[:, -1:], 1) for place, x in shares.items()}
        return {place: [max(1, int(k)) for k in x.argmax(1)] for place, x in enough.items()}

    @property
    def blocks(self) -> list[int]:
        """Return the block sizes of which some layer has several."""
        return [block for block in BLOCKS if any(key[1] == block for key in self.counts)]

    def table(self, model: str, budgets: Mapping[tuple[str, int], Mapping[Place, Sequence[int]]]) -> pd.DataFrame:
        """Return the table of budgets."""
        rows: list[dict[str, Any]] = []
        for (name, block), budget in budgets.items():
            for place, numbers in budget.items():
                ranked = self.ranked[place, block]
                module, occurrence = place
                facts = {"model": model, "budget": name, "block": block, "layer": self.layers[place]}
                facts |= {"module": module, "occurrence": occurrence}
                for head, k in enumerate(numbers):
                    sums = {"all_keys": ranked[head].sum(), "kept_keys": ranked[head, :k].sum()}
                    rows.append({**facts, "head": head, "k": k, **sums})
        return BUDGET_TABLE.of_rows(rows)


def rules(budget: Mapping[Place, Sequence[int]], block: int = 1) -> dict[int | str | Place, TopK]:
    """Return a budget as :func:`~semdiag.capturing.sparsify.sparsify` takes it."""
    return {place: TopK(tuple(numbers), block=block) for place, numbers in budget.items()}


def _padded_sum(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    width = max(first.shape[1], second.shape[1])
    wide = (np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in (first, second))
    return np.add(*wide)


def _by_block(weights: torch.Tensor, block: int) -> torch.Tensor:
    if block == 1:
        return weights
    rest = -weights.shape[-1] % block
    return torch.nn.functional.pad(weights, (0, rest)).view(*weights.shape[:-1], -1, block).sum(-1)


_MOST_RUNS = 200  # in the search for a budget
_LEAST_HALF = 8  # samples in a half; with fewer a mean is too uncertain


def halves(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Return the samples for choosing budgets, and those for testing them."""
    samples = sum(map(samples_of, batches))
    first = list(first_samples(batches, (samples + 1) // 2))
    second = without_first(batches, sum(map(samples_of, first)))
    fewest = min(sum(map(samples_of, half)) for half in (first, second))
    if fewest < _LEAST_HALF:
        raise InputError(
            "Budgets are chosen on one half of the samples and run on the other, each of at least "
            f"{_LEAST_HALF}. Of {counted(samples, 'sample')} one half has {fewest}: give more, or no --budget."
        )
    return first, second


def search(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    labels: Tensor | None,
    tolerance: float | None,
    min_keys: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return budgets, and the model's results with them on samples that were not used to choose them."""
    first, second = halves(batches)
    head = sum(map(samples_of, first))
    first_labels = None if labels is None else labels[:head]
    second_labels = None if labels is None else labels[head:]
    needed = NeededKeys(min_keys)
    with running(loaded, needed.add, device, dtype) as run:
        for batch in first:
            run(batch)

    def cost(budget: Mapping[Place, Sequence[int]]) -> float:
        again = rerun(loaded, first, first_labels, [("budget", -1, rules(budget))], device, dtype)
        return mean_change(again, "budget", -1)[1]

    limit = tolerance or TOLERANCES[measure_of(rerun(loaded, first, first_labels, [], device, dtype))]
    named: dict[tuple[str, int], Mapping[Place, Sequence[int]]] = {}
    for level in BY_WEIGHT:
        for block in needed.blocks:
            name = f"weight-{100 * level:.0f}"
            if block > 1:
                name += f"-blocks-of-{block}"
            named[name, block] = needed.smallest(level, block)
    best = greedy(needed, cost, limit, _MOST_RUNS)
    if best is not None:
        named[GREEDY, 1] = best
    masks = [(name, -1, rules(budget, block)) for (name, block), budget in named.items()]
    tests = rerun(loaded, second, second_labels, masks, device, dtype)
    shifted = tests.assign(sample=tests["sample"] + head)
    return needed.table(loaded.path, named), shifted[shifted["mask"] != NO_MASK]


class _Ladder:
    """Budgets in which each head has its own share of the weight: its step among those of LEVELS."""

    def __init__(self, needed: NeededKeys) -> None:
        self.budgets = [needed.smallest(level) for level in LEVELS]

    def places(self) -> list[tuple[Place, int]]:
        """Return every head, as a place and a number there."""
        return [(place, head) for place, numbers in self.budgets[0].items() for head in range(len(numbers))]

    def k_at(self, head: tuple[Place, int], step: int) -> int:
        """Return a head's k; below the first step it is 1."""
        place, number = head
        return 1 if step < 0 else self.budgets[step][place][number]

    def budget(self, steps: Mapping[tuple[Place, int], int]) -> dict[Place, list[int]]:
        """Return the k of every head at its step."""
        return {
            place: [self.k_at((place, head), steps[place, head]) for head in range(len(numbers))]
            for place, numbers in self.budgets[0].items()
        }

    def moved(
        self, steps: Mapping[tuple[Place, int], int], head: tuple[Place, int], by: int
    ) -> dict[tuple[Place, int], int]:
        """Move a head to the next step at which it has another k, if there is one."""
        step = steps[head]
        while self.k_at(head, step) == self.k_at(head, steps[head]) and step + by < len(self.budgets):
            step += by
        return {**steps, head: step}


def greedy(
    needed: NeededKeys,
    cost: Callable[[Mapping[Place, Sequence[int]]], float],
    tolerance: float,
    most_runs: int,
    *,
    margin: bool = True,
) -> dict[Place, list[int]] | None:
    """Return a budget with a small total whose cost is within a tolerance."""
    ladder = _Ladder(needed)
    start = next((step for step, budget in enumerate(ladder.budgets) if cost(budget) <= tolerance), None)
    if start is None:
        return None
    runs = start + 1
    steps = dict.fromkeys(ladder.places(), start)
    fixed: set[tuple[Place, int]] = set()
    while runs < most_runs:
        ks = {head: ladder.k_at(head, step) for head, step in steps.items() if head not in fixed}
        largest = max(ks, key=ks.__getitem__, default=None)
        if largest is None or ks[largest] <= 1:
            break
        lower = ladder.moved(steps, largest, -1)
        runs += 1
        if cost(ladder.budget(lower)) <= tolerance:
            steps = lower
        else:
            fixed.add(largest)
    if margin:
        for head in fixed:
            steps = ladder.moved(steps, head, 1)
    return ladder.budget(steps)


TOP_K = "topk"
RANDOM = "random"
SINKS = 4  # first keys that a window keeps, as in StreamingLLM
SHARES = 0.8, 0.9, 0.95, 0.99  # shares of the weight that top-p keeps
# Described in docs/commands/k-sweep.md; in the order of tables.
KINDS = (
    TOP_K, "topk-group", "topk-layer", "topk-4-layers", "block-16", "block-32", "block-64", "window", "topp",
    RANDOM,
)  # fmt: skip
OF_ENGINES = "tile-", "skip-"  # begins of kinds: see semdiag.capturing.sparsify.engine_rule
OWN_KINDS = TOP_K, RANDOM  # the kinds of a run without --kinds
EXTERNAL_KINDS = TOP_K, "topk-layer", "block-16", "window", RANDOM


def rule_of(kind: str, k: int, seed: int) -> Rule | None:
    """Return the rule by which a kind keeps k keys; None if it has none for so few."""
    if kind == RANDOM:
        return RandomK(k, seed)
    if kind.startswith(OF_ENGINES):
        return engine_rule(kind, k)
    if kind == "window":
        return Window(k, SINKS) if k > SINKS else None
    if kind.startswith("block-"):
        block = int(kind.removeprefix("block-"))
        return TopK(k // block, block=block, by="mean") if k >= block else None
    choices = {"topk-group": ("group", 1), "topk-layer": ("layer", 1), "topk-4-layers": ("layer", 4)}
    heads, layers = choices.get(kind, ("head", 1))  # that choose together
    return TopK(k, shared=heads, every=layers)  # type: ignore[arg-type]


def masks_of(
    ks: Sequence[int],
    seed: int,
    kinds: Sequence[str] = OWN_KINDS,
    named_kinds: Sequence[str] = (),
    remark: Callable[[str, str], None] | None = None,
) -> list[tuple[str, int, Keep]]:
    """Return name, k and rule of every mask, by kind; for top-p, k is its share of the weight in percent."""
    masks: list[tuple[str, int, Keep]] = []
    engine_kinds = [kind for kind in kinds if kind.startswith(OF_ENGINES)]
    for kind in [*(kind for kind in KINDS if kind in kinds), *engine_kinds]:
        ruled = _ruled(kind, ks, seed)
        if not ruled and kind in named_kinds:
            least = next(k for k in count(1) if rule_of(kind, k, seed) is not None)
            if remark is None:
                raise InputError(f"{kind} needs k of at least {least}. Got {', '.join(map(str, ks))}.")
            text = f"{kind} is left out: it needs k of at least {least}, and {max(ks)} is the largest"
            remark(text, "k-left-out")
        masks += [(kind, k, rule) for k, rule in ruled]
    return masks


def _ruled(kind: str, ks: Sequence[int], seed: int) -> list[tuple[int, Keep]]:
    """Return the k and the rules of a kind; none for a k that is too small for it."""
    if kind.startswith("skip-"):  # by its threshold alone
        skipping = engine_rule(kind, 1)
        return [] if skipping is None else [(0, skipping)]
    if kind == "topp":
        return [(round(100 * share), TopP(share)) for share in SHARES]
    rules_by_k = {k: rule_of(kind, k, seed) for k in ks}
    return [(k, rule) for k, rule in rules_by_k.items() if rule is not None]


def check_kinds(kinds: Sequence[str]) -> None:
    """Refuse a kind that does not exist."""
    for kind in kinds:
        if kind.startswith(OF_ENGINES):
            engine_rule(kind, 2**30)  # refuses a wrong one
        elif kind not in KINDS:
            every = f"{', '.join(KINDS)}, {ENGINE_KINDS}"
            raise InputError(f"There is no kind of sparse attention {kind!r}. Kinds: {every}.")
