"""Within one full-attention model: how much of the attention weight the k largest scores hold."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import paper_style
from semdiag.questions.counterfactual.figures.boxes import dense_panels, k_style, layer_tables, within_boxes


@paper_style
def mass_kept(findings: Findings) -> Figure:
    """Draw the share of each query's attention weight on its k largest scores, per layer of each full model."""
    panels, ks = dense_panels(findings, "mass")
    columns = {f"mass_k{k}": (f"the {k} largest", k_style(ks, k)) for k in ks}
    tables = layer_tables(findings, panels, list(columns))
    if not any(np.isfinite(table["p50"]).any() for table in tables.values()):
        raise NothingToDrawError("No query has a finite attention weight.")

    def scale(ax: Axes) -> None:
        ax.set_ylim(0, 1.03)

    return within_boxes(
        panels, columns, tables, scale, "share of the attention weight",
        "marker: minimum.\n1 minus this is what dropping all other keys would throw away.", extreme="p0",
    )  # fmt: skip
