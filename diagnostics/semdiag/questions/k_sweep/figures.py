"""The section ``k-sweep`` of a report: weight kept, dispersion, separation and changed outputs against k."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL
from semdiag.measuring.words import counted
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.panels import NothingToDrawError, short_labels
from semdiag.presenting.drawing.style import FAINT, INK, drawing, finished, palette, panel_grid, plain_numbers
from semdiag.questions.bounds.corollary import JUDGED_PERCENTILES
from semdiag.questions.k_sweep.answer import MASS, unit_of
from semdiag.questions.k_sweep.budgets import KINDS, RANDOM, TOP_K
from semdiag.questions.k_sweep.changes import WHOLE, change_table, condition_table, quarter_table, tolerance_of

_HIGHEST = 5.0  # upper end of the axis of left sides: far above 1 the value does not matter
_FEW = 3  # with more models, a second line for each would hide the others
LINES = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
_PANELS = {  # quantity: title, percentile of the second line
    "mass": ("attention weight kept", "p5"),
    "ratio": ("dispersion δₕ(k)/δₛ", "p95"),
    "separation": ("separation Δₕ(k) (nats)", "p5"),
}


@drawing(
    "Against k, within each model: attention weight of the k largest scores, dispersion ratio, "
    "separation on a logarithmic axis, and left sides of the paper's conditions around 1: {shown}.",
    "Look for a k at which the weight kept is above the dashed line while all curves of the last "
    "panel are below 1. Where there is none, no top-k mask both keeps what this model attends to "
    "and has the better guarantee by the paper's own conditions.",
)
def k_sweep(findings: Findings) -> Figure:
    """Draw what k heavy hitters would leave of each model's attention."""
    measurements = findings.measurements
    swept = set(measurements.sweep["model"])
    labels = {model: label for model, label in short_labels(measurements.models).items() if model in swept}
    if not labels:
        raise NothingToDrawError("No model was measured for every k: semdiag k-sweep does.")
    pooled = measurements.sweep[(measurements.sweep["layer"] == ALL) & (measurements.sweep["k"] > 0)]
    conditions = findings(condition_table)
    figure, axes = panel_grid(len(_PANELS) + 1, height=2.6, sharey=False)
    colors = palette(len(labels))
    for place, (model, label) in enumerate(labels.items()):
        color, line = colors[place], LINES[place % len(LINES)]
        own = pooled[pooled["model"] == model]
        for ax, (quantity, (_, outer)) in zip(axes, _PANELS.items(), strict=False):
            rows = own[own["quantity"] == quantity]
            middle = "mean" if quantity == "mass" else "p50"  # as in the verdict
            ax.plot(rows["k"], rows[middle], color=color, linestyle=line, linewidth=1.6, label=label)
            if len(labels) <= _FEW:
                ax.plot(rows["k"], rows[outer], color=color, linestyle=":", linewidth=1.0)
        _conditions(axes[-1], conditions[conditions["model"] == model], color, line)
    for ax, (title, _) in zip(axes, _PANELS.values(), strict=False):
        ax.set_title(title)
    line_at(axes[0])
    axes[0].set_ylim(0, 1.06)
    axes[1].set_ylim(0, 1.06)
    if (pooled.loc[pooled["quantity"] == "separation", "p50"] > 0).any():  # not where all are ties
        axes[2].set_yscale("log")
    plain_numbers(axes[2].yaxis)
    axes[3].axhline(1, color=INK, linestyle="--", linewidth=0.9)
    axes[3].set_title("better guarantee by the paper: below 1")
    axes[3].set_ylim(0, float(np.clip(1.1 * axes[3].dataLim.ymax, 2.0, _HIGHEST)))
    if conditions.empty:
        axes[3].set_xlim(axes[0].get_xlim())
        axes[3].text(
            0.5, 0.5, "not judged:\nqueries were drawn", ha="center", va="center", transform=axes[3].transAxes
        )
    for ax in axes:
        ax.set_xlabel("k")
    samples = measurements.provenance.get("probe_samples")
    each = "" if samples is None else f", {counted(samples, 'sample')} per model"
    return finished(
        figure,
        "Within each model: its own scores, layers, heads and queries with more than k keys pooled"
        f"{each}; weight: means, others medians"
        f"{', thin: 5th percentile (ratio: 95th)' if len(labels) <= _FEW else ''}"
        ". Last panel: the larger left side of the two conditions of the paper's Corollary 1, over p75, p90 and "
        "p95 of δ and load/k with p25, p10 and p5 of Δ.",
    )


def line_at(ax: Axes) -> None:
    """Mark the share of the weight that counts as enough."""
    ax.axhline(MASS, color=FAINT, linestyle="--", linewidth=0.9)
    ax.annotate(
        f"{MASS:.0%}", (0, MASS), xycoords=("axes fraction", "data"), xytext=(2, 1), textcoords="offset points",
        fontsize=7, color=FAINT, ha="left", va="bottom",
    )  # fmt: skip


def _conditions(ax: Axes, rows: pd.DataFrame, color: str, line: object) -> None:
    rows = rows[rows["percentile"].isin(JUDGED_PERCENTILES)]
    sides = rows["left_side"].where(np.isfinite(rows["left_side"])).groupby(rows["k"]).max()
    ax.plot(sides.index, sides, color=color, linestyle=line, linewidth=1.4)


TITLES = {
    "loss": "change of the loss (nats)",
    "divergence": "change of the output distribution (KL, nats)",
    "output_change": "change of the outputs (relative)",
}


@drawing(
    "Against k, what running the models with real masks changed, with 95% intervals and as many "
    "random keys as a control, beside the attention weight that the masks keep: {shown}.",
    "Look for the smallest k from which on the whole band is below the dashed line: that many keys "
    "per query are enough. The weight kept is no proxy for that.",
)
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


@drawing(
    "Against the share of the keys that is kept, what running the model with each kind of sparse "
    "attention changed, with 95% intervals: {shown}.",
    "Look for the lowest line at the share that you can afford. Top-k by query and head is the best "
    "that a choice by score can do; kinds that share their choice, or choose blocks, are what kernels "
    "run.",
)
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


@drawing(
    "On texts of several lengths, what each kind of sparse attention changed, against the number of "
    "keys kept (left) and against their share (right), with 95% intervals: {shown}.",
    "Where the lines of a left panel lie on each other, all lengths need the same number of keys; "
    "where those of a right panel do, the same share.",
)
def kinds_by_length(findings: Findings) -> Figure:
    """Draw what masks change on texts of several lengths."""
    table = findings(quarter_table)
    table = table[(table["length"] > 0) & (table["quarter"] == WHOLE) & (table["mask"] != RANDOM)]
    if table["length"].nunique() < 2:
        raise NothingToDrawError(
            "One length was run. For others: semdiag k-sweep MODEL --rerun --lengths 128,512."
        )
    model = str(table["model"].iloc[0])
    own = table[(table["model"] == model) & table["mask"].isin(KINDS)].replace([np.inf, -np.inf], np.nan)
    shown = [kind for kind in KINDS if kind in set(own["mask"])]
    factor = unit_of(findings, model).perplexity
    lengths = sorted(own["length"].unique())
    colors = dict(zip(lengths, palette(len(lengths)), strict=True))
    figure, axes = panel_grid(2 * len(shown), height=2.8, columns=2, sharey=False)
    for at, kind in enumerate(shown):
        for ax, column in zip(axes[2 * at : 2 * at + 2], ("k", "kept"), strict=True):
            for length in lengths:
                rows = own[(own["mask"] == kind) & (own["length"] == length)].sort_values(column)
                draw_changes(ax, rows, column, factor, color=colors[length], label=counted(length, "token"))
            label = scale_changes(ax, findings, own, factor)
            ax.set_title(kind)
        axes[2 * at].set_xscale("log", base=2)
        axes[2 * at].xaxis.set_major_formatter("{x:g}")
        axes[2 * at].set_xlabel("keys kept, k")
        axes[2 * at + 1].set_xlabel("share of the keys kept")
        axes[2 * at + 1].xaxis.set_major_formatter("{x:.0%}")
        axes[2 * at].set_ylabel(label)
    return finished(
        figure, "Bars: 95% intervals over pieces of text. Dashed: the largest change that counts as none."
    )


HEADINGS = (
    Heading(
        "k-sweep",
        "Is sparse attention enough in this model, and with which k?",
        (kinds_of_masks, kinds_by_length, loss_change, k_sweep),
        (
            "This is a comparison within a model, on its own scores. A model trained with that k has other "
            "scores: see the sections above that compare trained models.",
            "Percentiles of δ, Δ and load are combined although they come from different queries, as the paper "
            "does: that is a heuristic.",
            "Only queries with more than k keys count at k: curves jump where layers that see a window of keys "
            "have no such query any more.",
            "Small k meets the paper's condition easily because δₕ(1) = 0: a mask that keeps one key has no "
            "dispersion and no attention left to learn.",
        ),
    ),
)
