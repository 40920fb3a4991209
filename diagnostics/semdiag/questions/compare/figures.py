"""Figures: its figure, sentences and tables."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.panels import NothingToDrawError, heat_map, name_cells
from semdiag.presenting.drawing.style import drawing, note_below, panel_grid
from semdiag.questions.compare.answer import head_ranking

_WRITTEN = 12  # with more layers or heads, numbers in the cells would be illegible
_QUANTITIES = {
    "total_variation": "total variation of the weights",
    "overlap": "overlap of the top-{top}",
    "by_weights": "change of the output by the weights",
    "by_values": "change of the output by the values",
}
_ONE_SCALE = "by_weights", "by_values"


@drawing(
    "Coloured cells, layers by heads: how far the attention of two models is apart on the same inputs, and what "
    "of the change of its output is the weights' and the values': {shown}.",
    "A dark cell in the first panel is a head that attends elsewhere than it did. Where the change of the output "
    "by the values is darker than that by the weights, the head looks where it did and finds something else.",
)
def compare_map(findings: Findings) -> Figure:
    """Draw the total variation, the overlap of the top-k, and both parts of the output's change, of every head."""
    table = findings(head_ranking)
    if table.empty:
        raise NothingToDrawError("No two models were compared.")
    of_model = table[table["model"] == table["model"].iloc[-1]]
    quantities = [name for name in _QUANTITIES if of_model[name].notna().any()]
    heads = of_model["head"].nunique()
    figure, axes = panel_grid(len(quantities), height=1.0 + 0.2 * min(max(heads, 4), 40), sharey=False, columns=2)
    top = findings.measurements.provenance.get("compare_top", "k")
    for ax, name in zip(axes, quantities, strict=True):
        _draw(ax, of_model, name)
        ax.set_title(_QUANTITIES[name].format(top=top), fontsize=9)
    note_below(
        figure,
        "A cell is a head of a layer: means over its queries; changes of its output relative to the norm of A's. "
        "Grey: not measured or undefined.",
    )
    return figure


def _draw(ax: Axes, heads: pd.DataFrame, name: str) -> None:
    cells = heads.pivot(index="head", columns="layer", values=name)
    values = cells.to_numpy(float)
    both_parts = heads[list(_ONE_SCALE)].to_numpy(float) if name in _ONE_SCALE else values
    low, high = (float(np.nanmin(values)), 1.0) if name == "overlap" else (0.0, float(np.nanmax(both_parts)))
    scale = Normalize(low, high if high > low else low + 1.0)
    heat_map(ax, values, scale, "{:.2g}".format if max(cells.shape) <= _WRITTEN else None)
    name_cells(ax.xaxis, list(cells.columns))
    name_cells(ax.yaxis, list(cells.index))
    ax.set_xlabel("layer")
    ax.set_ylabel("head")


HEADINGS = (
    Heading(
        "compare",
        "What changed from the base to the model?",
        (compare_map,),
        (
            "Each model runs by itself: from the second layer on, a head's change includes that of its input. It "
            "does not say which weights were changed.",
            "The weights follow from the queries and keys of each model, without what a kernel rounds in its "
            "softmax. Both parts of the output's change add up to it as vectors; their norms do not.",
        ),
    ),
)
