"""Draws how twins that differ in one sample part, and how the null twins do.

python experiments/stability_figure.py experiments/stability reports/stability/stability.png
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import stability
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.presenting.drawing.style import finished, panel_grid, paper_style

PANELS = {
    "largest_change": "largest change of a loss, nats",
    "distance": "‖θ − θ′‖",
    "train_loss": "training loss, nats",
}


@paper_style
def figure(table: pd.DataFrame) -> Figure:
    """A row a task, a column a quantity, a line an attention; dashed: the null twins."""
    drawn, axes = panel_grid(len(PANELS) * len(stability.TASKS), height=2.2, columns=len(PANELS), sharey=False)
    places = [(task, column) for task in stability.TASKS for column in PANELS]
    for ax, (task, column) in zip(axes, places, strict=True):
        for place, attention in enumerate(stability.ATTENTIONS):
            own = table[(table["task"] == task) & (table["attention"] == attention)]
            _draw(ax, own, column, f"C{place}", attention)
        ax.set_yscale("log")
        ax.set_title(f"{task}: {PANELS[column]}")
        ax.set_xlabel("epoch")
    seeds = table["seed"].nunique()
    return finished(
        drawn,
        "Twins on training sets that differ in one of 500 samples (solid), and twins whose initialisation alone "
        f"was moved by 1e-7 (dashed). Lines: geometric means over {seeds} seeds and their twins; bands: from "
        "the smallest to the largest seed.",
    )


def _draw(ax: Axes, own: pd.DataFrame, column: str, colour: str, label: str) -> None:
    for member, style in (("base", "-"),) if column == "train_loss" else (("twin", "-"), ("null", "--")):
        rows = own[own["member"].str.startswith(member)]
        by_seed = np.log(rows[column].clip(lower=stability.LEAST)).groupby([rows["seed"], rows["epoch"]]).mean()
        lines = np.exp(by_seed.unstack("seed"))
        ax.plot(
            lines.index,
            np.exp(np.log(lines).mean(axis=1)),
            style,
            color=colour,
            label=label if style == "-" else None,
            linewidth=1.0,
        )
        if style == "-":
            ax.fill_between(
                lines.index, lines.min(axis=1), lines.max(axis=1), color=colour, alpha=0.15, linewidth=0
            )


def main() -> None:
    """Read the records and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the records")
    parser.add_argument("out", type=Path, help="the figure")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    figure(stability.read(given.folder)).savefig(given.out, dpi=200)
    print(given.out)


if __name__ == "__main__":
    main()
