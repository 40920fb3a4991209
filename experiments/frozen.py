"""Reads the runs of the study of frozen queries and keys, and analyses them as frozen.md registers.

    python experiments/frozen.py --out reports/frozen
    python experiments/frozen.py --table reports/frozen/outcomes.csv --out reports/frozen

A task is analysed when all its 60 runs are there. Of any other, the number of missing runs is said, and no more.
"""

import argparse
import math
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pack_records import read_history
from scipy import stats
from t_intervals import UNKNOWN, t_interval

from semdiag.measuring.findings.resampling import Interval
from semdiag_files import InputError
from semdiag_models.sweep import SweepRun, read_sweep

HERE = Path(__file__).parent
RUN = ["task", "attention", "frozen", "seed"]  # what names a run of the study
FULL, TOPK, STRAIGHT = "full", "topk-5", "topk-5-straight-through"
HALF = 0.5  # of the advantage: above it most survives
LITTLE = math.log(1.25)  # of straight-through: mean losses that differ by less than a quarter
WORSE = math.log(1.1)  # of frozen full attention on cycle-navigation
TELLS_NOTHING = "these runs cannot tell"


def attention_of(run: SweepRun) -> str:
    """Attention in one word, with the factor on the scores where it is not 1."""
    factor = run.model.inverse_temperature
    return run.model.attention_label if factor == 1 else f"{run.model.attention_label}-times-{factor:g}"


@cache
def expected_runs(sweep: Path = HERE / "frozen.toml") -> dict[SweepRun, tuple[str, str, str, int]]:
    """The runs of the study, each with its task, attention, ``frozen`` or ``trained``, and seed."""
    return {
        run: (
            run.training.task_label,
            attention_of(run),
            "frozen" if run.training.frozen else "trained",
            run.training.seed,
        )
        for run in read_sweep(sweep)
    }


def read_outcomes(records: Path) -> pd.DataFrame:
    """One row per finished run: what names it, and loss_area, ln of the mean training loss over all its epochs."""
    rows = []
    for run, names in expected_runs().items():
        history = read_history(records, run)
        if history is not None and len(history["train_loss"]) == run.training.epochs:
            rows.append((*names, math.log(float(np.mean(history["train_loss"])))))
    return pd.DataFrame(rows, columns=[*RUN, "loss_area"])


def read_table(path: Path) -> pd.DataFrame:
    """Read the same rows from a table.

    Raises:
        InputError: if a column is missing.
    """
    table = pd.read_csv(path)
    missing = [name for name in (*RUN, "loss_area") if name not in table]
    if missing:
        raise InputError(f"{path} lacks the column {missing[0]}. It needs: {', '.join((*RUN, 'loss_area'))}.")
    return table


def missing_runs(outcomes: pd.DataFrame) -> dict[str, int]:
    """How many runs of each task are missing.

    Raises:
        InputError: if a run occurs twice, is none of the study, or has no finite loss area.
    """
    known = set(expected_runs().values())
    found = list(outcomes[RUN].itertuples(index=False, name=None))
    if len(set(found)) < len(found):
        raise InputError("A run occurs twice among the outcomes: every one has task, attention, frozen and seed.")
    if strange := [run for run in found if run not in known]:
        raise InputError(f"{strange[0]} is no run of experiments/frozen.toml.")
    if not np.isfinite(outcomes["loss_area"].to_numpy(dtype=np.float64)).all():
        raise InputError("A loss area is not a finite number.")
    left = known - set(found)
    tasks = dict.fromkeys(task for task, *_ in expected_runs().values())
    return {task: sum(run[0] == task for run in left) for task in tasks}


def share(frozen: NDArray[np.float64], trained: NDArray[np.float64]) -> Interval:
    """Ratio of the mean advantages, frozen over trained, with Fieller's interval over seeds.

    The interval holds every ρ for which the t-interval of frozen - ρ · trained, paired by seed, holds 0. It is
    finite exactly if the t-interval of the trained advantage excludes 0; otherwise, and where that advantage is
    negative, there is no share: NaN.
    """
    n, f, t = len(trained), float(np.mean(frozen)), float(np.mean(trained))
    if not t_interval(trained).low > 0:
        return UNKNOWN
    (ff, ft), (_, tt) = np.cov(frozen, trained) * stats.t.ppf(0.975, n - 1) ** 2 / n
    a, b, c = t * t - tt, t * f - ft, f * f - ff
    root = math.sqrt(max(0.0, b * b - a * c))
    return Interval(f / t, float((b - root) / a), float((b + root) / a))


def areas(outcomes: pd.DataFrame, task: str) -> dict[tuple[str, str], NDArray[np.float64]]:
    """Loss areas of a task by attention and arm, in the order of the seeds."""
    own = outcomes[outcomes["task"] == task].sort_values("seed")
    return {
        (str(attention), str(arm)): rows["loss_area"].to_numpy(dtype=np.float64)
        for (attention, arm), rows in own.groupby(["attention", "frozen"], sort=False)
    }


def advantages(outcomes: pd.DataFrame, tasks: list[str]) -> pd.DataFrame:
    """Per task and attention the two log advantages over trained full attention, and the share that survives.

    Besides: the frozen advantage over frozen full attention (secondary).
    """
    rows = []
    for task in tasks:
        area = areas(outcomes, task)
        full, frozen_full = area[FULL, "trained"], area[FULL, "frozen"]
        for attention in dict.fromkeys(attention for attention, _ in area):
            if attention == FULL:
                continue
            trained, frozen = full - area[attention, "trained"], full - area[attention, "frozen"]
            survives = share(frozen, trained)
            rows.append(
                {
                    "task": task, "attention": attention,
                    **t_interval(trained).columns("trained"), **t_interval(frozen).columns("frozen"),
                    **survives.columns("share"), "reading": reading(t_interval(trained), survives),
                    **t_interval(frozen_full - area[attention, "frozen"]).columns("over_frozen_full"),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def reading(trained: Interval, survives: Interval) -> str:
    """What the share says of one attention on one task."""
    if not trained.low > 0:
        return "slower than full attention" if trained.high < 0 else "no clear advantage: no share"
    if survives.low > HALF:
        return "most survives freezing"
    return "most needs learning" if survives.high < HALF else TELLS_NOTHING


def freezing(outcomes: pd.DataFrame, tasks: list[str]) -> pd.DataFrame:
    """Per task and attention what freezing costs: loss area frozen minus trained."""
    rows = []
    for task in tasks:
        area = areas(outcomes, task)
        for attention in dict.fromkeys(attention for attention, _ in area):
            cost = t_interval(area[attention, "frozen"] - area[attention, "trained"])
            rows.append({"task": task, "attention": attention, **cost.columns("cost")})
    return pd.DataFrame(rows)


def straight_through(outcomes: pd.DataFrame, tasks: list[str]) -> pd.DataFrame:
    """Per task and arm the loss area of straight-through top-5 minus that of top-5."""
    rows = []
    for task in tasks:
        area = areas(outcomes, task)
        for arm in ("trained", "frozen"):
            change = t_interval(area[STRAIGHT, arm] - area[TOPK, arm])
            within = change.low > -LITTLE and change.high < LITTLE
            said = verdict(within, change.low > LITTLE or change.high < -LITTLE)
            rows.append({"task": task, "arm": arm, **change.columns("change"), "little": said})
    return pd.DataFrame(rows)


def verdict(as_expected: bool, contradicted: bool) -> str:
    """One of three words for an expectation."""
    return "as expected" if as_expected else "contradicted" if contradicted else TELLS_NOTHING


def expectations(shares: pd.DataFrame, costs: pd.DataFrame, changes: pd.DataFrame) -> pd.DataFrame:
    """The four registered expectations, as far as their tasks are complete."""
    rows = []
    for task, least in (("even-pairs", True), ("missing-duplicate", False)):
        bound = 0.7 if least else 0.4
        for row in shares[(shares["task"] == task) & (shares["attention"] == TOPK)].to_dict("records"):
            above, below = row["share_low"] >= bound, row["share_high"] <= bound
            said = verdict(*((above, below) if least else (below, above)))
            rows.append((f"{task}: share of top-5 {'≥' if least else '≤'} {bound}", said))
    for row in costs[(costs["task"] == "cycle-navigation") & (costs["attention"] == FULL)].to_dict("records"):
        said = verdict(row["cost_high"] <= WORSE, row["cost_low"] > WORSE)
        rows.append(("cycle-navigation: frozen full attention at most 10% worse", said))
    for row in changes[changes["arm"] == "trained"].to_dict("records"):
        rows.append((f"{row['task']}: straight-through changes little", row["little"]))
    return pd.DataFrame(rows, columns=["expectation", "verdict"])


def analyse(outcomes: pd.DataFrame) -> tuple[list[str], dict[str, pd.DataFrame]]:
    """The registered tables of the complete tasks, and in words what is missing."""
    missing = missing_runs(outcomes)
    complete = [task for task, count in missing.items() if not count]
    said = [f"{sum(missing.values())} of {len(expected_runs())} runs are missing."]
    said += [f"{task}: {count} runs are missing: no conclusion." for task, count in missing.items() if count]
    if not complete:
        return said, {}
    shares, costs = advantages(outcomes, complete), freezing(outcomes, complete)
    changes = straight_through(outcomes, complete)
    return said, {
        "advantages": shares, "freezing": costs, "straight_through": changes,
        "expectations": expectations(shares, costs, changes),
    }  # fmt: skip


def main() -> None:
    """Analyse the complete tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=HERE / "frozen", help="folder of semdiag sweep --records")
    parser.add_argument("--table", type=Path, help="instead: CSV with task, attention, frozen, seed, loss_area")
    parser.add_argument("--out", type=Path, help="folder for the tables")
    chosen = parser.parse_args()
    try:
        outcomes = read_outcomes(chosen.records) if chosen.table is None else read_table(chosen.table)
        said, tables = analyse(outcomes)
    except InputError as error:
        sys.exit(f"Error: {error}")
    print("\n".join(said))
    for name, table in tables.items():
        print(f"\n{name}\n{table.to_string(index=False, float_format='%.3f')}")
    if chosen.out is not None and tables:
        chosen.out.mkdir(parents=True, exist_ok=True)
        for name, table in {"outcomes": outcomes, **tables}.items():
            table.to_csv(chosen.out / f"{name}.csv", index=False, float_format="%.9g")


if __name__ == "__main__":
    main()
