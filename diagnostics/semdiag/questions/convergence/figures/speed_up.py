"""Speed-up over full attention, by task and attention, with bounds where a run never arrived."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import (
    FAINT,
    AttentionStyle,
    attention_style,
    finished,
    panel_grid,
    paper_style,
    plain_numbers,
)
from semdiag.questions.convergence.answer.epochs import arrivals, over_seeds, speed_ups
from semdiag.questions.convergence.words import target_words, targets_sentence

_ARROW = 1.35  # length of an arrow, as a factor


@paper_style
def speed_up(findings: Findings) -> Figure:
    """Draw the speed-up of every pair of runs, and its median with an interval over seeds."""
    table = findings(arrivals)
    pairs = speed_ups(table)
    if pairs.empty:
        raise NothingToDrawError("No run has a full-attention run of the same setting and seed.")
    if len(pairs) == 1:
        raise NothingToDrawError("One pair has one speed-up, which the table has.")
    if (pairs["known"] == "unknown").all():
        raise NothingToDrawError("Neither full attention nor any other reached the target: no speed-up is known.")
    seeds = over_seeds(table, pairs)
    figure, (ax,) = panel_grid(1, height=3.6)
    groups = list(dict.fromkeys(pairs["group"]))
    kinds = list(dict.fromkeys(pairs["attention"]))
    width = 0.8 / len(kinds)
    for place, attention in enumerate(kinds):
        for at, group in enumerate(groups):
            of_attention = pairs[(pairs["group"] == group) & (pairs["attention"] == attention)]
            if len(of_attention):
                x = at + (place - (len(kinds) - 1) / 2) * width
                style = attention_style(str(of_attention["kind"].iloc[0]))
                row = seeds[(seeds["group"] == group) & (seeds["attention"] == attention)].iloc[0]
                _draw(ax, x, width, of_attention, row, style)
                ax.plot([], [], marker=style.marker, color=style.color, linestyle="none", label=attention)
    _finish(ax, groups)
    ax.set_ylabel(f"speed-up over full attention\n(epochs to {target_words(findings)}, ratio)")
    return finished(
        figure,
        f"{targets_sentence(findings)} point: one seed; arrow: only this bound is known, because one run never "
        "reached the target; bar: interval of the median over seeds (order statistics; its confidence stands "
        "beside it), none for one seed; ?: neither reached it",
    )


def draw_speed(ax: Axes, x: float, pair: pd.Series, style: AttentionStyle) -> None:
    """Draw one speed-up, or an arrow from what bounds it."""
    if pair["known"] == "unknown":
        return
    end = pair["high"] if pair["known"] == "below" else pair["low"]
    ax.plot(
        x, end, marker=style.marker, markersize=6, color=style.color, linestyle="none", zorder=3,
        markerfacecolor=style.color if pair["known"] == "exactly" else "white",
    )  # fmt: skip
    if pair["known"] != "exactly":
        tip = end / _ARROW if pair["known"] == "below" else end * _ARROW
        ax.annotate(
            "", (x, tip), (x, end), arrowprops={"arrowstyle": "->", "color": style.color, "lw": 1.2}, zorder=2
        )
        ax.update_datalim([(x, tip / 1.05), (x, tip * 1.05)])


def _draw(
    ax: Axes,
    x: float,
    width: float,
    pairs: pd.DataFrame,
    row: pd.Series,
    style: AttentionStyle,
) -> None:
    spread = np.linspace(-0.25, 0.25, len(pairs)) * width if len(pairs) > 1 else [0.0]
    for shift, (_, pair) in zip(spread, pairs.iterrows(), strict=True):
        draw_speed(ax, x + shift, pair, style)
    if (pairs["known"] == "unknown").all():
        ax.annotate(
            "?", (x, 1.0), color=style.color, ha="center", va="bottom", fontsize=9, textcoords="offset points",
            xytext=(0, 2),
        )  # fmt: skip
    if len(pairs) > 1 and math.isfinite(row["interval_high"]) and row["interval_low"] > 0:
        ax.plot([x, x], [row["interval_low"], row["interval_high"]], color=style.color, linewidth=1.2, zorder=1)
        ax.annotate(
            f"{row['interval_coverage']:.0%}", (x, row["interval_high"]), fontsize=6.5, color=FAINT, ha="center",
            textcoords="offset points", xytext=(0, 6),
        )  # fmt: skip


def _finish(ax: Axes, groups: list[str]) -> None:
    ax.set_yscale("log")
    ax.autoscale_view()
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0.6), max(high, 1.7))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plain_numbers(ax.yaxis)
    ax.axhline(1.0, color=FAINT, linewidth=1.0, linestyle=(0, (4, 2)), zorder=0)
    ax.set_xticks(range(len(groups)), [group.replace(", ", ",\n") for group in groups])
    ax.set_xlim(-0.6, len(groups) - 0.4)
