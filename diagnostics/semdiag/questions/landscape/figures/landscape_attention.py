"""Dispersion and separation of a model's attention on planes through its checkpoint."""

from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.style import paper_style
from semdiag.questions.landscape.figures.landscape_contour import draw_planes
from semdiag.questions.landscape.figures.panels import plane_cells, plane_facts
from semdiag.questions.landscape.measure import DISPERSION_SAMPLES


@paper_style
def landscape_attention(findings: Findings) -> Figure:
    """Draw median and 95th percentile of δ and, where a mask drops keys, the median Δ on every plane.

    Returns:
        Two or three panels per plane and model; one colour scale per quantity.

    Raises:
        NothingToDrawError: if the dispersion was measured on no plane.
    """
    cells = plane_cells(findings, "dispersion_p50")
    quantities = {
        "dispersion_p50": ("median δ (nats)", "viridis_r"),
        "dispersion_p95": ("95th percentile of δ (nats)", "viridis_r"),
    }
    if all(c.rows["separation_p50"].notna().all() for c in cells):
        quantities["separation_p50"] = ("median Δ (nats)", "cividis")
    note = (
        f"{plane_facts(findings, cells)}.\nPooled over layers, heads and the queries of the first "
        f"{min(DISPERSION_SAMPLES, min(c.samples for c in cells))} samples. Contour lines are interpolated."
    )
    return draw_planes(cells, quantities, note)
