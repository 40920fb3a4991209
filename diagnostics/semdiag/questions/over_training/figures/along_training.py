"""The metrics against epochs, from the snapshots of each run."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, PercentFormatter

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import (
    attention_style,
    decades,
    finished,
    panel_grid,
    paper_style,
    plain_numbers,
)
from semdiag.questions.learning.figures.learning_speed import runs_by_setting
from semdiag.questions.over_training.measure import SAMPLES

# Quantity, statistic of the line, of a thin second line, axis.
_SHOWN = (
    ("dispersion", "p50", "p95", "δ (nats)"),
    ("response", "mean", None, "response ‖p − p′‖₁"),
    ("query_key_gradient", "share", None, "queries' and keys' share of squared gradient"),
)
_FEW = 3  # runs, above which thin lines would hide the others
_SHORT = 2  # decades, below which powers of ten alone would leave an axis bare
_LINEAR = ("query_key_gradient",)


@paper_style
def along_training(findings: Findings) -> Figure:
    """Draw δ, response and the gradient's share in queries and keys against epochs; Δ, ξ and Γ stand in the CSV.

    Returns:
        A row of panels per setting, a line per run.

    Raises:
        NothingToDrawError: if no snapshot was measured.
    """
    measurements = findings.measurements
    pooled = measurements.along[measurements.along["layer"] == ALL]
    groups = runs_by_setting(findings, pooled["model"], seeds_apart=False)
    if not groups:
        raise NothingToDrawError("No snapshot was measured: add --along.")
    columns = len(_SHOWN)
    figure, axes = panel_grid(columns * len(groups), height=2.5, sharey=False, columns=columns)
    for place, (title, runs) in enumerate(groups):
        row = axes[columns * place : columns * (place + 1)]
        for ax, shown in zip(row, _SHOWN, strict=True):
            _draw(ax, runs, pooled, *shown)
        for ax, (*_, label) in zip(row, _SHOWN, strict=True):
            ax.set_title(f"{title}: {label}" if ax is row[0] else label)
    samples = min(SAMPLES, int(measurements.models["samples"].max()))
    return finished(
        figure,
        f"points: snapshots, each measured on the same {samples} held-out samples, layers and heads pooled, "
        f"medians; thin, where there are at most {_FEW} runs: 95th percentile; one line per seed; response to 1% "
        "input noise, one draw. Δ, ξ and Γ against epochs: data/along.csv",
    )


def _draw(
    ax: Axes, runs: pd.DataFrame, pooled: pd.DataFrame, quantity: str, main: str, second: str | None, _: str
) -> None:
    rows = pooled[pooled["quantity"] == quantity]
    drawn, crowded = False, len(runs) > _FEW
    for run in runs.to_dict("records"):
        style = attention_style(run["kind"])
        for statistic, width in ((main, 1.5), (second, 0.6))[: 1 if crowded else 2]:
            points = rows[(rows["model"] == run["model"]) & (rows["statistic"] == statistic)].sort_values("epoch")
            points = points[points["value"].notna() & ((points["value"] > 0) | (quantity in _LINEAR))]
            drawn |= len(points) > 0
            ax.plot(
                points["epoch"], points["value"], color=style.color, linestyle=style.line, linewidth=width,
                marker=style.marker, markersize=4 if statistic == main else 2,
                label=run["attention"] if statistic == main else None,
            )  # fmt: skip
    if quantity not in _LINEAR and drawn and (span := decades(ax)) > 1:
        ax.set_yscale("log")
        if span < _SHORT:
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plain_numbers(ax.yaxis)
    if quantity == "query_key_gradient":
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if not drawn:
        ax.text(0.5, 0.5, "nothing to show", transform=ax.transAxes, ha="center", fontsize=7)
    ax.set_xlabel("epoch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
