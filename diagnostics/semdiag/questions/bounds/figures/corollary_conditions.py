"""The two conditions of Corollary 1 at every percentile, in the paper's form and in the sound one."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.finding import Verdict
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import compared_pairs
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import INK, finished, panel_grid, paper_style, title_with_facts
from semdiag.questions.bounds.answer.corollary import HEURISTIC, PAPER_PERCENTILES, corollary_table

_COLORS = {"W": "#4c72b0", "X": "#dd8452"}
_HATCHES = {"W": "", "X": "///"}
_WIDTH = 0.36


@paper_style
def corollary_conditions(findings: Findings) -> Figure:
    """Draw the left sides of the paper's conditions as bars around 1, and the sound margins beside them.

    Args:
        findings: of full models and their counterparts; with constants also the sound margin in X.

    Returns:
        Two panels per pair: paper (holds below 1) and sound (holds below 0).

    Raises:
        NothingToDrawError: if no pair can be compared.
    """
    table = corollary_table(findings, findings(compared_pairs))
    finite = table[np.isfinite(table[["value", "full_dispersion", "dispersion"]]).all(axis=1)]
    pairs = [name for name in dict.fromkeys(table["pair"]) if name in set(finite["pair"])]
    if not pairs:
        raise NothingToDrawError("No masked model is compared with a full one, or no condition can be stated.")
    figure, axes = panel_grid(2 * len(pairs), height=2.7, sharey=False, columns=2)
    for place, pair in enumerate(pairs):
        for ax, form in zip(axes[2 * place : 2 * place + 2], ("paper", "sound"), strict=True):
            rows = table[(table["pair"] == pair) & (table["form"] == form)]
            _draw(ax, form, rows)
            title = pair if form == "paper" else "the same pair, sound form"
            title_with_facts(ax, title, [_fact(rows, name) for name in ("W", "X")])
    return finished(
        figure,
        "Bars down from the line at 1 or 0: the mask has the better guarantee; up: full attention has. "
        f"Separation at the mirrored percentiles (25, 10, 5, 0). {HEURISTIC[0].upper()}{HEURISTIC[1:]}.\nSound "
        "margin: W with norms taken as equal, X with each model's own largest norms; where rows differ in "
        "length, one k stands for all of them, and the margin is not a bound.",
    )


def _draw(ax: Axes, form: str, rows: pd.DataFrame) -> None:
    base = 1.0 if form == "paper" else 0.0
    for side, name in ((-1, "W"), (1, "X")):
        own = rows[rows["parameter"] == name].set_index("percentile")["value"].reindex(PAPER_PERCENTILES)
        values = own.to_numpy(float)
        places = np.arange(len(PAPER_PERCENTILES)) + side * _WIDTH / 2
        shown = np.isfinite(values)
        ax.bar(
            places[shown], values[shown] - base, bottom=base, width=0.9 * _WIDTH, color=_COLORS[name],
            hatch=_HATCHES[name], edgecolor="white", linewidth=0.5, label=f"condition in {name}",
        )  # fmt: skip
        for x, value in zip(places, values, strict=True):
            missing = "not\nmet" if len(own.dropna()) else "–"
            text, y = (f"{value:.2f}", value) if np.isfinite(value) else (missing, base)
            up = y >= base
            ax.annotate(text, (x, y), xytext=(0, 2 if up else -2), textcoords="offset points", fontsize=6.5,
                        ha="center", va="bottom" if up else "top")  # fmt: skip
    ax.axhline(base, color=INK, linewidth=1.0)
    _leave_room(ax, base, rows["value"])
    ax.set_xticks(range(len(PAPER_PERCENTILES)), [f"p{p}" for p in PAPER_PERCENTILES])
    ax.set_xlabel("percentile of δ and load")
    ax.set_ylabel("paper: left side" if form == "paper" else "sound: ln margin")


def _leave_room(ax: Axes, base: float, values: "pd.Series[float]") -> None:
    """Set the ordinate so that the numbers at the bars' ends and at the line fit."""
    finite = [base, *values[np.isfinite(values)]]
    room = 0.16 * (max(finite) - min(finite)) or 0.1
    ax.set_ylim(min(finite) - room * (min(finite) < base), max(finite) + room)


def _fact(rows: pd.DataFrame, parameter: str) -> str:
    """Where a condition holds, in words."""
    own = rows[rows["parameter"] == parameter]
    if own.empty:
        return f"{parameter}: not known (the norms were not measured)"
    where = [f"p{p}" for p in own[own["verdict"] == Verdict.HOLDS.value]["percentile"]]
    unmet = [f"p{p}" for p in own[own["verdict"] == Verdict.NOT_MET.value]["percentile"]]
    said = f"{parameter}: holds at {', '.join(where)}" if where else f"{parameter}: holds nowhere"
    return said + (f"; assumption not met at {', '.join(unmet)}" if unmet else "")
