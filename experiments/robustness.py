"""Reads the runs of the study of robustness, and analyses them as robustness.md registers.

    python experiments/robustness.py --out reports/robustness

A level is analysed when all its runs of a task are there. Of any other the number of missing runs is said.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import pandas as pd
from pack_records import read_history
from t_intervals import UNKNOWN, t_interval

from semdiag_models.sweep import SweepRun, read_sweep

HERE = Path(__file__).parent
SWEEP = HERE / "robustness.toml"
RECIPE = "the recipe"
FULL = "full"


def level_of(run: SweepRun) -> str:
    """The factor that a run changes, and to what."""
    model, training = run.model, run.training
    named = {
        "activation": (model.activation, "relu"),
        "heads": (model.heads, 1),
        "blocks": (model.blocks, 2),
        "norm": (model.norm, "pre"),
        "optimiser": (training.optimizer, "sgd"),
        "learning rate": (training.learning_rate if training.optimizer == "sgd" else 0.1, 0.1),
        "decay": ("none" if training.learning_rate_decay == 1 else training.learning_rate_decay, 0.9995),
        "dropout": (model.dropout, 0.01),
    }
    changed = [f"{name} {value}".removesuffix(".0") for name, (value, usual) in named.items() if value != usual]
    return changed[0] if changed else RECIPE


def read_outcomes(records: Path, sweep: Path = SWEEP) -> pd.DataFrame:
    """One row per run of the study: task, level, attention, seed, and loss_area; NaN where it is missing."""
    rows = []
    for run in read_sweep(sweep):
        history = read_history(records, run)
        done = history is not None and len(history["train_loss"]) == run.training.epochs
        area = math.log(float(np.mean(history["train_loss"]))) if history is not None and done else math.nan
        rows.append((run.training.task_label, level_of(run), run.model.attention_label, run.training.seed, area))
    return pd.DataFrame(rows, columns=["task", "level", "attention", "seed", "loss_area"])


def advantages(outcomes: pd.DataFrame) -> pd.DataFrame:
    """By task, level and attention: mean of A(full) - A(attention) over seeds, its interval, and missing runs."""
    rows = []
    for (task, level), own in outcomes.groupby(["task", "level"], sort=False):
        areas = own.pivot_table(index="seed", columns="attention", values="loss_area", dropna=False)
        for attention in [name for name in own["attention"].unique() if name != FULL]:
            missing = int(areas[[FULL, attention]].isna().to_numpy().sum())
            found = t_interval((areas[FULL] - areas[attention]).to_numpy(np.float64)) if not missing else UNKNOWN
            rows.append((task, level, attention, found.estimate, found.low, found.high, missing))
    return pd.DataFrame(rows, columns=["task", "level", "attention", "advantage", "low", "high", "missing"])


def verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """By task and attention: whether a level reverses the recipe's sign, of how many that are complete."""
    rows = []
    for (task, attention), own in table.groupby(["task", "attention"], sort=False):
        recipe = own[own["level"] == RECIPE].iloc[0]
        others = own[(own["level"] != RECIPE) & (own["missing"] == 0)]
        against = others[(others["high"] < 0) if recipe["advantage"] > 0 else (others["low"] > 0)]
        if recipe["missing"]:
            answer = f"{recipe['missing']} runs of the recipe are missing"
        elif recipe["low"] <= 0 <= recipe["high"]:
            answer = "unclear: the recipe's own interval holds 0"
        elif others.empty:
            answer = "no other level is complete"
        elif len(against):
            answer = f"not robust: reversed by {', '.join(against['level'])}"
        else:
            answer = "robust" if len(others) == len(own) - 1 else "no reversal so far"
        rows.append((task, attention, answer, len(others), len(own) - 1))
    return pd.DataFrame(rows, columns=["task", "attention", "answer", "complete levels", "levels"])


def main() -> None:
    """Print the verdicts and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=HERE / "robustness")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    outcomes = read_outcomes(options.records)
    table = advantages(outcomes)
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out / "advantages.csv", index=False)
    answers = verdicts(table)
    answers.to_csv(options.out / "verdicts.csv", index=False)
    print(answers.to_string(index=False))
    print(f"{int(outcomes['loss_area'].isna().sum())} of {len(outcomes)} runs are missing.")


if __name__ == "__main__":
    main()
