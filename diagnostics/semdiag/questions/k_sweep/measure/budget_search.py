"""Budgets by layer and head: chosen on one half of the samples, tested on the other."""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.batches import Batch, first_samples, samples_of, without_first
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.running import running
from semdiag.questions.k_sweep.measure.key_budgets import (
    BY_MASS,
    GREEDY,
    LEVELS,
    NeededKeys,
    Place,
    budget_name,
    rules,
)
from semdiag.questions.k_sweep.measure.passes import NO_MASK
from semdiag.questions.k_sweep.measure.rerun import TOLERANCES, measure_of, rerun, upper_change
from semdiag_models import InputError

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
            f"{_LEAST_HALF}. Of {samples} samples one half has {fewest}: give more, or leave out --budget."
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
    known, others = (None, None) if labels is None else (labels[:head], labels[head:])
    needed = NeededKeys(min_keys)
    with running(loaded, needed.add, device, dtype) as run:
        for batch in first:
            run(batch)

    def cost(budget: Mapping[Place, Sequence[int]]) -> float:
        again = rerun(loaded, first, known, [("budget", -1, rules(budget))], device, dtype)
        return upper_change(again, "budget", -1)

    limit = tolerance or TOLERANCES[measure_of(rerun(loaded, first, known, [], device, dtype))]
    named: dict[tuple[str, int], Mapping[Place, Sequence[int]]] = {}
    for level in BY_MASS:
        for block in needed.blocks:
            named[budget_name(level, block), block] = needed.smallest(level, block)
    best = greedy(needed, cost, limit, _MOST_RUNS)
    if best is not None:
        named[GREEDY, 1] = best
    masks = [(name, -1, rules(budget, block)) for (name, block), budget in named.items()]
    tests = rerun(loaded, second, others, masks, device, dtype)
    shifted = tests.assign(sample=tests["sample"] + head)
    return needed.table(loaded.path, named), shifted[shifted["mask"] != NO_MASK]


def greedy(
    needed: NeededKeys,
    cost: Callable[[Mapping[Place, Sequence[int]]], float],
    tolerance: float,
    most_runs: int,
    *,
    margin: bool = True,
) -> dict[Place, list[int]] | None:
    """Return a budget with a small total whose cost is within a tolerance."""
    ladder = [needed.smallest(level) for level in LEVELS]
    runs, start = 0, None
    for step, budget in enumerate(ladder):
        runs += 1
        if cost(budget) <= tolerance:
            start = step
            break
    if start is None:
        return None
    at = {(place, head): start for place, numbers in ladder[0].items() for head in range(len(numbers))}

    def budget_of(steps: Mapping[tuple[Place, int], int]) -> dict[Place, list[int]]:
        return {
            place: [1 if steps[place, h] < 0 else ladder[steps[place, h]][place][h] for h in range(len(numbers))]
            for place, numbers in ladder[0].items()
        }

    def moved(one: tuple[Place, int], by: int) -> dict[tuple[Place, int], int]:
        """Lower a head to the next share at which it has another k, if there is one."""
        steps, (place, head) = dict(at), one
        now = budget_of(at)[place][head]
        while budget_of(steps)[place][head] == now and steps[one] + by < len(ladder):
            steps[one] += by
        return steps

    fixed: set[tuple[Place, int]] = set()
    while runs < most_runs:
        now = budget_of(at)
        free = [one for one in at if one not in fixed and now[one[0]][one[1]] > 1]
        if not free:
            break
        one = max(free, key=lambda one: now[one[0]][one[1]])
        lower = moved(one, -1)
        runs += 1
        if cost(budget_of(lower)) <= tolerance:
            at = lower
        else:
            fixed.add(one)
    for one in fixed if margin else ():
        at = moved(one, 1)
    return budget_of(at)
