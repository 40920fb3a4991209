"""Draws the five figures of docs/why-faster.md from the committed records.

python experiments/why_faster_figures.py reports/why-faster
"""

import argparse
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import claims
import numpy as np
import pandas as pd
import torch
from forest import draw_row, in_times, label_rows
from frozen_figure import ARMS
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from t_intervals import t_interval

from semdiag.presenting.drawing.style import FAINT, INK, finished, panel_grid, paper_style, save_figure
from semdiag_models.tasks import find_task

HERE = Path(__file__).parent
BROKEN, COLOURS = "#b3261e", {claims.FULL: "#3d3d3d", claims.TOP: "#c2570c"}
SEED = 1  # of the example
TASKS = "even-pairs", "missing-duplicate"


@paper_style
def example() -> Figure:
    """Draw a string of even-pairs, its ends marked."""
    tokens, labels = find_task("even-pairs").sample(1, 40, torch.Generator().manual_seed(SEED))
    bits = tokens[0].tolist()
    drawn, (ax,) = panel_grid(1, height=0.7, columns=1)
    for place, bit in enumerate(bits):
        end = place in (0, len(bits) - 1)
        look = {"color": INK, "fontsize": 13, "fontweight": "bold"} if end else {"color": FAINT, "fontsize": 9}
        ax.text(place, 0, str(bit), ha="center", va="center", **look)
    ax.set_xlim(-1, len(bits))
    ax.set_ylim(-0.5, 0.5)
    ax.set_axis_off()
    changes = sum(one != other for one, other in pairwise(bits))
    odd = bool(labels[0])
    ends = "unequal" if odd else "equal"
    ax.set_title(f"{changes} neighbours differ, an {'odd' if odd else 'even'} number, as the ends are {ends}")
    return finished(drawn, "A string of even-pairs, length 40. The ends alone decide the label.")


@paper_style
def curves() -> Figure:
    """Draw the training losses of three seeds on two tasks."""
    drawn, axes = panel_grid(2, height=2.6, columns=2)
    for ax, task in zip(axes, TASKS, strict=True):
        for attention, colour in COLOURS.items():
            runs = [run for (name, _), run in claims.paper_size(attention).items() if name == task]
            for number, history in enumerate(runs):
                label = {claims.FULL: "full", claims.TOP: "top-5"}[attention] if number == 0 else None
                ax.plot(history["epoch"], history["train_loss"], color=colour, linewidth=1.2, label=label)
        ax.set_xlim(0, 140)
        ax.set_title(task)
        ax.set_xlabel("epoch")
        ax.set_ylabel("training loss (nats)")
    return finished(drawn, "The paper's size and recipe, three seeds each.")


def links() -> list[tuple[str, str, bool]]:
    """Return the steps of the paper's argument, what was measured of each, and whether it is as the paper says."""
    starts = claims.head_starts().groupby("task")["ratio"].max()
    ratios = {name: claims.top_over_full(name) for name in ("dispersion", "xi_sound", "lambda_sound")}
    ahead = int((starts < 1).sum())
    nats = np.log(ratios["lambda_sound"])
    return [
        ("mask", "5 keys a query", True),
        ("δ smaller", "{:.2f} to {:.2f} times full's".format(*_ends(ratios["dispersion"])), True),
        ("ξ smaller", "{:.0f} to {:.0f} times full's".format(*_ends(ratios["xi_sound"])), False),
        ("λ smaller", "e^{:.0f} to e^{:.0f} times full's".format(*_ends(nats)), False),
        ("faster", f"{ahead} of {len(starts)} tasks", True),
    ]


def _ends(values: "pd.Series[float]") -> tuple[float, float]:
    return float(values.min()), float(values.max())


@paper_style
def chain() -> Figure:
    """Draw the paper's argument as a chain, what breaks in red."""
    drawn, (ax,) = panel_grid(1, height=0.8, columns=1)
    steps = links()
    for place, (name, measured, holds) in enumerate(steps):
        colour = INK if holds else BROKEN
        ax.text(place, 0.3, name, ha="center", va="center", color=colour, fontsize=12, fontweight="bold")
        ax.text(place, -0.3, measured, ha="center", va="center", color=colour, fontsize=8)
        if place:
            breaks = steps[place - 1][2] and not holds
            style = {"arrowstyle": "->", "color": BROKEN if breaks else INK, "linestyle": "--" if breaks else "-"}
            ax.annotate("", (place - 0.32, 0.3), (place - 0.68, 0.3), arrowprops=style)
    ax.set_xlim(-0.5, len(steps) - 0.5)
    ax.set_ylim(-0.6, 0.7)
    ax.set_axis_off()
    return finished(
        drawn,
        "The paper's chain. Red: what was measured is the opposite; dashed: the link that breaks. δ, ξ and λ are "
        "of seven small tasks before training; the tasks are those at the paper's size.",
    )


@paper_style
def frozen() -> Figure:
    """Draw top-5's advantage on two tasks, queries and keys trained and frozen."""
    table = pd.read_csv(HERE.parent / "reports" / "frozen" / "advantages.csv").set_index(["task", "attention"])
    drawn, (ax,) = panel_grid(1, height=1.6, columns=1)
    for arm, style in ARMS.items():
        rows = [table.loc[(task, claims.TOP)] for task in TASKS]
        ends = (np.exp([row[f"{arm}{end}"] for row in rows]) for end in ("", "_low", "_high"))
        draw_row(ax, np.arange(len(TASKS))[::-1], *ends, *style, f"queries and keys {arm}")
    label_rows(ax, list(TASKS), first=True, equal=1.0)
    in_times(ax, [0.5, 1, 2, 4], 0.8, 7.0)
    ax.set_xlabel("full attention's mean training loss over top-5's")
    return finished(drawn, "Small models, five seeds, 95% t-intervals; full attention is trained.")


@paper_style
def times_four() -> Figure:
    """Draw full × 4 over top-5, task by task."""
    ratios = claims.sharper_than_top()
    means = [t_interval(ratios[task].to_numpy(np.float64)) for task in claims.SMALL]
    means.append(t_interval(ratios.mean().to_numpy(np.float64)))
    middle, low, high = (
        np.array([math.exp(getattr(m, end)) for m in means]) for end in ("estimate", "low", "high")
    )
    drawn, (ax,) = panel_grid(1, height=2.8, columns=1)
    draw_row(ax, np.arange(len(means))[::-1].astype(float), middle, low, high, "o", INK, 0.0, None)
    ax.set_yticks(range(len(means)), [*claims.SMALL, "over tasks"][::-1])
    ax.axvline(1.0, color=INK, linewidth=0.8, linestyle="--")
    ax.set_xscale("log")
    ax.set_xticks([0.3, 0.5, 0.7, 1.0], ["0.3", "0.5", "0.7", "1"])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("mean training loss, full attention with scores × 4 over top-5")
    return finished(drawn, "Small models, eight seeds, 95% t-intervals. Left of 1: no mask, and faster.")


FIGURES: dict[str, Callable[[], Figure]] = {
    "example": example, "curves": curves, "chain": chain, "frozen": frozen, "times-four": times_four,
}  # fmt: skip


def main() -> None:
    """Draw all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, draw in FIGURES.items():
        save_figure(draw(), folder / name, ["svg"])


if __name__ == "__main__":
    main()
