"""Who learned faster than full attention, task by task? From the outcomes of the study of speed. Exploratory.

    python experiments/read_speed.py --out reports/speed
    python experiments/speed_by_mask.py reports/speed

Every cell: mean training loss of 120 epochs over that of full attention on the same task and seed, geometric mean
over seeds, and in brackets with how many of the seeds it was below 1. Last column: geometric mean over the tasks
of a mask, with a 95 % t-interval over them.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats


def ratios(outcomes: pd.DataFrame) -> pd.DataFrame:
    """Ln of the ratio to full attention's mean training loss: a row per run of a sparse mask."""
    of = ["task", "seed"]
    full = outcomes[outcomes["attention"] == "full"].set_index(of)["loss_area"]
    sparse = outcomes[outcomes["attention"] != "full"]
    own = full.reindex(pd.MultiIndex.from_frame(sparse[of])).to_numpy()
    return sparse.assign(ratio=sparse["loss_area"] - own)[["attention", *of, "ratio"]]


def over_tasks(table: pd.DataFrame) -> pd.DataFrame:
    """Of every mask the mean over tasks of its mean over seeds, and its 95 % t-interval."""
    rows = []
    for attention, own in table.groupby("attention", sort=False):
        means = own.groupby("task")["ratio"].mean()
        half = stats.t.ppf(0.975, len(means) - 1) * means.sem()
        mean = means.mean()
        rows.append({"attention": attention, "mean": mean, "low": mean - half, "high": mean + half})
    return pd.DataFrame(rows).set_index("attention")


def markdown(table: pd.DataFrame) -> str:
    """The table of ratios, masks below each other by their means over tasks."""
    tasks = list(dict.fromkeys(table["task"]))
    lines = [f"| | {' | '.join(tasks)} | over tasks |", "|---" * (len(tasks) + 2) + "|"]
    for attention, whole in over_tasks(table).sort_values("mean").iterrows():
        own = table[table["attention"] == attention].groupby("task")["ratio"]
        cells = [
            f"{np.exp(own.mean()[task]):.2f} ({(own.get_group(task) < 0).sum()}/{own.size()[task]})"
            if task in own.groups
            else "–"
            for task in tasks
        ]
        mean, low, high = (f"{np.exp(whole[name]):.2f}" for name in ("mean", "low", "high"))
        lines.append(f"| {attention} | {' | '.join(cells)} | {mean} ({low} to {high}) |")
    return "\n".join(lines)


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where outcomes.csv is")
    print(markdown(ratios(pd.read_csv(parser.parse_args().folder / "outcomes.csv"))))


if __name__ == "__main__":
    main()
