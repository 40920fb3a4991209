"""Speed-up against the ratio of dispersions, over all pairs of runs."""

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import (
    FAINT,
    attention_style,
    finished,
    panel_grid,
    paper_style,
    plain_numbers,
    wrapped,
)
from semdiag.questions.convergence.answer.speed_and_dispersion import speed_dispersion_table
from semdiag.questions.convergence.figures.speed_up import draw_speed
from semdiag.questions.convergence.words import target_words, targets_sentence


@paper_style
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
            str(names[pair["group"]]), (pair["ratio"], end), xytext=(6, 4), textcoords="offset points", fontsize=7,
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
        f"{samples} samples); hollow with arrow: a bound, because one run never reached the target",
    )


def _with_one(limits: tuple[float, float]) -> tuple[float, float]:
    """Widen limits so that 1 stands inside."""
    return min(limits[0], 0.9) / 1.15, max(limits[1], 1.1) * 1.15
