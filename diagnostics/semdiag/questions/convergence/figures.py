"""Figures: speed-up over full attention, and learning curves."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, PercentFormatter

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.words import counted, percent
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import (
    FAINT,
    AttentionStyle,
    attention_style,
    drawing,
    finished,
    panel_grid,
    plain_numbers,
    title_with_facts,
    wrapped,
)
from semdiag.questions.convergence.answer import (
    arrival_words,
    arrivals,
    over_seeds,
    seed_curves,
    speed_dispersion_table,
    speed_ups,
    target_words,
    targets_sentence,
)

_ARROW = 1.35  # length of an arrow, as a factor


@drawing(
    "Speed-up over full attention by task and attention, logarithmic axis with a line at 1, arrows "
    "where only a bound is known: {shown}.",
    "Points above the line learned in fewer epochs than full attention of the same seed. An arrow "
    "means that one run never reached the target: the true speed-up lies somewhere in its direction.",
)
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


def _draw(ax: Axes, x: float, width: float, pairs: pd.DataFrame, row: pd.Series, style: AttentionStyle) -> None:
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
            f"{row['interval_coverage']:.0%}", (x, row["interval_high"]), fontsize=9, color=FAINT, ha="center",
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


@drawing(
    "Training and held-out accuracy against epochs, one panel per task, median and range over seeds for each "
    "attention: {shown}.",
    "Thick lines are training accuracy, of each run or, from three seeds on, their median with their range. "
    "Markers on the dashed line are the epochs at which single runs reach the target.",
)
def learning_curves(findings: Findings) -> Figure:
    """Draw median training accuracy over seeds with its range, single arrivals, and held-out accuracy."""
    table = findings(arrivals)
    table = table[table["epochs"] > 0]
    if table.empty:
        raise NothingToDrawError("No run has a finished epoch.")
    groups = [(str(group), runs) for group, runs in table.groupby("group", sort=False)]
    figure, axes = panel_grid(len(groups), height=3.0, sharey=False, columns=min(len(groups), 2))
    for ax, (group, runs) in zip(axes, groups, strict=True):
        facts, target = [], float(runs["target"].iloc[0])
        for attention, seeds in runs.groupby("attention", sort=False):
            style = attention_style(str(seeds["kind"].iloc[0]))
            _draw_learning_curves(ax, style, *seed_curves(findings, seeds, "train_accuracy"), 1.7)
            _draw_learning_curves(ax, style, *seed_curves(findings, seeds, "holdout_accuracy"), 0.7)
            ax.plot([], [], color=style.color, linestyle=style.line, marker=style.marker, markersize=4,
                    label=str(attention))  # fmt: skip
            arrived = seeds["arrival"].dropna()
            ax.plot(
                arrived, [target] * len(arrived), marker=style.marker, color=style.color, markersize=5.5,
                linestyle="none", markeredgecolor="white", markeredgewidth=0.6, zorder=4,
            )  # fmt: skip
            facts.append(f"{attention}: {', '.join(arrival_words(run) for run in seeds.to_dict('records'))}")
        ax.axhline(target, color=FAINT, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
        title_with_facts(ax, f"{group}: epochs to {percent(target, 'g')}", facts)
        ax.set_xlabel("epoch")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        ax.set_ylim(top=1.03)
    for ax in axes[::2]:
        ax.set_ylabel("accuracy")
    return finished(
        figure,
        "above the panel: epochs to this training accuracy, seed by seed; markers: the same. thick: training, "
        "thin: held-out; from three seeds on the lower median, with their range as a band, in which a run that "
        "stopped at the target keeps its last accuracy",
    )


def _draw_learning_curves(
    ax: Axes, style: AttentionStyle, curves: pd.DataFrame, band: pd.DataFrame, width: float
) -> None:
    epochs = curves.index
    for _, values in curves.items():
        ax.plot(
            epochs, values, color=style.color, linestyle=style.line, linewidth=width,
            marker="." if len(epochs) == 1 else "",
        )  # fmt: skip
    if len(band) and width > 1:
        ax.fill_between(epochs, band["low"], band["high"], color=style.color, alpha=0.18, linewidth=0)


@drawing(
    "Speed-up over full attention against the ratio of median dispersions at the last checkpoint, "
    "logarithmic axes: {shown}.",
    "If a smaller dispersion went with faster learning, points would fall from the upper left to the lower right. "
    "Bars are intervals over inputs only. Runs of one attention are not independent points.",
)
def speed_up_against_dispersion(findings: Findings) -> Figure:
    """Draw speed-up against δ_h/δ_s for every pair of runs."""
    table = findings(speed_dispersion_table)
    table = table[(table["known"] != "unknown") & (table["ratio"] > 0)]
    if table.empty:
        raise NothingToDrawError("There is no pair of runs whose speed-up and ratio of dispersions are known.")
    figure, (ax,) = panel_grid(1, height=4.0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    names = {group: place + 1 for place, group in enumerate(dict.fromkeys(table["group"]))}
    for _, pair in table.iterrows():
        style = attention_style(pair["kind"])
        end = pair["high"] if pair["known"] == "below" else pair["low"]
        ax.plot([pair["ratio_low"], pair["ratio_high"]], [end, end], color=style.color, linewidth=1.0, zorder=1)
        draw_speed(ax, pair["ratio"], pair, style)
        ax.plot([], [], marker=style.marker, color=style.color, linestyle="none", label=pair["attention"])
        ax.annotate(
            str(names[pair["group"]]), (pair["ratio"], end), xytext=(6, 4), textcoords="offset points", fontsize=9,
            color=FAINT,
        )  # fmt: skip
    ax.autoscale_view()
    ax.set_xlim(*_with_one(ax.get_xlim()))
    ax.set_ylim(*_with_one(ax.get_ylim()))
    for axis, line in ((ax.xaxis, ax.axvline), (ax.yaxis, ax.axhline)):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plain_numbers(axis)
        line(1.0, color=FAINT, linewidth=0.9, linestyle=(0, (4, 2)), zorder=0)
    ax.set_xlabel(wrapped(ax, "δ of sparse / δ of full attention, pooled medians at the last checkpoint"))
    ax.set_ylabel(f"speed-up over full attention\n(epochs to {target_words(findings)}, ratio)")
    samples = int(findings.measurements.models["samples"].max())
    numbers = "; ".join(f"{place} = {group}" for group, place in names.items())
    return finished(
        figure,
        f"{targets_sentence(findings)} {numbers}. bars: 95% intervals over sequences (200 resamplings of "
        f"{counted(samples, 'sample')}); hollow with arrow: a bound, because one run never reached the target",
    )


def _with_one(limits: tuple[float, float]) -> tuple[float, float]:
    """Widen limits so that 1 stands inside."""
    return min(limits[0], 0.9) / 1.15, max(limits[1], 1.1) * 1.15


HEADINGS = (
    Heading(
        "convergence",
        "Which attention learns faster, and by how much?",
        (learning_curves, speed_up, speed_up_against_dispersion),
        (
            "Runs that never reach the target are censored, not dropped: medians of epochs are Kaplan–Meier "
            "estimates, those of speed-ups ranges. Intervals over seeds are order statistics, with their "
            "confidence; one seed has none.",
            "Epochs are counted, not seconds. Dispersion and speed are both measured after training: that they go "
            "together does not show that one causes the other.",
        ),
    ),
)
