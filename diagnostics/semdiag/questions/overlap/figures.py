"""Figures: its figure, sentences and tables."""

import numpy as np
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.panels import CELLS, NothingToDrawError, hatch_missing, ink, model_labels
from semdiag.presenting.drawing.style import drawing, note_below, panel_grid
from semdiag.questions.overlap.answer import overlap_table

_WRITTEN = 14  # layers up to which the cells bear their numbers


@drawing(
    "Mean Jaccard index of the kept keys as coloured cells, layer by layer, heads of a layer on the diagonal, and "
    "beside it for successive queries: {shown}.",
    "A dark cell is a pair of layers that keep the same keys for the same query, and could share one selection; "
    "the column on the right says how much of a selection the next query could reuse. Compare with the value of "
    "random sets in the panel's title.",
)
def mask_overlap(findings: Findings) -> Figure:
    """Draw the mean Jaccard index of kept keys for every two layers, and for successive queries."""
    table = findings(overlap_table)
    compared = {*table["model"]}
    labels = {m: label for m, label in model_labels(findings.measurements.models).items() if m in compared}
    if not labels:
        raise NothingToDrawError("No masks were compared.")
    layers = sorted({*table["layer"], *table["other_layer"]} - {ALL})
    figure, axes = panel_grid(len(labels), height=1.5 + 0.26 * min(len(layers), 24), sharey=False)
    for ax, (model, label) in zip(axes, labels.items(), strict=True):
        of_model = table[table["model"] == model]
        cells = np.full((len(layers), len(layers) + 2), np.nan)
        for row in of_model[of_model["layer"] != ALL].to_dict("records"):
            at, to = layers.index(row["layer"]), layers.index(row["other_layer"])
            if row["what"] == "previous":
                cells[at, -1] = row["jaccard"]
            else:
                cells[at, to] = cells[to, at] = row["jaccard"]
        image = ax.imshow(cells, vmin=0, vmax=1, cmap=CELLS, aspect="auto")
        for (at, to), value in np.ndenumerate(cells) if len(layers) <= _WRITTEN else ():
            if np.isfinite(value):
                ax.text(to, at, f"{value:.2f}", ha="center", va="center", fontsize=9, color=ink(value))
        step = max(1, len(layers) // 12)
        shown = range(0, len(layers), step)
        ax.set_xticks([*shown, len(layers) + 1], [*(str(layers[at]) for at in shown), "prev."])
        ax.set_yticks(list(shown), [str(layers[at]) for at in shown])
        ax.set_xlabel("layer; prev.: the query before")
        chance = of_model.loc[of_model["layer"] == ALL, "chance"]
        ax.set_title(f"{label}\nat random {chance.mean():.2f}", fontsize=9)
        hatch_missing(ax)
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, shrink=0.8).set_label("Jaccard index of kept keys", fontsize=9)
    note_below(
        figure, "mean over queries that drop a key, samples, pairs of heads; diagonal: two heads of a layer."
    )
    return figure


HEADINGS = (
    Heading(
        "overlap",
        "Do layers keep the same keys?",
        (mask_overlap,),
        (
            "A model that keeps every key is judged by the masks that top-k would choose from its scores. Queries "
            "with too few keys to drop one are left out.",
            "The index counts keys, not weights: two heads may share all but the key that matters. Masks that do "
            "not depend on the input overlap by construction.",
        ),
    ),
)
