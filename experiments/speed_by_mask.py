"""Who learned faster than full attention, task by task, and what goes with it? Exploratory.

    python experiments/read_speed.py --out reports/speed
    python experiments/speed_by_mask.py reports/speed

First table: mean training loss of 120 epochs over that of full attention on the same task and seed, geometric mean
over seeds, and in brackets with how many of the seeds it was below 1. Last but one column: geometric mean over the
tasks of a mask, with a 95% t-interval over them; last column: that of top-5 over the same tasks.

Second table: Spearman's ρ of the candidates at the initialisation with the log area under the training-loss curve
within each task, on the cells of the registered tests: over all masks, over the top-k masks alone, over the others
alone. Last column: mean over the tasks, with a 95% t-interval over them.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats
from t_intervals import t_interval

CANDIDATES = {"dispersion": "δ", "xi_sound": "ξ", "lambda_sound": "λ"}


def ratios(outcomes: pd.DataFrame) -> pd.DataFrame:
    """Ln of the ratio to full attention's mean training loss: a row per run of a sparse mask."""
    of = ["task", "seed"]
    full = outcomes[outcomes["attention"] == "full"].set_index(of)["loss_area"]
    sparse = outcomes[outcomes["attention"] != "full"]
    own = full.reindex(pd.MultiIndex.from_frame(sparse[of])).to_numpy()
    return sparse.assign(ratio=sparse["loss_area"] - own)[["attention", *of, "ratio"]]


def over_tasks(table: pd.DataFrame) -> pd.DataFrame:
    """Of every mask the mean over tasks of its mean over seeds, a 95% t-interval, and top-5's mean over those."""
    top = table[table["attention"] == "topk-5"].groupby("task")["ratio"].mean()
    rows = []
    for attention, own in table.groupby("attention", sort=False):
        means = own.groupby("task")["ratio"].mean()
        found = t_interval(means.to_numpy())
        ends = {"mean": found.estimate, "low": found.low, "high": found.high}
        rows.append({"attention": attention, **ends, "topk-5": top.reindex(means.index).mean()})
    return pd.DataFrame(rows).set_index("attention")


def markdown(table: pd.DataFrame) -> str:
    """The table of ratios, masks below each other by their means over tasks."""
    tasks = list(dict.fromkeys(table["task"]))
    lines = [f"| | {' | '.join(tasks)} | over tasks | top-5 over these |", "|---" * (len(tasks) + 3) + "|"]
    for attention, whole in over_tasks(table).sort_values("mean").iterrows():
        own = table[table["attention"] == attention].groupby("task")["ratio"]
        cells = [
            f"{np.exp(own.mean()[task]):.2f} ({(own.get_group(task) < 0).sum()}/{own.size()[task]})"
            if task in own.groups
            else "–"
            for task in tasks
        ]
        mean, low, high, top = (f"{np.exp(whole[name]):.2f}" for name in ("mean", "low", "high", "topk-5"))
        lines.append(f"| {attention} | {' | '.join(cells)} | {mean} ({low} to {high}) | {top} |")
    return "\n".join(lines)


def correlations(cells: pd.DataFrame) -> pd.DataFrame:
    """ρ of a candidate with the loss area over some masks of a task: candidate, masks, task, rho.

    Args:
        cells: ``cells.csv``, a row per task, mask, stage and candidate.
    """
    own = cells[cells["stage"] == "initialisation"]
    by = ["group", "attention", "kind", "loss_area"]
    known = own.pivot(index=by, columns="candidate", values="ln_value")[[*CANDIDATES]].dropna().reset_index()
    top = known["kind"] == "topk"
    groups = {"all": known, "top-k": known[top], "others": known[~top]}
    rows = [
        {"candidate": candidate, "masks": masks, "task": task}
        | {"rho": stats.spearmanr(own[candidate], own["loss_area"]).statistic}
        for candidate in CANDIDATES
        for masks, part in groups.items()
        for task, own in part.groupby("group")
    ]
    return pd.DataFrame(rows)


def correlations_in_words(table: pd.DataFrame, tasks: list[str]) -> str:
    """Markdown of ``correlations``: a row per candidate and group of masks, a column per task."""
    lines = [f"| | masks | {' | '.join(tasks)} | over tasks |", "|---" * (len(tasks) + 3) + "|"]
    for (candidate, masks), own in table.groupby(["candidate", "masks"], sort=False):
        rho = own.set_index("task")["rho"].round(9)  # −3/8 is no −0.37499…
        mean = t_interval(rho.to_numpy())
        whole = f"{mean.estimate:+.2f} ({mean.low:+.2f} to {mean.high:+.2f})"
        numbers = " | ".join([*(f"{rho[task]:+.2f}" for task in tasks), whole]).replace("-", "−")
        lines.append(f"| {CANDIDATES[str(candidate)]} | {masks} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where outcomes.csv and cells.csv are")
    folder = parser.parse_args().folder
    outcomes = pd.read_csv(folder / "outcomes.csv")
    print(markdown(ratios(outcomes)))
    print(correlations_in_words(correlations(pd.read_csv(folder / "cells.csv")), [*outcomes["task"].unique()]))


if __name__ == "__main__":
    main()
