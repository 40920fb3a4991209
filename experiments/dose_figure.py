"""Draws the causal arm of the study of speed from its table.

python experiments/read_speed.py --out reports/speed
python experiments/dose_figure.py reports/speed
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from forest import save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from scipy import stats

from semdiag.presenting.drawing.style import FAINT, finished, panel_grid, paper_style, plain_numbers

ARMS = {"for good": "scores scaled throughout training", "at first": "scores multiplied at the initialisation"}


def responses(doses: pd.DataFrame) -> pd.DataFrame:
    """Mean over seeds of ln(mean training loss / that at factor 1), by attention, arm, task and factor."""
    means = doses.groupby(["attention", "arm", "task", "factor"], sort=False)["loss_area"].mean()
    alone = means.xs(1.0, level="factor")
    return (means - alone.reindex(means.index.droplevel("factor")).to_numpy()).rename("response").reset_index()


@paper_style
def figure(doses: pd.DataFrame) -> Figure:
    """A panel per attention and arm: a line per task, and their mean with a 95% t-interval over tasks."""
    table = responses(doses)
    panels = [*table.groupby(["attention", "arm"], sort=False)]
    drawn, axes = panel_grid(len(panels), height=2.9, columns=2)
    for ax, ((attention, arm), own) in zip(axes, panels, strict=True):
        middle = _draw(ax, own)
        ax.set_title(f"{attention}, {ARMS[arm]}: × {middle:.2g} at factor {own['factor'].max():g}")
    return finished(
        drawn,
        "Mean training loss of 120 epochs as a multiple of that with factor 1: above 1 is slower. Grey: tasks, "
        "three seeds each, the outermost named; black: mean over tasks (of logarithms) with a 95% t-interval.",
    )


def _draw(ax: Axes, own: pd.DataFrame) -> float:
    """Draw the tasks and their mean; return the mean at the largest factor."""
    last = own[own["factor"] == own["factor"].max()].set_index("task")["response"]
    for task, rows in own.groupby("task", sort=False):
        rows = rows.sort_values("factor")
        ax.plot(rows["factor"], np.exp(rows["response"]), color=FAINT, linewidth=0.9, alpha=0.7)
        if task in (last.idxmin(), last.idxmax()):
            ax.annotate(
                str(task), (rows["factor"].iloc[-1], np.exp(rows["response"].iloc[-1])), xytext=(-4, 5),
                textcoords="offset points", ha="right", fontsize=9, color=FAINT,
            )  # fmt: skip
    by_factor = own.groupby("factor")["response"]
    centre = by_factor.mean()
    half = stats.t.ppf(0.975, by_factor.size() - 1) * by_factor.sem()
    middle, low, high = (np.exp(logarithm) for logarithm in (centre, centre - half, centre + half))
    ax.errorbar(
        centre.index, middle, [middle - low, high - middle], color="black", linewidth=2, capsize=3, marker="o",
        markersize=3.5,
    )  # fmt: skip
    ax.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(sorted(own["factor"].unique()), [f"{factor:g}" for factor in sorted(own["factor"].unique())])
    plain_numbers(ax.yaxis)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("factor on the scores, and on δ, at the initialisation")
    ax.set_ylabel("mean training loss / at factor 1")
    return float(middle.iloc[-1])


def main() -> None:
    """Draw it beside its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where doses.csv is")
    folder = parser.parse_args().folder
    doses = pd.read_csv(folder / "doses.csv")
    save(lambda: figure(doses), folder, "doses")


if __name__ == "__main__":
    main()
