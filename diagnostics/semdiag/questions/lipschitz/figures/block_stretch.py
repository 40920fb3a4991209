"""How much blocks stretch their input, found by power iteration, under the bound λ_X."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presenting.drawing.style import INK, finished, panel_grid, paper_style, title_with_facts

_HIGHEST = 600.0  # logarithm of what still fits an axis


@paper_style
def block_stretch(findings: Findings) -> Figure:
    """Draw the largest Jacobian norm of every block and sample, its bound there, and smallest and largest λ_X."""
    table = findings.measurements.jacobians
    if table.empty:
        raise NothingToDrawError("No Jacobian of a block was measured.")
    measured = set(table["model"])
    panels = [p for p in panels_of(findings.measurements.models) if any(s.model in measured for s in p.series)]
    figure, axes = panel_grid(len(panels), height=2.8)
    for ax, panel in zip(axes, panels, strict=True):
        facts = _draw(ax, panel, table)
        title_with_facts(ax, panel.title, facts)
        ax.set_xlabel("block")
    axes[0].set_ylabel("largest stretch ‖J‖ (token norm)")
    samples = int(table.groupby(["model", "layer"]).size().max())
    return finished(
        figure,
        f"points: one of {samples} samples each, power iteration from one random start, a lower bound of ‖J‖ in "
        "the sum over tokens of 2-norms.\nBound at these inputs: largest column sum of the exact Jacobian, or its "
        "closed form where inputs are long. Bars: λ_X, smallest to largest over the same samples.",
    )


def _draw(ax: Axes, panel: Panel, table: pd.DataFrame) -> list[str]:
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
