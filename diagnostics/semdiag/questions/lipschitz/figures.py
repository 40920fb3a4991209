"""Figures: secants of the loss by radius, and how far blocks stretch their inputs."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.words import counted
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presenting.drawing.style import INK, drawing, finished, panel_grid, title_with_facts
from semdiag.questions.lipschitz.answer import PERCENTILES, RESAMPLES, secant_percentiles


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
    planes, pairs = int(table["planes"].min()), int(table["pairs"].min())
    samples, seed = (findings.measurements.provenance.get(name, 0) for name in ("lipschitz_samples", "seed"))
    bands = (
        f"bands: 95%, whole planes resampled {RESAMPLES} times"
        if table["low"].notna().any()
        else "no bands: too few"
    )
    return finished(
        figure,
        f"{counted(planes, 'random plane')} (seed {seed}), each tensor's direction as long as the tensor; per "
        f"radius {pairs} pairs of the checkpoint and points on circles; loss over {counted(samples, 'sample')}. "
        f"{bands}",
    )


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


_HIGHEST = 600.0  # logarithm of what still fits an axis


@drawing(
    "How much each block stretches a small change of its input at most, sample by sample, below bars for the "
    "bound λ_X, logarithmic axis: {shown}.",
    "The higher points of a block pass a change of its input on more strongly. The black dashes bound them "
    "closely, at these inputs; the bars are what the theory promises of all with the same δ, Δ and norms.",
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
        (lipschitz_percentiles, block_stretch),
        (
            "A trained model whose loss is near 0 is flat nearby whatever its attention: compare the "
            "initialisations as well (the runs' epoch-0.pt).",
            "Random directions are nearly orthogonal to the gradient, so secants lie far below gradient norms. "
            "With a top-k mask the loss jumps where a key is swapped: secants see it, gradients do not.",
            "The intervals are about other random planes around these models, not about other training runs.",
        ),
    ),
)
