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
    INK,
    drawing,
    note_below,
    page_width,
    panel_grid,
)
from semdiag.questions.bounds.corollary import HEURISTIC, PAPER_PERCENTILES, corollary_table

_FORMS = {"paper": ("paper: left side, met below 1", 1.0), "sound": ("sound: ln margin, met below 0", 0.0)}
_PARAMETERS = ("W", "X")
_EQUAL = 1e-12  # a margin of which nothing is left but rounding
_COLORS = ListedColormap(["#dcdcdc", "#f3c9a5", "#a9cdea"])  # inconclusive, not met, met


@drawing(
    "Left sides of both conditions of Corollary 1 at percentiles 75, 90, 95 and 100, and the "
    "margins of the sound comparison beside them, as coloured cells, two rows a pair: {shown}.",
    "A blue cell means that the mask has the better worst-case guarantee at that percentile, an orange one that "
    "full attention has. Left is the paper's condition, right the comparison of sound constants; where the two "
    "disagree, the paper's explanation rests on its form of ξ. For masks whose rows differ in length the right "
    "numbers are not bounds: see the comparison by layers.",
)
def corollary_conditions(findings: Findings) -> Figure:
    """Draw the conditions of every pair as coloured cells with their numbers."""
    table = corollary_table(findings, findings(compared_pairs))
    finite = table[np.isfinite(table[["value", "full_dispersion", "dispersion"]]).all(axis=1)]
    pairs = [name for name in dict.fromkeys(table["pair"]) if name in set(finite["pair"])]
    if not pairs:
        raise NothingToDrawError("No masked model is compared with a full one, or no condition can be stated.")
    figure, axes = panel_grid(
        2, height=0.7 + (0.5 if page_width() < 5 else 0.36) * len(pairs), sharey=False, columns=2
    )
    for ax, (form, (title, limit)) in zip(axes, _FORMS.items(), strict=True):
        values = _values(table[table["form"] == form], pairs)
        _draw_conditions(ax, values, limit)
        ax.set_title(title.replace(": ", ":\n") if page_width() < 5 else title)
        if form == "paper" or page_width() < 5:
            _name(ax, pairs)
        else:
            ax.set_yticks([])
    note_below(
        figure,
        "Blue: the mask has the better guarantee; orange: full attention has; grey: neither, or it cannot be "
        f"told. W and X: the conditions in the weights and in the input. {HEURISTIC[0].upper()}{HEURISTIC[1:]}, "
        "separation at the mirrored percentiles (25, 10, 5, 0).\nSound margin: W with norms taken as equal, X "
        "with each model's own largest norms; where rows differ in length, one k stands for all of them, and "
        "it is not a bound.",
    )
    return figure


def _values(rows: pd.DataFrame, pairs: list[str]) -> np.ndarray:
    """Return (pairs × conditions, percentiles); NaN where undecided."""
    by_place = rows.set_index(["pair", "parameter", "percentile"])["value"]
    index = pd.MultiIndex.from_product([pairs, _PARAMETERS, PAPER_PERCENTILES])
    values = by_place[~by_place.index.duplicated()].reindex(index).to_numpy(float)
    return values.reshape(len(pairs) * len(_PARAMETERS), len(PAPER_PERCENTILES))


def _draw_conditions(ax: Axes, values: np.ndarray, limit: float) -> None:
    decided = np.isfinite(values) & ~np.isclose(values, limit, rtol=0, atol=_EQUAL)
    kinds = np.where(decided, np.where(values < limit, 2, 1), 0)
    ax.imshow(kinds, cmap=_COLORS, vmin=0, vmax=2, aspect="auto", interpolation="none")
    for (row, column), value in np.ndenumerate(values):
        text = f"{value:.2f}" if np.isfinite(value) else "–"
        ax.text(
            column,
            row,
            text.replace("-", "−"),
            ha="center",
            va="center",
            fontsize=7 if page_width() < 5 else 9,
            color=INK,
        )
    for edge in range(len(_PARAMETERS), len(values), len(_PARAMETERS)):
        ax.axhline(edge - 0.5, color="white", linewidth=2)
    ax.set_xticks(range(len(PAPER_PERCENTILES)), [f"p{p}" for p in PAPER_PERCENTILES])
    ax.set_xlabel("percentile of δ and load")
    ax.grid(visible=False)


def _name(ax: Axes, pairs: list[str]) -> None:
    """Name pair and condition beside the rows."""
    narrow = page_width() < 5
    labels = [f"{pair}, {name}" for pair in pairs for name in _PARAMETERS]
    if narrow:
        labels = [label.replace(", ", ",\n", 1) for label in labels]
    ax.set_yticks(range(len(labels)), labels, fontsize=5.5 if narrow else 9, linespacing=0.95)


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
            "A constant is the largest over the evaluated inputs at this checkpoint, not over all inputs, nor "
            "along training: it bounds the gradient there and is not a Lipschitz constant of a region. The local "
            "form carries each input's residual back token by token, with what is known at the point. "
            "Gradient and secant are lower bounds of the true constant; either may be the larger.",
            "The paper's form is one value for all evaluated inputs together, from their largest norm, δ and load "
            "and their smallest Δ. It is computed for its own equations (post-norm, no biases). Where a model "
            "differs, the verdict says so: there the paper's theorem claims nothing.",
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
            "Fixed masks (banded, block-local, random) are a control: their constants differ from those of full "
            "attention only in δ, k and load, and ignore what the tokens mean. The paper's numbers are those "
            "it prints, k = 5.",
        ),
    ),
)
