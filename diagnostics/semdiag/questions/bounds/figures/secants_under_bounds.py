"""How far the constants of Theorem 2 lie above the measured slopes of the loss, block by block."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from semdiag.measuring.findings.finding import Finding, log10
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError, Series, panels_of
from semdiag.presenting.drawing.powers import power_of_ten, powers_of_ten
from semdiag.presenting.drawing.style import (
    FAINT,
    finished,
    lightened,
    panel_grid,
    paper_style,
    title_with_facts,
)
from semdiag.questions.bounds.answer.summary import parameter_findings

_DRAWN = {"ln_point": ("bound at the point", 2.6, 0.0), "ln_local": ("local bound", 1.0, 0.45)}
_STATED = ("sound", "paper")  # forms too far above the slope to be drawn
_COLUMNS = (*_DRAWN, "ln_gradient")


@paper_style
def secants_under_bounds(findings: Findings) -> Figure:
    """Draw the constants over the measured slope, from the smallest to the largest ratio of a block's tensors."""
    measurements = findings.measurements
    rows = measurements.parameters
    rows_with_constants = rows[np.isfinite(rows[list(_COLUMNS)].to_numpy(float)).any(axis=1)]
    measured = set(rows_with_constants["model"])
    panels = [p for p in panels_of(measurements.models) if any(s.model in measured for s in p.series)]
    if not panels:
        raise NothingToDrawError("No constant of a parameter tensor is known.")
    judged = {(f.subject, f.form): f for f in findings(parameter_findings) if f.where == "all"}
    figure, axes = panel_grid(len(panels), height=3.0)
    for ax, panel in zip(axes, panels, strict=True):
        shown = [series for series in panel.series if series.model in measured]
        for place, series in enumerate(shown):
            of_model = rows_with_constants[rows_with_constants["model"] == series.model]
            _draw(ax, of_model, series, (place - (len(shown) - 1) / 2) * 0.8 / len(shown))
        title_with_facts(
            ax, panel.title, _facts([judged[s.model, f] for s in shown for f in _STATED if (s.model, f) in judged])
        )
        ax.axhline(0, color=FAINT, linewidth=0.8)
        ax.set_xlabel("block")
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
    axes[0].set_ylabel("constant / measured slope")
    for name, (label, width, _) in _DRAWN.items():
        axes[0].plot([], [], color=FAINT, linewidth=width, label=f"{label}, {_kind(name)}")
    samples = measurements.provenance.get("bound_samples")
    scope = f"the {samples} evaluated inputs" if samples else "the evaluated inputs"
    return finished(
        figure,
        "A line reaches from the smallest to the largest ratio over the tensors of a block; at 1 a bound is "
        f"attained.\nThe slope is the gradient of the mean loss over {scope}; constants hold for these at this "
        "checkpoint only. The local bound takes the loss's residual as it is; that at the point, the gradients in "
        "the mixed values.",
    )


def _kind(name: str) -> str:
    return "of queries and keys" if name == "ln_point" else "of every tensor"


def _facts(judged: Sequence[Finding]) -> list[str]:
    """Return how far the forms that are not drawn lie above the slopes, over all attentions of a panel."""
    facts = []
    for form in _STATED:
        numbers = [f.numbers for f in judged if f.form == form and "smallest log10 gap" in f.numbers]
        if numbers:
            ends = [n["smallest log10 gap"] for n in numbers], [n["largest log10 gap"] for n in numbers]
            name = "sound constants" if form == "sound" else "the paper's"
            facts.append(f"{name} {powers_of_ten(min(ends[0]), max(ends[1]))} times the slope")
    return [f"{'; '.join(facts)}: too loose to draw"] if facts else []


def _draw(ax: Axes, rows: pd.DataFrame, series: Series, shift: float) -> None:
    last = int(rows["layer"].max())
    style: Any = series.style
    slope = rows["ln_gradient"]
    x = np.where(rows["layer"] >= 0, rows["layer"], np.where(rows["group"] == "embedding", -1, last + 1))
    for name, (_, width, white) in _DRAWN.items():
        gaps = (rows[name] - slope).where(np.isfinite(rows[name]) & np.isfinite(slope)).map(log10)
        ends = gaps.groupby(x).agg(["min", "median", "max"]).dropna()
        color = lightened(style.color, white)
        ax.vlines(ends.index + shift, ends["min"], ends["max"], color=color, linewidth=width)
        ax.plot(
            ends.index + shift, ends["median"], marker=style.marker, markersize=4 if width > 2 else 2.5,
            color=color, linestyle="none",
        )  # fmt: skip
    ax.plot([], [], marker=style.marker, color=style.color, linestyle="none", label=series.label)
    ticks = sorted({int(layer) for layer in rows["layer"] if layer >= 0})
    ax.set_xticks([*ticks, -1, last + 1], [*map(str, ticks), "emb.", "head"])
    ax.set_xlim(-1.6, last + 1.6)
