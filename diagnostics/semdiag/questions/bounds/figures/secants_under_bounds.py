"""Slopes of the loss that were measured, under the constants of Theorem 2, group by group."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from semdiag.measuring.findings.finding import Finding, Verdict, log10
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError, panels_of
from semdiag.presenting.drawing.powers import factors, power_of_ten
from semdiag.presenting.drawing.style import (
    FAINT,
    INK,
    attention_style,
    finished,
    panel_grid,
    paper_style,
    title_with_facts,
)
from semdiag.questions.bounds.answer.summary import FORMS, parameter_findings

GROUPS = ("qk", "value-output", "mlp-in", "mlp-out")
_PAPER = "#b0622a"
_LOCAL = "#2a7f62"
_POINT = "#3b5bb5"
_COLUMNS = ("ln_sound", "ln_paper", "ln_local", "ln_point", "ln_gradient", "ln_secant")


@paper_style
def secants_under_bounds(findings: Findings) -> Figure:
    """Draw log10 of the largest constant and slope of each group of tensors, block by block.

    Args:
        findings: with the tables constants and parameters.

    Returns:
        One panel per model.

    Raises:
        NothingToDrawError: if no constant of a parameter tensor is known.
    """
    measurements = findings.measurements
    rows = measurements.parameters
    known = rows[np.isfinite(rows[list(_COLUMNS)].to_numpy(float)).any(axis=1)]
    shown = [
        (panel, series)
        for panel in panels_of(measurements.models)
        for series in panel.series
        if series.model in set(known["model"])
    ]
    if not shown:
        raise NothingToDrawError("No constant of a parameter tensor is known.")
    judged = {(f.subject, f.form): f for f in findings(parameter_findings) if f.where == "all"}
    figure, axes = panel_grid(len(shown), height=2.9, columns=min(len(shown), 2))
    for ax, (panel, series) in zip(axes, shown, strict=True):
        own = known[known["model"] == series.model]
        _draw(ax, own, attention_style(series.attention).color)
        own_findings = [judged[series.model, form] for form in FORMS if (series.model, form) in judged]
        facts = [line for finding in own_findings for line in _facts(finding)]
        title_with_facts(ax, f"{panel.title}, {series.label}", facts)
        ax.set_xlabel("block")
    axes[0].set_ylabel("slope or constant")
    for ax in axes:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
    samples = measurements.provenance.get("bound_samples")
    scope = f"the {samples} evaluated inputs" if samples else "the evaluated inputs"
    return finished(
        figure,
        f"within a block, left to right: {', '.join(GROUPS)}; the largest of a group's tensors. Constants hold "
        f"for {scope} at this checkpoint only;\nvacuous: more than 1,000 times the slope in most tensors. The "
        "bound at the point is one of the gradient in queries and keys, from the gradients in the mixed values.\n"
        "Gradient and secant are two measurements: neither need be the larger (gradient of the mean loss over "
        "these inputs, secants over the first few).",
    )


_WORDS = {Verdict.VIOLATED: "exceeded"}


def _facts(finding: Finding) -> list[str]:
    """What became of the constants of one form, in lines."""
    numbers = finding.numbers
    if "smallest log10 gap" not in numbers:
        return [f"{finding.form}: {_WORDS.get(finding.verdict, finding.verdict)}"]
    gaps = factors(numbers["smallest log10 gap"], numbers["largest log10 gap"])
    silent = not finding.note or finding.verdict is Verdict.NOT_MET  # which says so itself
    unmet = [] if silent else [f"{finding.form}: assumptions not all met"]
    return [
        f"{finding.form}: {_WORDS.get(finding.verdict, finding.verdict)}, constants {gaps} times the slope",
        *unmet,
    ]


def _draw(ax: Axes, rows: pd.DataFrame, color: str) -> None:
    tops = rows.groupby(["layer", "group"])[list(_COLUMNS)].max().reset_index()
    last = int(tops["layer"].max())
    groups = zip(tops["layer"], tops["group"], strict=True)
    x = np.array([_place(int(layer), str(group), last) for layer, group in groups])
    y = {name: tops[name].where(np.isfinite(tops[name])).map(log10).to_numpy(float) for name in _COLUMNS}
    measured = np.fmax(y["ln_gradient"], y["ln_secant"])
    ax.vlines(x, measured, y["ln_sound"], color="#cfcfcf", linewidth=0.9, zorder=1)
    dash: dict[str, Any] = {"marker": "_", "markersize": 8, "linestyle": "none"}
    ax.plot(x, y["ln_sound"], color=INK, markeredgewidth=2, label="sound constant", **dash)
    ax.plot(x, y["ln_paper"], color=_PAPER, markeredgewidth=1.2, label="paper's constant", **dash)
    ax.plot(x, y["ln_local"], color=_LOCAL, markeredgewidth=1.2, label="local constant", **dash)
    ax.plot(x, y["ln_point"], color=_POINT, markeredgewidth=2, label="bound at the point", **dash)
    for name, marker, label in (("ln_gradient", "o", "measured gradient"), ("ln_secant", "x", "measured secant")):
        ax.plot([], [], marker=marker, markersize=4, color=FAINT, linestyle="none", label=label)
        ax.plot(x, y[name], marker=marker, markersize=4, color=color, linestyle="none")
    ax.axhline(0, color=FAINT, linewidth=0.6)
    ticks = sorted({int(layer) for layer in tops["layer"] if layer >= 0})
    ends = [("embedding", -1.0), ("head", last + 1.0)]
    ax.set_xticks([*ticks, *(place for _, place in ends)], [*map(str, ticks), "emb.", "head"])
    ax.set_xlim(-1.6, last + 1.6)


def _place(layer: int, group: str, last: int) -> float:
    """Abscissa of a group: blocks at their number, embedding left of them, head right."""
    if layer < 0:
        return -1.0 if group == "embedding" else last + 1.0
    at = GROUPS.index(group) if group in GROUPS else len(GROUPS)
    return layer + 0.2 * (at - (len(GROUPS) - 1) / 2)
