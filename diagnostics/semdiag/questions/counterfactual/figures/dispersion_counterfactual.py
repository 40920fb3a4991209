"""Within one full-attention model: what its dispersion would be over its k largest scores only."""

import pandas as pd
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.letter_values import logarithmic_limits, positive_range
from semdiag.presenting.drawing.style import attention_style, paper_style
from semdiag.questions.counterfactual.figures.boxes import dense_panels, k_style, layer_tables, within_boxes


@paper_style
def dispersion_counterfactual(findings: Findings) -> Figure:
    """Draw δ_s and δ_h(k) = z(1) − z(k) of the same rows of scores, per layer of each full model."""
    panels, ks = dense_panels(findings)
    columns = {"dispersion": ("δₛ, all keys", attention_style("full"))}
    columns |= {f"dispersion_k{k}": (f"δₕ({k}), largest scores only", k_style(ks, k)) for k in ks}
    tables = layer_tables(findings, panels, list(columns))
    low, high = positive_range(pd.concat(tables.values()), "p1", "p100")
    return within_boxes(
        panels, columns, tables, lambda ax: logarithmic_limits(ax, low, high), "dispersion (nats)",
        "marker: maximum.",
    )  # fmt: skip
