"""What real masks changed, against k, beside the attention weight that they keep."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError, short_labels
from semdiag.presenting.drawing.style import (
    INK,
    finished,
    palette,
    panel_grid,
    paper_style,
    plain_numbers,
)
from semdiag.questions.k_sweep.answer.rerun import change_table, tolerance_of
from semdiag.questions.k_sweep.figures.k_sweep import LINES, line_at

_FEW = 3  # with more models, the lines of their controls would hide the others
TITLES = {
    "loss": "change of the loss (nats)",
    "divergence": "change of the output distribution (KL, nats)",
    "output_change": "change of the outputs (relative)",
}


@paper_style
def loss_change(findings: Findings) -> Figure:
    """Draw what running the models with masks changed, and the weight that these keep."""
    again = findings(change_table)
    if again.empty:
        raise NothingToDrawError("No model was run with masks. To do so: semdiag k-sweep MODEL --rerun.")
    again = again[again["mask"].isin(("topk", "random"))].sort_values("k").replace([np.inf, -np.inf], np.nan)
    labels = {
        model: label
        for model, label in short_labels(findings.measurements.models).items()
        if model in set(again["model"])
    }
    measures = [name for name in TITLES if name in set(again["measure"])]
    figure, axes = panel_grid(len(measures) + 1, height=3.0, sharey=False)
    colors = dict(zip(labels, palette(len(labels)), strict=True))
    for place, (model, label) in enumerate(labels.items()):
        own, color = again[again["model"] == model], colors[model]
        top, line = own[own["mask"] == "topk"], LINES[place % len(LINES)]
        ax = axes[measures.index(str(top["measure"].iloc[0]))]
        ax.fill_between(top["k"], top["low"], top["high"], color=color, alpha=0.25, linewidth=0)
        ax.plot(top["k"], top["change"], color=color, linestyle=line, marker=".", label=label)
        if len(labels) <= _FEW:
            random = own[own["mask"] == "random"]
            ax.plot(random["k"], random["change"], color=color, linestyle=":", linewidth=1.0)
            ax.plot([], [], color=INK, linestyle=":", linewidth=1.0, label="as many random keys")
        axes[-1].plot(top["k"], top["mass"], color=color, linestyle=line, marker=".")
    for ax, measure in zip(axes, measures, strict=False):
        tolerance = tolerance_of(findings, measure)
        change_axis(ax, tolerance, again[again["measure"] == measure])
        ax.set_title(TITLES[measure])
    axes[-1].set_title("attention weight kept")
    line_at(axes[-1])
    axes[-1].set_ylim(0, 1.06)
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(FixedLocator([2.0**n for n in range(12) if 2**n <= again["k"].max()]))
        plain_numbers(ax.xaxis)
        ax.set_xlabel("k")
    drawn = [ax for ax in axes if np.isfinite(ax.dataLim.minposx)]
    for ax in axes if drawn else ():  # masks that drop nothing have no weight, and changes may be NaN
        ax.set_xlim(drawn[0].get_xlim())
    top = again[again["mask"] == "topk"]
    unknown = sorted({int(k) for k in top.loc[top["mass"].isna() & (top["kept"] < 1), "k"]})
    ends = f"; unknown at {', '.join(map(str, unknown))}, above the sweep's largest k (--max-k)" if unknown else ""
    return finished(
        figure,
        "Bands: 95% intervals over samples. Horizontal line: the largest change that counts as none; the axis "
        f"is linear below it and logarithmic above. Weight: mean over queries with more than k keys{ends}.",
    )


def change_axis(ax: Axes, tolerance: float, rows: pd.DataFrame) -> None:
    """Make an axis linear up to the tolerance and logarithmic beyond, with the tolerance as a line."""
    low = np.nanmin(rows[["low", "change"]].to_numpy(), initial=0.0)  # of the changes that are not NaN, if any
    high = np.nanmax(rows[["high", "change"]].to_numpy(), initial=0.0)
    ax.set_yscale("symlog", linthresh=tolerance, linscale=0.6)
    steps = (1, 2, 4) if high < 100 * tolerance else (1,)
    ticks = [tolerance * 10.0**n * step for n in range(8) for step in steps]
    ticks = [tick for tick in ticks if tick <= max(tolerance, high)]
    below = [-tick for tick in ticks if tick <= -2 * low]
    ax.yaxis.set_major_locator(FixedLocator([*below, 0.0, *ticks]))
    ax.yaxis.set_minor_locator(NullLocator())
    plain_numbers(ax.yaxis)
    ax.set_ylim(min(1.4 * low, -0.3 * tolerance), max(1.6 * high, 2 * tolerance))
    ax.axhline(tolerance, color=INK, linestyle="--", linewidth=0.9)
