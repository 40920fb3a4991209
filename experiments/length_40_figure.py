"""Draws how soon each run at the paper's size reached 95% training accuracy, from the committed records.

python experiments/length_40_figure.py reports/length-40
"""

import argparse
from pathlib import Path

import claims
import pandas as pd
from forest import save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from semdiag.presenting.drawing.style import attention_style, finished, panel_grid, paper_style

KINDS = {  # name in the legend, kind for the colour, place beside the line
    claims.FULL: ("full", "full", 0.24),
    claims.TOP: ("top-5", "topk", 0.08),
    "banded-5-global-1": ("banded-5, a global token", "banded", -0.08),
    "block-5-global-1": ("blocks of 5, a global token", "block", -0.24),
}
REACHED = 0.95
TICKS = [3, 10, 30, 100, 300]


def arrivals() -> pd.DataFrame:
    """Return a row a run: task, attention, seed, epochs (all if it never arrives) and whether it arrives."""
    rows = []
    for attention in KINDS:
        for (task, seed), history in sorted(claims.paper_size(attention).items()):
            there = history["train_accuracy"].to_numpy() >= REACHED
            epochs = int(there.argmax()) + 1 if there.any() else len(history)
            rows.append((task, attention, seed, epochs, bool(there.any())))
    return pd.DataFrame(rows, columns=["task", "attention", "seed", "epochs", "arrived"])


@paper_style
def figure(table: pd.DataFrame) -> Figure:
    """A row a task, a point a run; hollow: never in so many epochs."""
    tasks = [task for task in claims.TASKS if task in set(table["task"])]
    drawn, (ax,) = panel_grid(1, height=3.0, columns=1)
    for attention, (name, kind, beside) in KINDS.items():
        _draw(ax, table[table["attention"] == attention], tasks, (name, kind, beside))
    ax.set_yticks(range(len(tasks)), tasks[::-1])
    ax.set_ylim(-0.6, len(tasks) - 0.4)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(TICKS))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.grid(visible=False, axis="y")
    ax.grid(axis="x")
    ax.set_xlabel("epochs to 95% training accuracy")
    return finished(
        drawn, "Paper's size and recipe; a point is a seed. Hollow: not reached in any epoch of the run."
    )


def _draw(ax: Axes, own: pd.DataFrame, tasks: list[str], look: tuple[str, str, float]) -> None:
    name, kind, beside = look
    style = attention_style(kind)
    for arrived in (True, False):  # hollow points on top
        part = own[own["arrived"] == arrived]
        rows = [len(tasks) - 1 - tasks.index(task) + beside for task in part["task"]]
        ax.plot(
            part["epochs"], rows, linestyle="none", marker=style.marker, markersize=5, color=style.color,
            markerfacecolor=style.color if arrived else "white", label=name if arrived else None,
        )  # fmt: skip


def main() -> None:
    """Draw it beside the study's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the tables; the figure is written there")
    folder = parser.parse_args().folder
    table = arrivals()
    print(*save(lambda: figure(table), folder, "arrivals"), sep="\n")


if __name__ == "__main__":
    main()
