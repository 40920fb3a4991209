"""Within one full-attention model: how many queries would keep the same key."""

import pandas as pd
from matplotlib.figure import Figure

from semdiag.measuring.findings.distributions import pooled_percentiles
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.style import finished, panel_grid, paper_style, plain_numbers, title_with_facts
from semdiag.questions.counterfactual.figures.boxes import dense_panels, k_style
from semdiag.questions.separation.figures.key_load import draw_loads, load_fact


@paper_style
def key_load_counterfactual(findings: Findings) -> Figure:
    """Draw the share of keys that at least x queries would keep among their k largest scores."""
    panels, ks = dense_panels(findings)
    loads = {str(model): rows for model, rows in findings.measurements.loads.groupby("model", sort=False)}
    figure, axes = panel_grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        ax.set_yscale("log")
        plain_numbers(ax.yaxis)
        facts = []
        for k in ks:
            values = pd.concat([loads[series.model][f"load_k{k}"] for series in panel.series])
            draw_loads(ax, values, k_style(ks, k), f"k = {k}")
            tables = [findings(pooled_percentiles, f"load_k{k}")[series.model] for series in panel.series]
            facts.append(load_fact(f"k = {k}", *tables))
        title_with_facts(ax, f"{panel.title}: within the {panel.series[0].label} model", facts)
        ax.set_xlabel("load: queries that would keep the key (count)")
        ax.set_xlim(left=0)
        ax.margins(y=0.12)
    axes[0].set_ylabel("share of keys with at least this load")
    return finished(figure, "marker: the largest load; layers, heads and sequences pooled")
