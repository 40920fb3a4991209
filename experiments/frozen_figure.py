"""Draws what survives freezing, from the tables of the study.

python experiments/frozen.py --out reports/frozen
python experiments/frozen_figure.py reports/frozen
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from forest import draw_row, in_times, label_rows, name_sides, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.presenting.drawing.style import (
    attention_style,
    finished,
    mask_style,
    page_width,
    panel_grid,
    paper_style,
)

ATTENTIONS = {"topk-5": "top-5", "full-times-4": "full, scores × 4", "random-5": "random-5"}
ARMS = {  # marker, colour, place beside the line
    "trained": ("o", attention_style("topk").color, 0.14),
    "frozen": ("s", mask_style("topk-layer").color, -0.14),
}
TICKS = [0.25, 1.0, 4.0, 16.0]


@paper_style
def figure(advantages: pd.DataFrame) -> Figure:
    """A panel per attention, a row per task: the advantage trained and frozen, with 95% t-intervals."""
    drawn, axes = panel_grid(len(ATTENTIONS), height=3.0, columns=3)
    shown = advantages[advantages["attention"].isin(ATTENTIONS)]
    ends = np.exp(shown[[f"{arm}_{end}" for arm in ARMS for end in ("low", "high")]].to_numpy(float))
    for place, (ax, (attention, name)) in enumerate(zip(axes, ATTENTIONS.items(), strict=True)):
        _draw(ax, advantages[advantages["attention"] == attention], first=place == 0 or page_width() < 5)
        in_times(ax, TICKS, 0.95 * ends.min(), 1.05 * ends.max())
        name_sides(ax, "slower", "faster")
        ax.set_title(name, pad=20)
    return finished(
        drawn,
        "Mean training loss of trained full attention over that of this attention, same seed. Right of × 1: "
        "learns faster. Five seeds, 95% t-intervals.",
    )


def _draw(ax: Axes, own: pd.DataFrame, first: bool) -> None:
    tasks = list(own["task"])
    for arm, style in ARMS.items():
        ends = (np.exp(own[f"{arm}{end}"].to_numpy(float)) for end in ("", "_low", "_high"))
        draw_row(ax, np.arange(len(tasks))[::-1], *ends, *style, f"queries and keys {arm}")
    label_rows(ax, tasks, first, equal=1.0)


def main() -> None:
    """Read the table of advantages and write the figure beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the tables; the figure is written there")
    folder = parser.parse_args().folder
    advantages = pd.read_csv(folder / "advantages.csv")
    print(*save(lambda: figure(advantages), folder, "survives_freezing"), sep="\n")


if __name__ == "__main__":
    main()
