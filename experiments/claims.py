"""Derives from the committed records the numbers of docs/paper.md that no other script has.

python experiments/claims.py
"""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import stability
from pack_records import HISTORIES, RUNS, read_history
from t_intervals import t_interval

from semdiag.measuring.findings.resampling import Interval
from semdiag_models.sweep import read_sweep
from semdiag_models.tasks import TASKS, find_task

HERE = Path(__file__).parent
CHECKPOINTS = HERE.parent / "checkpoints"
TOP, FULL, SHARP = "topk-5", "full", "full-times-4"
FIRST_SEED = 153476998  # of the two runs of ListOps
SMALL = (
    "even-pairs",
    "missing-duplicate",
    "stack-manipulation",
    "cycle-navigation",
    "modular-arithmetic",
    "solve-equation",
    "parity",
)


@cache
def paper_size(attention: str) -> dict[tuple[str, int], pd.DataFrame]:
    """Return the histories of the runs at the paper's size, by task and seed: sweep, references, ListOps."""
    histories = {}
    for run in read_sweep(HERE / "length-40.toml"):
        if run.model.attention_label == attention:
            record = read_history(HERE / "length-40", run)
            histories[run.training.task, run.training.seed] = pd.DataFrame(record)
    for folder in CHECKPOINTS.glob(f"*-{attention}-seed-*"):
        task, _, seed = folder.name.partition(f"-{attention}-seed-")
        histories[task, int(seed)] = pd.read_csv(folder / "history.csv")
    listops = HERE / "listops" / attention.removesuffix("-5") / "history.csv"
    if listops.exists():
        histories["listops", FIRST_SEED] = pd.read_csv(listops)
    return histories


def head_starts() -> pd.DataFrame:
    """Return top-5 over full attention at the paper's size: a row for each task and seed.

    Columns: ratio, of the mean training losses over the epochs that both runs have; topk and full, the first
    epochs with 95% training accuracy.
    """
    rows = []
    top, full = paper_size(TOP), paper_size(FULL)
    for task in TASKS:
        for name, seed in sorted(top.keys() & full.keys()):
            if name == task:
                pair = top[name, seed], full[name, seed]
                both = min(map(len, pair))
                means = [history["train_loss"].iloc[:both].mean() for history in pair]
                sooner = [history.loc[history["train_accuracy"] >= 0.95, "epoch"].min() for history in pair]
                rows.append((task, seed, means[0] / means[1], *sooner))
    return pd.DataFrame(rows, columns=["task", "seed", "ratio", "topk", "full"])


@cache
def small_areas() -> pd.DataFrame:
    """Return ln of the mean training loss of runs of the studies of speed, dose and frozen, by exact gradients.

    Columns: study, task, attention, k, factor (on the scores), first (factor on W_q and W_k), seed, loss_area.
    """
    parts = []
    for study in ("speed", "dose", "frozen"):
        histories = pd.read_parquet(HERE / study / HISTORIES, columns=["run", "train_loss"])
        areas = np.log(histories.groupby("run")["train_loss"].mean())
        for name, record in pd.read_parquet(HERE / study / RUNS).itertuples(index=False, name=None):
            content = json.loads(record)
            model, training = content["model"], content["training"]
            if model.get("score_gradient", "exact") != "exact" or training.get("frozen"):
                continue
            factors = (model["inverse_temperature"], training.get("query_key_scale", 1.0))
            facts = (study, training["task"], model["attention"], model["k"], *factors, training["seed"])
            parts.append((*facts, areas[name]))
    return pd.DataFrame(parts, columns=["study", "task", "attention", "k", "factor", "first", "seed", "loss_area"])


def sharper_than_top() -> pd.DataFrame:
    """Return ln of full × 4 over top-5's mean training loss in small models: a row per seed, a column per task."""
    areas = small_areas()
    plain = areas[areas["first"] == 1]
    sharp = plain[(plain["attention"] == "full") & (plain["factor"] == 4)]
    top = plain[(plain["attention"] == "topk") & (plain["k"] == 5) & (plain["factor"] == 1)]
    means = [table.groupby(["task", "seed"])["loss_area"].mean() for table in (sharp, top)]
    return (means[0] - means[1]).dropna().unstack("task")[list(SMALL)]


def slopes_within_masks() -> pd.DataFrame:
    """Return the slope of ln(mean training loss) on ln(δ's factor) at a fixed mask, for each task, arm and seed.

    Arms: full and random-5, scores multiplied for good or by W_q and W_k at the initialisation; top-5 for good.
    """
    areas = small_areas()
    arms = {
        "full, for good": areas.query("study == 'dose' and attention == 'full' and first == 1"),
        "full, at first": areas.query("study == 'dose' and attention == 'full' and factor == 1"),
        "random-5, for good": areas.query("study == 'dose' and attention == 'random' and first == 1"),
        "random-5, at first": areas.query("study == 'dose' and attention == 'random' and factor == 1"),
        "top-5, for good": areas.query("study == 'speed' and attention == 'topk' and k == 5"),
    }
    rows = []
    for arm, runs in arms.items():
        for (task, seed), doses in runs.groupby(["task", "seed"]):
            factors = np.log(doses["factor"]) + 2 * np.log(doses["first"])
            rows.append((task, arm, seed, float(np.polyfit(factors, doses["loss_area"], 1)[0])))
    return pd.DataFrame(rows, columns=["task", "arm", "seed", "slope"])


def top_over_full(candidate: str) -> "pd.Series[float]":
    """Return by task a candidate of the study of speed before training, top-5's over full attention's."""
    cells = pd.read_csv(HERE.parent / "reports" / "speed" / "cells.csv")
    first = cells[(cells["stage"] == "initialisation") & (cells["candidate"] == candidate)]
    values = first.pivot(index="group", columns="attention", values="ln_value")
    return np.exp(values[TOP] - values[FULL])


@cache
def twins() -> pd.DataFrame:
    """Return the records of the study of stability."""
    return stability.read(HERE / "stability")


def sample_over_nudge() -> pd.DataFrame:
    """Return ln of what a replaced sample changes over what a move of 10⁻⁷ does, by run and epoch."""
    return stability.ln_changes(twins(), "twin") - stability.ln_changes(twins(), "null")


def stability_beside_nudges() -> pd.DataFrame:
    """Return the nine comparisons of the study of stability, each twin divided by its null twin.

    Columns: task, moment; estimate, low and high of ln (top-5 over full); steps, the ratio of epochs at matched
    loss.
    """
    table = twins()
    base = table[table["member"] == "base"]
    losses = base.pivot(index=["task", "attention", "seed"], columns="epoch", values="train_loss")
    relative = sample_over_nudge()
    rows = []
    for task in stability.TASKS:
        values: dict[str, list[float]] = {"equal epoch": [], "matched loss": [], "end": []}
        steps = []
        for seed in stability.SEEDS:
            pair = [(task, TOP, seed), (task, FULL, seed)]
            top, full = (relative.loc[place] for place in pair)
            values["equal epoch"].append(float((top - full).mean()))
            values["end"].append(float(top.iloc[-1] - full.iloc[-1]))
            level, at = stability.matched(losses.loc[pair], find_task(task).classes)
            reached = [losses.loc[place, epoch] for place, epoch in at.items()]
            apart = abs(math.log(reached[0] / reached[1])) > math.log(stability.APART)
            if not apart and level <= stability.LEARNT * math.log(find_task(task).classes):
                values["matched loss"].append(float(top[at.iloc[0]] - full[at.iloc[1]]))
                steps.append(math.log(at.iloc[0] / at.iloc[1]))
        for moment, logarithms in values.items():
            mean = t_interval(logarithms)
            rows.append((task, moment, mean.estimate, mean.low, mean.high, math.exp(float(np.mean(steps)))))
    return pd.DataFrame(rows, columns=["task", "moment", "estimate", "low", "high", "steps"])


def gaps() -> pd.DataFrame:
    """Return the generalisation gap at the end, top-5 less full attention: mean and t-interval by task."""
    table = twins()
    last = table[(table["member"] == "base") & (table["epoch"] == stability.EPOCHS)]
    gap = last.assign(gap=last["fresh_loss"] - last["train_loss"]).pivot(
        index=["task", "seed"], columns="attention", values="gap"
    )
    change = gap[TOP] - gap[FULL]
    means = {task: t_interval(seeds.to_numpy(np.float64)) for task, seeds in change.groupby("task", sort=False)}
    return pd.DataFrame({task: vars(mean) for task, mean in means.items()}).T


def in_words(mean: Interval) -> str:
    """Return the ratio that an interval of logarithms means.

    Example:
        >>> in_words(Interval(0.0, -0.693, 0.693))
        '1.00 (0.50 to 2.00)'
    """
    return "{:.2f} ({:.2f} to {:.2f})".format(*map(math.exp, vars(mean).values()))


def main() -> None:
    """Print them."""
    print(head_starts().to_string(index=False, float_format="{:.3f}".format))
    ratios = sharper_than_top()
    for task in SMALL:
        mean = t_interval(ratios[task].to_numpy(np.float64))
        print(f"{task}: full × 4 over top-5 {in_words(mean)}")
    over_tasks = t_interval(ratios.mean().to_numpy(np.float64))
    print(f"over tasks {in_words(over_tasks)}")
    below = slopes_within_masks().groupby("task")["slope"].agg(lambda slopes: int((slopes < 0).sum()))
    print(below.to_string())
    print(stability_beside_nudges().to_string(index=False, float_format="{:.2f}".format))
    print(gaps().to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
