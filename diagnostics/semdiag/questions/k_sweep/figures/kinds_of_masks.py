"""Kinds of sparse attention side by side: what each changed, against the share of the keys that it keeps."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError, short_labels
from semdiag.presenting.drawing.style import (
    FAINT,
    INK,
    finished,
    palette,
    panel_grid,
    paper_style,
    plain_numbers,
)
from semdiag.questions.k_sweep.answer.rerun import change_table, tolerance_of
from semdiag.questions.k_sweep.answer.sparse_verdict import unit_of
from semdiag.questions.k_sweep.figures.loss_change import TITLES, change_axis
from semdiag.questions.k_sweep.measure.kinds import KINDS, RANDOM, TOP_K


@paper_style
def kinds_of_masks(findings: Findings) -> Figure:
    """Draw what each kind of sparse attention changed against the share of the keys that it keeps."""
    again = findings(change_table)
    again = again[again["mask"].isin(KINDS)] if len(again) else again
    several = [m for m, own in again.groupby("model", sort=False) if set(own["mask"]) - {TOP_K, RANDOM}]
    if not several:
        raise NothingToDrawError("Only top-k was run. For others: semdiag k-sweep MODEL --rerun --kinds.")
    labels = short_labels(findings.measurements.models)
    figure, axes = panel_grid(len(several), height=3.6, sharey=False)
    shown = [kind for kind in KINDS if kind in set(again["mask"])]
    colors = dict(zip(shown, palette(len(shown)), strict=True)) | {RANDOM: FAINT}
    for ax, model in zip(axes, several, strict=True):
        own = again[again["model"] == model].sort_values("kept").replace([np.inf, -np.inf], np.nan)
        factor = unit_of(findings, str(model)).perplexity
        for kind in (kind for kind in shown if kind in set(own["mask"])):
            line = ":" if kind == RANDOM else "-"
            draw_changes(
                ax, own[own["mask"] == kind], "kept", factor, color=colors[kind], label=kind, linestyle=line
            )
        ax.set_ylabel(scale_changes(ax, findings, own, factor))
        ax.set_xlabel("share of the keys kept")
        ax.xaxis.set_major_formatter("{x:.0%}")
        if len(several) > 1:
            ax.set_title(labels[str(model)])
    return finished(
        figure,
        "Bars: 95% intervals over samples. Dashed: the largest change that counts as none. Shares are of the keys "
        "of all queries together, those with few keys included.",
    )


def draw_changes(ax: Axes, rows: pd.DataFrame, along: str, factor: bool, **style: Any) -> None:
    """Draw what masks changed as a line with 95% intervals; ``factor``: as multiples of perplexity."""
    change, low, high = (rows[name].to_numpy(float) for name in ("change", "low", "high"))
    if factor:
        change, low, high = (np.exp(np.minimum(x, 50)) for x in (change, low, high))
    ax.vlines(rows[along], low, high, color=style["color"], linewidth=1.0, alpha=0.6)
    ax.plot(rows[along], change, marker=".", **style)


def scale_changes(ax: Axes, findings: Findings, own: pd.DataFrame, factor: bool) -> str:
    """Scale the axis of one model's changes, with the tolerance as a line, and return its label."""
    measure = str(own["measure"].iloc[0])
    tolerance = tolerance_of(findings, measure)
    if not factor:
        change_axis(ax, tolerance, own)
        return TITLES[measure]
    ax.set_yscale("log")
    ax.axhline(np.exp(tolerance), color=INK, linestyle="--", linewidth=0.9)
    plain_numbers(ax.yaxis)
    return "perplexity, as a multiple"
