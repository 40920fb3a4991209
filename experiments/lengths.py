"""Tests the runs of the study of lengths on longer inputs, and analyses them as lengths.md registers.

    python experiments/lengths.py --runs runs/lengths --out experiments/lengths
    python experiments/lengths.py --out experiments/lengths

With --runs the last checkpoints are tested, and accuracy.csv is written; without, it is read.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from t_intervals import UNKNOWN, t_interval

from semdiag.capturing.loading import load
from semdiag.measuring.table import ALL
from semdiag.questions.lengths.measure import measure_lengths
from semdiag_models import InputError
from semdiag_models.sweeps.grid import read_sweep

HERE = Path(__file__).parent
SWEEP = HERE / "lengths.toml"
LENGTHS = 20, 30, 40, 60, 80
SAMPLES = 1000
FULL = "full"
LEARNED = {"stack-manipulation": 0.9}  # accuracy at length 20; of the other tasks 0.95
COLUMNS = ("task", "attention", "seed", "length", "accuracy", "dispersion", "separation")


def tested(runs: Path) -> pd.DataFrame:
    """One row per finished run and length: accuracy, and median δ and Δ of all layers and heads."""
    rows = []
    for run in read_sweep(SWEEP):
        path = runs / run.name / "last.pt"
        model = load(path) if path.exists() else None
        if model is None or model.epoch != run.training.epochs:
            continue
        table = measure_lengths(model, LENGTHS, samples=SAMPLES)
        pooled = table[table["layer"] == ALL].set_index(["length", "quantity", "statistic"])["value"]
        for length in LENGTHS:
            numbers = (pooled[length, "accuracy", "value"], *(pooled[length, q, "p50"] for q in COLUMNS[-2:]))
            rows.append((run.training.task, run.model.attention_label, run.training.seed, length, *numbers))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def differences(table: pd.DataFrame) -> pd.DataFrame:
    """By task, attention and length: accuracy less full attention's over the seeds that count, t-interval."""
    rows = []
    attentions = [name for name in table["attention"].unique() if name != FULL]
    for task, own in table.groupby("task", sort=False):
        at_20 = own[own["length"] == LENGTHS[0]].pivot_table(index="seed", columns="attention", values="accuracy")
        complete = at_20.reindex(columns=[FULL, *attentions]).dropna()
        seeds = complete[(complete >= LEARNED.get(str(task), 0.95)).all(axis=1)].index
        for attention in attentions:
            for length in LENGTHS[1:]:
                here = own[own["length"] == length].pivot_table(
                    index="seed", columns="attention", values="accuracy"
                )
                change = (
                    (here[attention] - here[FULL]).loc[seeds].to_numpy(np.float64) if len(seeds) else np.empty(0)
                )
                found = t_interval(change) if len(change) > 1 else UNKNOWN
                rows.append((task, attention, length, len(seeds), found.estimate, found.low, found.high))
    return pd.DataFrame(rows, columns=["task", "attention", "length", "seeds", "difference", "low", "high"])


def sentences(table: pd.DataFrame, found: pd.DataFrame) -> list[str]:
    """What the runs say, task by task."""
    said = []
    for task, own in found.groupby("task", sort=False):
        seeds = int(own["seeds"].iloc[0])
        if seeds < 2:
            said.append(
                f"{task}: these runs cannot tell ({seeds} of 3 seeds learned it with all three attentions)."
            )
            continue
        for attention, rows in own.groupby("attention", sort=False):
            clear = [r for r in rows.to_dict("records") if r["low"] > 0 or r["high"] < 0]
            each = ", ".join(f"{r['difference']:+.1%} at {r['length']}" for r in clear)
            said.append(
                f"{task}, {attention} less full, {seeds} seeds: {each or 'no length with a clear difference'}."
            )
    missing = 36 * len(LENGTHS) - len(table)
    return [*said, f"{missing // len(LENGTHS)} of 36 runs are missing."]


def main() -> None:
    """Test or read, write the tables, and print what they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    file = options.out / "accuracy.csv"
    if options.runs is not None:
        table = tested(options.runs)
        options.out.mkdir(parents=True, exist_ok=True)
        table.to_csv(file, index=False)
    elif not file.exists():
        raise InputError(f"{file} is not there: name the runs with --runs.")
    table = pd.read_csv(file)
    found = differences(table)
    found.to_csv(options.out / "differences.csv", index=False)
    print("\n".join(sentences(table, found)))


if __name__ == "__main__":
    main()
