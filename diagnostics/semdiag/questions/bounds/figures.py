"""Figures: the constants of Theorem 2 above measured slopes, and Corollary 1."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings, compared_pairs
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import (
    ATTENTION_STYLES,
    INK,
    attention_style,
    drawing,
    note_below,
    page_width,
    panel_grid,
)
from semdiag.questions.bounds.corollary import HEURISTIC, PAPER_PERCENTILES, corollary_table

_FORMS = {"paper": ("paper's condition", 1.0), "sound": ("sound margin", 0.0)}
_PARAMETERS = ("W", "X")
_EQUAL = 1e-12  # a margin of which nothing is left but rounding
_COLORS = ListedColormap(["#dcdcdc", "#f3c9a5", "#dcebf8", "#a9cdea"])  # undecided; met in no, some, every case


@drawing(
    "How often both conditions of Corollary 1 are met at percentiles 75, 90, 95 and 100, and beside them those of "
    "the sound comparison, as coloured cells, two rows a kind of attention: {shown}.",
    "A blue cell means that the mask has the better worst-case guarantee at that percentile in every pair, an "
    "orange one that full attention has. Left is the paper's condition, right the comparison of sound constants; "
    "where the two disagree, the paper's explanation rests on its form of ξ. For masks whose rows differ in "
    "length the right is no bound: see the comparison by layers.",
)
def corollary_conditions(findings: Findings) -> Figure:
    """Draw how many pairs of a kind of attention meet the conditions, as coloured cells with counts."""
    pairs = findings(compared_pairs)
    table = corollary_table(findings, pairs)
    finite = table[np.isfinite(table[["value", "full_dispersion", "dispersion"]]).all(axis=1)]
    if finite.empty:
        raise NothingToDrawError("No masked model is compared with a full one, or no condition can be stated.")
    kind_of = findings.measurements.models.set_index("model")["attention"]
    table["kind"] = table["pair"].map({pair.label: kind_of[pair.other] for pair in pairs})
    known = set(table["kind"])
    kinds = [kind for kind in ATTENTION_STYLES if kind in known] + sorted(known - ATTENTION_STYLES.keys())
    figure, axes = panel_grid(2, height=0.8 + 0.6 * len(kinds), sharey=False, columns=2)
    for ax, (form, (title, limit)) in zip(axes, _FORMS.items(), strict=True):
        own = table[table["form"] == form]
        decided = np.isfinite(own["value"]) & ~np.isclose(own["value"], limit, rtol=0, atol=_EQUAL)
        own = own.assign(decided=decided, met=decided & (own["value"] < limit))
        counts = own.groupby(["kind", "parameter", "percentile"])[["decided", "met"]].sum()
        index = pd.MultiIndex.from_product([kinds, _PARAMETERS, PAPER_PERCENTILES])
        _draw_counts(ax, counts.reindex(index, fill_value=0).to_numpy(int).reshape(-1, len(PAPER_PERCENTILES), 2))
        ax.set_title(f"{title}: met in {own['met'].sum()} of {own['decided'].sum()} cases")
        names = [f"{attention_style(kind).name}, {name}" for kind in kinds for name in _PARAMETERS]
        ax.set_yticks(range(len(names)), names if form == "paper" or page_width() < 5 else [])
    note_below(
        figure,
        "A cell counts pairs. Blue: the mask has the better guarantee in all of them; orange: full attention has; "
        "grey: neither, or it cannot be told. W and X: the conditions in the weights and in the input. "
        f"{HEURISTIC[0].upper()}{HEURISTIC[1:]}, separation at the mirrored percentiles (25, 10, 5, 0).",
    )
    return figure


def _draw_counts(ax: Axes, counts: np.ndarray) -> None:
    """Draw (rows, percentiles, 2): how many cases are decided, and how many of them are met."""
    decided, met = counts[..., 0], counts[..., 1]
    colors = np.select([decided == 0, met == 0, met < decided], [0, 1, 2], 3)
    ax.imshow(colors, cmap=_COLORS, vmin=0, vmax=3, aspect="auto", interpolation="none")
    for row, column in np.ndindex(*decided.shape):
        number = f"{met[row, column]} of {decided[row, column]}" if decided[row, column] else "–"
        ax.text(column, row, number, ha="center", va="center", fontsize=9, color=INK)
    for edge in range(len(_PARAMETERS), len(counts), len(_PARAMETERS)):
        ax.axhline(edge - 0.5, color="white", linewidth=2)
    ax.set_xticks(range(len(PAPER_PERCENTILES)), [f"p{p}" for p in PAPER_PERCENTILES])
    ax.set_xlabel("percentile of δ and load")
    ax.grid(visible=False)


_HEURISTIC = (
    "Percentiles of δ, Δ and load are combined although they come from different queries, as the paper does: "
    "that is a heuristic, not a theorem about any one query."
)
HEADINGS = (
    Heading(
        "constants",
        "How far below their bounds are the slopes of the loss?",
        (),
        (
            "A constant is the largest over the evaluated inputs at this checkpoint: it bounds the gradient there "
            "and is not a Lipschitz constant of a region. Gradient and secant are lower bounds of the true "
            "constant.",
            "The paper's form is one value for all evaluated inputs, for its own equations (post-norm, no "
            "biases). Where a model differs, the verdict says so: there the paper's theorem claims nothing.",
        ),
    ),
    Heading(
        "corollary",
        "Does the mask have the better guarantee?",
        (corollary_conditions,),
        (
            _HEURISTIC,
            "The sound comparison in W never favours a heavy-hitter mask: the worst-case constant of full "
            "attention does not depend on its δ. Faster learning of a top-k model cannot follow from it.",
            "Fixed masks (banded, local blocks, random) are a control: their constants differ from those of full "
            "attention only in δ, k and load, and ignore what the tokens mean. The paper's numbers are those "
            "it prints, k = 5.",
        ),
    ),
)
