"""Draws how much more a replaced sample changes top-5 than full attention, from the study's verdicts.

python experiments/stability_figure.py reports/stability
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import stability
from forest import draw_row, in_times, label_rows, name_sides, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.presenting.drawing.style import attention_style, finished, page_width, panel_grid, paper_style

MOMENTS = ("equal epoch", "matched loss", "end")
VERDICTS = {"more stable": ("banded", "D"), "cannot tell": ("full", "o"), "less stable": ("topk", "s")}
NARROWEST, WIDEST = 0.01, 1100.0  # of the axis


@paper_style
def figure(verdicts: pd.DataFrame) -> Figure:
    """A panel per task, a row per moment: the ratio of ε̂ of top-5 to full attention's, with its 95% t-interval."""
    top = verdicts[verdicts["attention"] == "topk-5"]
    drawn, axes = panel_grid(len(stability.TASKS), height=1.7, columns=3)
    for place, (ax, task) in enumerate(zip(axes, stability.TASKS, strict=True)):
        own = top[top["task"] == task].set_index("moment").loc[list(MOMENTS)]
        _draw(ax, own)
        label_rows(ax, list(MOMENTS), first=place == 0 or page_width() < 5, equal=1.0)
        in_times(ax, [0.01, 1, 100], NARROWEST, WIDEST)
        name_sides(ax, "more stable", "less stable")
        less = int((own["verdict"] == "less stable").sum())
        ax.set_title(f"{task}: less stable in {less} of {len(own)}", pad=20)
    return finished(
        drawn,
        "ε̂ of top-5, the largest change of a loss that one replaced sample makes, as a multiple of full "
        "attention's. 95% t-intervals over seeds: eight, at matched loss on even-pairs five and on "
        "missing-duplicate two.",
    )


def _draw(ax: Axes, own: pd.DataFrame) -> None:
    places = np.arange(len(own))[::-1]
    for verdict, (kind, marker) in VERDICTS.items():
        shown = (own["verdict"] == verdict).to_numpy()
        ends = (np.exp(own.loc[shown, column].to_numpy(float)) for column in ("ln_ratio", "low", "high"))
        if shown.any():
            draw_row(ax, places[shown], *ends, marker, attention_style(kind).color, 0.0, verdict)


def main() -> None:
    """Read the verdicts and write the figure beside them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of verdicts.csv; the figure is written there")
    folder = parser.parse_args().folder
    verdicts = pd.read_csv(folder / "verdicts.csv")
    print(*save(lambda: figure(verdicts), folder, "stability"), sep="\n")


if __name__ == "__main__":
    main()
