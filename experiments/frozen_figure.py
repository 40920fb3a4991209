"""Draws what survives freezing, from the tables of the study.

python experiments/frozen.py --out reports/frozen
python experiments/frozen_figure.py reports/frozen
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from semdiag.presenting.drawing.style import finished, panel_grid, paper_style

Values = NDArray[np.float64]
ATTENTIONS = {"topk-5": "top-5", "full-times-4": "full, scores × 4", "random-5": "random-5"}
ARMS = {"trained": ("o", "C0", 0.14), "frozen": ("s", "C3", -0.14)}  # marker, colour, place beside the line


@paper_style
def figure(advantages: pd.DataFrame) -> Figure:
    """A panel per attention, a row per task: the advantage trained and frozen, with 95% t-intervals."""
    drawn, axes = panel_grid(len(ATTENTIONS), height=3.0, columns=3)
    shown = advantages[advantages["attention"].isin(ATTENTIONS)]
    ends = shown[[f"{arm}_{end}" for arm in ARMS for end in ("low", "high")]].to_numpy(float)
    for place, (ax, (attention, name)) in enumerate(zip(axes, ATTENTIONS.items(), strict=True)):
        ax.set_xlim(np.floor(ends.min()), np.ceil(ends.max()))
        _draw(ax, advantages[advantages["attention"] == attention], first=place == 0)
        ax.set_title(name)
    return finished(
        drawn,
        "How much smaller the mean training loss is than that of trained full attention of the same seed (ln of "
        "the ratio; right of 0: learns faster). Five seeds, 95% t-intervals.",
    )


def _draw(ax: Axes, own: pd.DataFrame, first: bool) -> None:
    tasks = list(own["task"])
    for arm, style in ARMS.items():
        ends = (own[f"{arm}{end}"].to_numpy(float) for end in ("", "_low", "_high"))
        draw_row(ax, np.arange(len(tasks))[::-1], *ends, *style, f"queries and keys {arm}")
    label_rows(ax, tasks, first)
    ax.set_xlabel("advantage over trained full attention")


def draw_row(
    ax: Axes, rows: Values, middle: Values, low: Values, high: Values, marker: str, colour: str, beside: float,
    label: str,
) -> None:  # fmt: skip
    """Draw a point with its interval beside each of these rows."""
    ax.errorbar(
        middle, rows + beside, xerr=[middle - low, high - middle], linestyle="none", marker=marker,
        color=colour, markersize=4, linewidth=1.2, capsize=2, label=label,
    )  # fmt: skip


def label_rows(ax: Axes, names: list[str], first: bool) -> None:
    """Name the rows, the first name on top, in the first panel; and draw the line of no advantage."""
    ax.axvline(0.0, color="black", linewidth=0.8, linestyle="--")
    ax.set_yticks(range(len(names)), names[::-1])
    ax.tick_params(labelleft=first)


def main() -> None:
    """Read the table of advantages and write the figure beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the tables; the figure is written there")
    folder = parser.parse_args().folder
    drawn = figure(pd.read_csv(folder / "advantages.csv"))
    drawn.savefig(folder / "survives_freezing.png", dpi=200)
    print(folder / "survives_freezing.png")


if __name__ == "__main__":
    main()
