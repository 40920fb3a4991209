"""Figures: empirical estimates under the sound bound, group by group."""

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings, log10
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.words import counted
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.panels import NothingToDrawError, Panel, Series, panels_of
from semdiag.presenting.drawing.style import FAINT, INK, drawing, finished, panel_grid, title_with_facts
from semdiag.questions.lipschitz.answer import PERCENTILES, RESAMPLES, secant_percentiles
from semdiag.questions.lipschitz.measure import GROUPS

_POINT = "#3b5bb5"
_NAMES = {
    "all": "all", "qk": "W_qk", "value-output": "V", "mlp-in": "P", "mlp-out": "R", "embedding": "emb.",
    "head": "head",
}  # fmt: skip


@drawing(
    "Decimal logarithm of the largest secant, the largest gradient norm and the sound bound for each group of "
    "parameters, and of queries and keys a bound at the checkpoint: {shown}.",
    "Secants and gradients are two estimates from below, in no order among themselves. "
    "The bound at the checkpoint belongs to the open circle below it, and could have failed. The grey "
    "lines are what the sound bound leaves open, in powers of ten.",
)
def lipschitz_rungs(findings: Findings) -> Figure:
    """Draw log10 of the largest secant, the largest gradient and the bounds of each group."""
    measurements = findings.measurements
    measured = set(measurements.loss_gradients["model"])
    shown = [
        (panel, series) for panel in panels_of(measurements.models) for series in panel.series
        if series.model in measured
    ]  # fmt: skip
    if not shown:
        raise NothingToDrawError("No gradient of the loss was measured.")
    figure, axes = panel_grid(len(shown), height=2.9, columns=min(len(shown), 2))
    for ax, (panel, series) in zip(axes, shown, strict=True):
        _draw(ax, series, measurements.of(series.model))
        ax.set_title(f"{panel.title}, {series.label}")
    axes[0].set_ylabel("log10 of slope or bound")
    return finished(figure, _note(findings))


def _draw(ax: Axes, series: Series, measured: Measurements) -> None:
    groups = ["all", *GROUPS]
    tops = {
        "largest secant": _largest(measured.loss_secants, "slope", groups),
        "largest gradient": _largest(measured.loss_gradients, "slope", groups),
    }
    x = np.arange(len(groups))
    bounds = measured.loss_gradients.groupby("group")["ln_sound"].max()
    high = [log10(float(bounds[g])) if g in bounds and math.isfinite(bounds[g]) else math.nan for g in groups]
    dash: dict[str, Any] = {"marker": "_", "markersize": 14, "linestyle": "none"}
    ax.plot(x, high, color=INK, markeredgewidth=2, label="sound bound", **dash)
    at_point = measured.loss_gradients[measured.loss_gradients["ln_point"].notna()].set_index("group")
    places = [groups.index(str(group)) for group in at_point.index]
    ax.plot(
        places, at_point["ln_point"].map(log10), color=_POINT, markeredgewidth=2,
        label="bound at the checkpoint", **dash,
    )  # fmt: skip
    opened: dict[str, Any] = {"marker": "o", "markersize": 4, "markerfacecolor": "none", "linestyle": "none"}
    ax.plot([], [], color=FAINT, label="gradient there", **opened)
    ax.plot(places, at_point["slope"].map(_decades), color=series.style.color, **opened)
    ax.vlines(x, tops["largest gradient"], high, color="#cfcfcf", linewidth=0.9, zorder=1)
    for shift, (label, marker) in zip(
        (-0.18, 0.0), (("largest secant", "x"), ("largest gradient", "o")), strict=True
    ):
        ax.plot([], [], marker=marker, markersize=4, color=FAINT, linestyle="none", label=label)
        ax.plot(x + shift, tops[label], marker=marker, markersize=4, color=series.style.color, linestyle="none")
    ax.set_xticks(x, [_NAMES[g] for g in groups])
    ax.axhline(0, color=FAINT, linewidth=0.6)


def _decades(value: float) -> float:
    return math.log10(value) if value > 0 else math.nan


def _largest(table: pd.DataFrame, column: str, groups: list[str]) -> list[float]:
    tops = table.groupby("group")[column].max()
    return [_decades(tops[g]) if g in tops else math.nan for g in groups]


def _note(findings: Findings) -> str:
    measurements = findings.measurements
    draws = int(measurements.loss_gradients["draw"].max())
    samples, seed = (measurements.provenance.get(name, 0) for name in ("lipschitz_samples", "seed"))
    radius = float(measurements.loss_gradients["radius"].max())
    return (
        f"Gradients at the checkpoint and {counted(draws, 'random parameter')} up to {radius:.2g} of each "
        f"tensor's norm away (seed {seed}), {counted(samples, 'sample')}; secants in planes (all) and on "
        "lines.\nBound: the largest at the drawn parameters; it holds for them and these samples. Bound at the "
        "checkpoint: of queries and keys, from the gradients in the mixed values there. W_qk: queries and keys, "
        "V: values and outputs, P and R: the MLP's matrices."
    )


@drawing(
    "Percentiles 50, 75, 95 and 99 of the secants of the loss between parameters on circles in random planes "
    "against the radius, logarithmic axes, with 95% bands, attention kinds together: {shown}.",
    "The lower curve belongs to the model whose loss changes less per distance, as the paper says of "
    "top-k. Where the bands overlap, these planes do not settle it.",
)
def lipschitz_percentiles(findings: Findings) -> Figure:
    """Draw percentiles 50, 75, 95 and 99 of |f(θ) − f(θ')| / ‖θ − θ'‖ against the radius, with bands."""
    table = findings(secant_percentiles)
    table = table[table["estimate"] > 0]
    if table.empty:
        raise NothingToDrawError("No secant of the loss was measured in a plane.")
    measured = set(table["model"])
    panels = [p for p in panels_of(findings.measurements.models) if any(s.model in measured for s in p.series)]
    figure, axes = panel_grid(len(panels) * len(PERCENTILES), height=2.6, columns=len(PERCENTILES), sharey=True)
    places = [(panel, percentile) for panel in panels for percentile in PERCENTILES]
    for place, (ax, (panel, percentile)) in enumerate(zip(axes, places, strict=True)):
        _draw_percentiles(ax, panel, table[table["percentile"] == percentile])
        first = place % len(PERCENTILES) == 0
        ax.set_title(f"{panel.title}: p{percentile}" if first else f"p{percentile}")
        ax.set_xlabel("radius, in ‖θ‖")
        if first:
            ax.set_ylabel("secant of the loss\n(nats per unit of θ)")
    return finished(figure, _note_lipschitz_percentiles(findings, table))


def _draw_percentiles(ax: Axes, panel: Panel, table: pd.DataFrame) -> None:
    for series in panel.series:
        rows = table[table["model"] == series.model].sort_values("radius")
        if rows.empty:
            continue
        style = series.style
        ax.fill_between(
            rows["radius"], rows["low"].clip(lower=rows["low"][rows["low"] > 0].min()), rows["high"],
            color=style.color, alpha=0.2, linewidth=0,
        )  # fmt: skip
        ax.plot(
            rows["radius"], rows["estimate"], color=style.color, linestyle=style.line, marker=style.marker,
            markersize=3.5, linewidth=style.width, label=series.label,
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")


def _note_lipschitz_percentiles(findings: Findings, table: pd.DataFrame) -> str:
    planes, pairs = int(table["planes"].min()), int(table["pairs"].min())
    samples = findings.measurements.provenance.get("lipschitz_samples", 0)
    seed = findings.measurements.provenance.get("seed")
    bands = (
        f"Bands: 95%, whole planes resampled {RESAMPLES} times; they are about other planes, not about other "
        "training runs."
        if table["low"].notna().any()
        else "No bands: these are too few for intervals."
    )
    return (
        f"{counted(planes, 'random plane')} (seed {seed}), each tensor's direction as long as the tensor; per "
        f"radius {pairs} pairs of the checkpoint and points on circles, each divided by the true distance of its "
        f"parameters; loss over {counted(samples, 'sample')}.\n{bands} "
        "Where the loss is near 0, so are its secants."
    )


_HIGHEST = 600.0  # logarithm of what still fits an axis


@drawing(
    "How much each block stretches a small change of its input at most, sample by sample, below bars "
    "for the bound λ_X, logarithmic axis: {shown}.",
    "Compare the points of both models at the same block: the higher ones pass a change of the input "
    "on more strongly. The black dashes bound them closely, at these inputs; the bars above them are "
    "what the theory promises of all with the same δ, Δ and norms.",
)
def block_stretch(findings: Findings) -> Figure:
    """Draw the largest Jacobian norm of every block and sample, its bound there, and smallest and largest λ_X."""
    table = findings.measurements.jacobians
    if table.empty:
        raise NothingToDrawError("No Jacobian of a block was measured.")
    measured = set(table["model"])
    panels = [p for p in panels_of(findings.measurements.models) if any(s.model in measured for s in p.series)]
    figure, axes = panel_grid(len(panels), height=2.8)
    for ax, panel in zip(axes, panels, strict=True):
        facts = _draw_block_stretch(ax, panel, table)
        title_with_facts(ax, panel.title, facts)
        ax.set_xlabel("block")
    axes[0].set_ylabel("largest stretch ‖J‖ (token norm)")
    samples = int(table.groupby(["model", "layer"]).size().max())
    return finished(
        figure,
        f"points: each one of {counted(samples, 'sample')}, power iteration from one random start, a lower bound "
        "of ‖J‖ in the sum over tokens of 2-norms.\nBound at these inputs: largest column sum of the exact "
        "Jacobian, or its closed form where inputs are long. Bars: λ_X, smallest to largest over these samples.",
    )


def _draw_block_stretch(ax: Axes, panel: Panel, table: pd.DataFrame) -> list[str]:
    shown = [series for series in panel.series if series.model in set(table["model"])]
    facts = []
    for place, series in enumerate(shown):
        rows = table[table["model"] == series.model]
        shift = (place - (len(shown) - 1) / 2) * 0.7 / max(len(shown), 1)
        style = series.style
        ax.plot(
            rows["layer"] + shift, rows["norm"], marker=style.marker, markersize=3, alpha=0.6, linestyle="none",
            color=style.color, label=series.label,
        )  # fmt: skip
        near = rows["ln_exact"].fillna(rows["ln_point"]).clip(upper=_HIGHEST).groupby(rows["layer"]).max()
        label = None if place else "bound at these inputs"
        ax.plot(near.index + shift, np.exp(near), "_", markersize=8, color=INK, label=label)
        bounds = rows[np.isfinite(rows["ln_sound"])].groupby("layer")["ln_sound"].agg(["min", "max"])
        low, high = (np.exp(bounds[name].clip(upper=_HIGHEST)) for name in ("min", "max"))
        ax.vlines(bounds.index + shift, low, high, color=style.color, linewidth=4, alpha=0.35)
        ax.plot(bounds.index + shift, high, marker="_", markersize=8, color=style.color, linestyle="none")
        facts.append(f"{series.label}: {rows['settled'].mean():.0%} settled")
    ax.set_yscale("log")
    ax.set_xticks(sorted(table["layer"].unique()))
    return ["; ".join(facts)]


HEADINGS = (
    Heading(
        "lipschitz",
        "How steep is the loss around the checkpoint?",
        (lipschitz_percentiles, lipschitz_rungs, block_stretch),
        (
            "A trained model whose loss is near 0 is flat nearby whatever its attention: gradients and secants "
            "shrink with the loss. Compare the initialisations as well (the runs' epoch-0.pt).",
            "Random directions are nearly orthogonal to the gradient, so secants lie far below gradient norms; "
            "none of these numbers is the supremum over the ball.",
            "With a top-k mask the loss jumps where a key is swapped: gradients do not see it, secants do.",
            "The intervals are about other random planes around these models, not about other training runs.",
        ),
    ),
)
