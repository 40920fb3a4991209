"""Accuracy, dispersion and separation against the length of the inputs."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import (
    FAINT,
    attention_style,
    finished,
    panel_grid,
    paper_style,
    plain_numbers,
)
from semdiag.questions.learning.figures.learning_speed import runs_by_setting

_SHOWN = (
    ("accuracy", "value", None, "accuracy"),
    ("dispersion", "p50", "p95", "δ (nats)"),
    ("separation", "p50", "p5", "Δ (nats)"),
)


@paper_style
def length_generalisation(findings: Findings) -> Figure:
    """Draw accuracy with its interval, δ and Δ against the length of the inputs.

    Returns:
        One row of panels per setting and seed.

    Raises:
        NothingToDrawError: if no length was evaluated.
    """
    measurements = findings.measurements
    pooled = measurements.lengths[measurements.lengths["layer"] == ALL]
    groups = runs_by_setting(findings, pooled["model"], seeds_apart=True)
    if not groups:
        raise NothingToDrawError("No other length was evaluated: add --lengths 40,60,80.")
    trained = measurements.models.set_index("model")["length"]
    figure, axes = panel_grid(3 * len(groups), height=2.5, sharey=False, columns=3)
    for place, (title, runs) in enumerate(groups):
        row = axes[3 * place : 3 * place + 3]
        for ax, shown in zip(row, _SHOWN, strict=True):
            _draw(ax, runs, pooled, *shown)
            ax.axvline(int(trained[runs["model"].iloc[0]]), color=FAINT, linewidth=1.0, linestyle=(0, (1, 2)))
        row[0].set_title(title)
    return finished(
        figure,
        f"{int(pooled['samples'].max())} fresh samples of each length, no padding; bars: 95% Wilson intervals; "
        "thin: 95th percentile of δ, 5th of Δ (left out where Δ is not positive or nothing is dropped); dotted: "
        "the longest input of training",
    )


def _draw(
    ax: Axes, runs: pd.DataFrame, pooled: pd.DataFrame, quantity: str, main: str, second: str | None, label: str
) -> None:
    rows = pooled[pooled["quantity"] == quantity]
    drawn = False
    for run in runs.to_dict("records"):
        style = attention_style(run["kind"])
        wide = rows[rows["model"] == run["model"]].pivot_table(index="length", columns="statistic", values="value")
        for statistic, width in ((main, 1.5), (second, 0.6)):
            if statistic not in wide:
                continue
            points = wide[wide[statistic].notna() & ((wide[statistic] > 0) | (quantity == "accuracy"))]
            drawn |= len(points) > 0
            value = points[statistic]
            errors = [value - points["low"], points["high"] - value] if quantity == "accuracy" else None
            ax.errorbar(
                points.index, value, yerr=errors, color=style.color, linestyle=style.line, linewidth=width,
                elinewidth=0.9, capsize=2, marker=style.marker, markersize=4.5 if statistic == main else 2,
                label=run["attention"] if statistic == main else None,
            )  # fmt: skip
    if quantity == "accuracy":
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        ax.set_ylim(top=1.03)
    elif drawn:
        ax.set_yscale("log")
        plain_numbers(ax.yaxis)
    else:
        ax.text(0.5, 0.5, "no key is dropped", transform=ax.transAxes, ha="center", fontsize=7)
    ax.set_xticks(sorted(pooled["length"].unique()))
    ax.set_ylabel(label)
    ax.set_xlabel("length of the inputs (tokens)")
