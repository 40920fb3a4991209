"""Draws the causal arm of the study of speed from its table.

python experiments/read_speed.py --out reports/speed
python experiments/dose_figure.py reports/speed
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from scipy import stats

from semdiag.presenting.drawing.style import finished, panel_grid, paper_style, plain_numbers

STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
ARMS = {"for good": "scores multiplied for good", "at first": "scores multiplied at the initialisation"}


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
        _draw(ax, own)
        ax.set_title(f"{attention}, {ARMS[arm]}")
    return finished(
        drawn,
        "Mean training loss of 120 epochs as a multiple of that with factor 1: above 1 is slower. Thin lines:"
        " tasks, three seeds each; thick line: mean over tasks (of logarithms) with a 95% t-interval.",
    )


def _draw(ax: Axes, own: pd.DataFrame) -> None:
    for i, (task, rows) in enumerate(own.groupby("task", sort=False)):
        rows = rows.sort_values("factor")
        ax.plot(
            rows["factor"], np.exp(rows["response"]), color=f"C{i}", linestyle=STYLES[i], linewidth=1.1, label=task
        )
    by_factor = own.groupby("factor")["response"]
    centre = by_factor.mean()
    half = stats.t.ppf(0.975, by_factor.size() - 1) * by_factor.sem()
    middle, low, high = (np.exp(logarithm) for logarithm in (centre, centre - half, centre + half))
    ax.errorbar(
        centre.index, middle, [middle - low, high - middle], color="black", linewidth=2, capsize=3, marker="o",
        markersize=3.5, label="mean over tasks",
    )  # fmt: skip
    ax.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(sorted(own["factor"].unique()), [f"{factor:g}" for factor in sorted(own["factor"].unique())])
    plain_numbers(ax.yaxis)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("factor on the scores, and on δ, at the initialisation")
    ax.set_ylabel("mean training loss / at factor 1")


def main() -> None:
    """Draw it beside its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where doses.csv is")
    folder = parser.parse_args().folder
    figure(pd.read_csv(folder / "doses.csv")).savefig(folder / "doses.svg")


if __name__ == "__main__":
    main()
