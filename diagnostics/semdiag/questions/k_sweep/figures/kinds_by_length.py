"""Texts of several lengths: what each kind of sparse attention changes, by k and by share of the keys."""

import numpy as np
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import finished, palette, panel_grid, paper_style
from semdiag.questions.k_sweep.answer.quarters import WHOLE, quarter_table
from semdiag.questions.k_sweep.answer.sparse_verdict import unit_of
from semdiag.questions.k_sweep.figures.kinds_of_masks import draw_changes, scale_changes
from semdiag.questions.k_sweep.measure.kinds import KINDS, RANDOM


@paper_style
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
                draw_changes(ax, rows, column, factor, color=colors[length], label=f"{length} tokens")
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
