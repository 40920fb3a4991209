"""Draws the advantage over full attention at every level of the study of robustness.

python experiments/robustness.py --out reports/robustness
python experiments/robustness_figure.py reports/robustness
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from forest import draw_row, label_rows
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.presenting.drawing.style import attention_style, finished, panel_grid, paper_style

ATTENTIONS = {
    "topk-5": ("top-5", "o", attention_style("topk").color, 0.16),
    "banded-5-global-1": ("banded-5 with a global token", "s", attention_style("banded").color, -0.16),
}


@paper_style
def figure(advantages: pd.DataFrame) -> Figure:
    """A panel per task, a row per level: each attention's advantage with its 95% t-interval."""
    tasks = list(dict.fromkeys(advantages["task"]))
    drawn, axes = panel_grid(len(tasks), height=4.0, columns=len(tasks))
    for place, (ax, task) in enumerate(zip(axes, tasks, strict=True)):
        _draw(ax, advantages[advantages["task"] == task], first=place == 0)
        ax.set_title(f"{task}:\n{_finding(advantages[advantages['task'] == task])}")
    return finished(
        drawn,
        "Mean training loss beside full attention's at the same level: minus the ln of their ratio (right "
        "of 0: learns faster). Three seeds, 95% t-intervals.",
    )


def _finding(own: pd.DataFrame) -> str:
    """Say at how many levels the whole interval of top-5 lies on one side of full attention."""
    shown = own[(own["attention"] == "topk-5") & (own["missing"] == 0)]
    faster, slower = (shown["low"] > 0).sum(), (shown["high"] < 0).sum()
    return f"top-5 faster at {faster}, slower at {slower} of {len(shown)}"


def _draw(ax: Axes, own: pd.DataFrame, first: bool) -> None:
    levels = list(dict.fromkeys(own["level"]))
    for attention, (name, *style) in ATTENTIONS.items():
        shown = own[(own["attention"] == attention) & (own["missing"] == 0)]
        rows = np.array([len(levels) - 1 - levels.index(level) for level in shown["level"]])
        ends = (shown[column].to_numpy(float) for column in ("advantage", "low", "high"))
        draw_row(ax, rows, *ends, *style, name)
    label_rows(ax, levels, first)
    ax.set_xlabel("advantage over full attention")


def main() -> None:
    """Read the table of advantages and write the figure beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the tables; the figure is written there")
    folder = parser.parse_args().folder
    figure(pd.read_csv(folder / "advantages.csv")).savefig(folder / "robustness.png", dpi=200)
    print(folder / "robustness.png")


if __name__ == "__main__":
    main()
