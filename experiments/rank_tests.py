"""False alarms, coverage and power of the joint rank tests (experiments/study.md), from simulated studies.

A study has tasks × masks × seeds. The outcome of a run is a mask's effect that all tasks share, plus one of the
cell task × mask, plus one of the run; a candidate is a mask's value plus a cell's. Variances are shares of the
outcome's: a pilot says which. Effects of outcome and candidate have correlation r: 0 under the nulls. Masks may
come in families, whose members' effects and values have a part in common (experiments/families.py estimates how
much).

    python experiments/rank_tests.py nulls
    python experiments/rank_tests.py families --masks 15 --candidates 1
    python experiments/rank_tests.py unequal --repeats 300
    python experiments/rank_tests.py power --tasks 7 --masks 18 --seeds 3 --mask-share 0.5 --cell-share 0.3
"""

import argparse
import math
from dataclasses import dataclass, replace

import numpy as np
from joint_permutation import Matrix, joint_rank_tests

LEVEL = 0.05


@dataclass(frozen=True)
class Study:
    """Sizes and variances of simulated studies."""

    tasks: int
    masks: int
    seeds: int
    candidates: int
    mask_share: float  # of the outcome's variance over runs, in effects of masks that all tasks share
    cell_share: float  # in effects of task × mask; the rest is the seeds'
    candidate_share: float  # of a candidate's variance, in values of masks that all tasks share
    correlation: float = 0.0  # of the first candidate's effects with the outcome's; the others have none
    missing: float = 0.0  # share of cells of which the outcome is unknown
    censored: float = 0.0  # share of cells, the slowest of each task, that count as equally slow
    families: tuple[int, ...] = ()  # masks of each; () : every mask is one of its own
    outcome_family: float = (
        0.0  # of the variance of masks' effects on the outcome, what their families have in common
    )
    value_family: float = 0.0  # the same of the candidates' values

    def draw(self, rng: np.random.Generator) -> tuple[Matrix, Matrix]:
        """Outcomes (T, M) and candidates (C, T, M)."""
        shape = self.tasks, self.masks
        own, of_cell = self._of_masks(rng, 1, self.outcome_family)[0], rng.normal(size=shape)
        seed_share = max(0.0, 1 - self.mask_share - self.cell_share) / self.seeds
        outcome = math.sqrt(self.mask_share) * own + math.sqrt(self.cell_share) * of_cell
        outcome = outcome + math.sqrt(seed_share) * rng.normal(size=shape)
        r = np.zeros(self.candidates)
        r[0] = self.correlation
        value = r[:, None] * own + np.sqrt(1 - r * r)[:, None] * self._of_masks(
            rng, self.candidates, self.value_family
        )
        cell = r[:, None, None] * of_cell + np.sqrt(1 - r * r)[:, None, None] * rng.normal(size=(len(r), *shape))
        candidates = math.sqrt(self.candidate_share) * value[:, None] + math.sqrt(1 - self.candidate_share) * cell
        if self.censored:
            cut = np.quantile(outcome, 1 - self.censored, axis=1, keepdims=True)
            outcome = np.where(outcome > cut, math.inf, outcome)
        return np.where(rng.random(shape) < self.missing, math.nan, outcome), candidates

    def _of_masks(self, rng: np.random.Generator, rows: int, common: float) -> Matrix:
        """Standard normal numbers of masks, (rows, M), of which families have a part in common."""
        own = rng.normal(size=(rows, self.masks))
        if not self.families:
            return own
        family = np.repeat(np.arange(len(self.families)), self.families)
        shared = rng.normal(size=(rows, len(self.families)))[:, family]
        mixed: Matrix = math.sqrt(common) * shared + math.sqrt(1 - common) * own
        return mixed

    def truth(self) -> float:
        """ρ of the first candidate in a task of very many masks."""
        many = replace(self, tasks=1, masks=20_000, candidates=1, missing=0.0)
        outcome, candidates = many.draw(np.random.default_rng(0))
        ranks = (np.unique(row, return_inverse=True)[1].astype(float) for row in (outcome[0], candidates[0, 0]))
        return float(np.corrcoef(*ranks)[0, 1])


def simulate(study: Study, repeats: int, draws: int, resamples: int) -> tuple[float, float, float, float]:
    """Shares of studies: first candidate p ≤ 5%, any corrected p ≤ 5%, the first's corrected, interval right."""
    truth = study.truth()
    counts = np.zeros(4)
    for number in range(repeats):
        rng = np.random.default_rng([number, 7])
        tests = joint_rank_tests(*study.draw(rng), draws=draws, resamples=resamples, seed=number)
        counts += (
            tests.p[0] <= LEVEL,
            tests.p_family.min() <= LEVEL,
            tests.p_family[0] <= LEVEL,
            tests.low[0] <= truth <= tests.high[0],
        )
    alone, family, first, covered = counts / repeats
    return alone, family, first, covered


FAMILIES = 8, 3, 3, 1  # top-k, random, local, full: the study's


def stretch(study: Study, repeats: int, resamples: int) -> tuple[float, float, float]:
    """Under a null: share of p ≤ 5%, share of 95% intervals that hold 0, and what to multiply the interval with.

    The factor is the smallest by which both halves of the interval, on the scale of arctanh ρ, are multiplied so
    that 95% of the simulated ones hold 0.
    """
    alarms, needed = 0, []
    for number in range(repeats):
        rng = np.random.default_rng([number, 9])
        tests = joint_rank_tests(*study.draw(rng), draws=999, resamples=resamples, seed=number)
        alarms += bool(tests.p[0] <= LEVEL)
        at, low, high = np.arctanh(np.clip([tests.correlation[0], tests.low[0], tests.high[0]], -0.999, 0.999))
        half = at - low if at > 0 else high - at
        needed.append(abs(at) / half if half > 0 else math.inf)
    ratios = np.array(needed)
    return alarms / repeats, float((ratios <= 1).mean()), float(np.quantile(ratios, 1 - LEVEL))


UNEQUAL = ((10, 10, 10, 10), (18, 12, 12, 12), (10, 9, 9, 9), (12, 9, 9, 9), (10, 5, 5, 5), (18, 6, 6, 6))


def unequal(sizes: tuple[int, ...], repeats: int, resamples: int) -> tuple[float, float]:
    """Of tasks of unlike numbers of masks, r = 0 in the first and 0.9 in others: interval given; right.

    The truth is the mean of the statistic itself over 4,000 such studies.
    """

    def draw(rng: np.random.Generator) -> tuple[Matrix, Matrix]:
        shape = len(sizes), sizes[0]
        value = rng.normal(size=shape)
        r = np.where(np.arange(len(sizes)) > 0, 0.9, 0.0)[:, None]
        outcome = r * value + np.sqrt(1 - r * r) * rng.normal(size=shape)
        for row, size in zip(outcome, sizes, strict=True):
            row[rng.permutation(sizes[0])[size:]] = math.nan
        return outcome, value[None]

    many = (draw(np.random.default_rng([number, 8])) for number in range(4000))
    truth = np.mean([joint_rank_tests(*study, draws=1, resamples=0).correlation[0] for study in many])
    given = held = 0
    for number in range(repeats):
        study = draw(np.random.default_rng([number, 7]))
        tests = joint_rank_tests(*study, draws=1, resamples=resamples, seed=number)
        given += not math.isnan(tests.low[0])
        held += tests.low[0] <= truth <= tests.high[0]
    return given / repeats, held / given if given else math.nan


def main() -> None:
    """Simulate, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("nulls", "families", "unequal", "power"))
    parser.add_argument("--tasks", type=int, default=7)
    parser.add_argument("--masks", type=int, default=18)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--candidates", type=int, default=3)
    parser.add_argument("--mask-share", type=float, default=0.5)
    parser.add_argument("--cell-share", type=float, default=0.3)
    parser.add_argument("--candidate-share", type=float, default=0.98)
    parser.add_argument("--outcome-family", type=float, default=0.5)
    parser.add_argument("--value-family", type=float, nargs="+", default=[0.0, 0.5, 0.75, 0.95])
    parser.add_argument("--correlations", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=999)
    parser.add_argument("--resamples", type=int, default=500)
    given = parser.parse_args()
    if given.what == "unequal":
        print("| masks of the tasks | interval given | 95% interval right, where given |")
        print("|---|---|---|")
        for masks in UNEQUAL:
            share, right = unequal(masks, given.repeats, given.resamples)
            print(
                f"| {', '.join(map(str, masks))} | {share:.0%} | {f'{right:.1%}' if share else '–'} |", flush=True
            )
        return
    sizes = given.tasks, given.masks, given.seeds, given.candidates
    shared = Study(*sizes, given.mask_share, given.cell_share, given.candidate_share)
    how = given.repeats, given.draws, given.resamples
    print(
        f"{given.tasks} tasks, {given.masks} masks, {given.seeds} seeds, {given.candidates} candidates; shares: "
        f"masks {given.mask_share:g}, cells {given.cell_share:g}, candidates' masks {given.candidate_share:g}; "
        f"{given.repeats} studies, standard error at 5%: {math.sqrt(LEVEL * 0.95 / given.repeats):.1%}"
    )
    if given.what == "families":
        print("| share of families in the values | p ≤ 5% | 95% interval holds 0 | stretch |")
        print("|---|---|---|---|")
        for common in given.value_family:
            study = replace(
                shared, families=FAMILIES, outcome_family=given.outcome_family, value_family=common, candidates=1
            )
            alarms, held, factor = stretch(study, given.repeats, given.resamples)
            print(f"| {common:.2f} | {alarms:.1%} | {held:.1%} | {factor:.2f} |", flush=True)
        return
    if given.what == "nulls":
        nulls = {
            "independent cells": replace(shared, mask_share=0.0, cell_share=given.mask_share + given.cell_share,
                                         candidate_share=0.0),
            "mask effects shared by all tasks": shared,
            "shared, 15% of the cells missing": replace(shared, missing=0.15),
            "shared, 40% of the cells censored": replace(shared, censored=0.4),
        }  # fmt: skip
        print("| null | p ≤ 5%, one candidate | corrected p ≤ 5%, any | 95% interval holds 0 |")
        print("|---|---|---|---|")
        for name, study in nulls.items():
            alone, family, _, covered = simulate(study, *how)
            print(f"| {name} | {alone:.1%} | {family:.1%} | {covered:.1%} |", flush=True)
        return
    print("| r of the effects | ρ within tasks | power, one candidate | power, corrected | interval holds ρ |")
    print("|---|---|---|---|---|")
    for r in given.correlations:
        study = replace(shared, correlation=r)
        alone, _, first, covered = simulate(study, *how)
        print(f"| {r:g} | {study.truth():.2f} | {alone:.0%} | {first:.0%} | {covered:.1%} |", flush=True)


if __name__ == "__main__":
    main()
