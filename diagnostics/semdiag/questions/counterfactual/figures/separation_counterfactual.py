"""Within one full-attention model: how well its k largest scores stand apart from the rest."""

import pandas as pd
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.letter_values import logarithmic_limits, positive_range
from semdiag.presenting.drawing.style import paper_style
from semdiag.questions.counterfactual.figures.boxes import dense_panels, k_style, layer_tables, within_boxes


@paper_style
def separation_counterfactual(findings: Findings) -> Figure:
    """Draw Δ_h(k) = z(k) − z(k+1) of each query's scores, per layer of each full model."""
    panels, ks = dense_panels(findings)
    columns = {f"separation_k{k}": (f"Δₕ({k})", k_style(ks, k)) for k in ks}
    tables = layer_tables(findings, panels, list(columns))
    low, high = positive_range(pd.concat(tables.values()), "p1", "p100")
    return within_boxes(
        panels, columns, tables, lambda ax: logarithmic_limits(ax, low, high), "separation Δₕ(k) (nats)",
        "marker: maximum.\nQueries with at most k keys drop none: they have no separation.", height=3.0,
    )  # fmt: skip
