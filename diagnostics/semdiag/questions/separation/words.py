"""How far apart kept and dropped scores are, in sentences."""

import math

from semdiag.capturing.attention_kinds import DENSE
from semdiag.measuring.findings.distributions import pooled_percentiles
from semdiag.measuring.findings.divergence import diverged
from semdiag.measuring.findings.estimates import SAMPLED, drawn
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import panels_of


def separation_in_short(findings: Findings) -> list[str]:
    """Return the median and lower end of Δ of the top-k models; of all sparse ones if there is none."""
    models = findings.measurements.models
    models = models[~models["attention"].isin(DENSE)]
    models = models[models["snapshot"] == "last"] if (models["snapshot"] == "last").any() else models
    models = models[models["attention"] == "topk"] if (models["attention"] == "topk").any() else models
    sentences = []
    for panel in panels_of(models) if len(models) else []:
        for series in panel.series:
            sentences.append(f"{panel.title}, {series.label}: {_separation(findings, series.model)}")
    return sentences or ["No model drops a key: separation is undefined for full attention."]


def _separation(findings: Findings, model: str) -> str:
    """Return the median and lower end of one model's Δ and its busiest key, or why they are undefined."""
    if diverged(findings, model):
        return "the separation Δ and the key loads are unknown, because attention scores are NaN or infinite."
    table, loads = (findings(pooled_percentiles, name)[model] for name in ("separation", "load"))
    words = "no query drops a key, so the separation Δ is undefined"
    separated = table["queries"] - table["undefined"]  # the others drop no key
    if separated:
        ties = f"{table['not_positive']:,} of {separated:,} have none (Δ ≤ 0, a tie)"
        ties = f"and {ties}" if table["not_positive"] else "all have more than 0"
        words = (
            f"the separation Δ has the median {table['p50']:.2g} nats; 5% of the queries have less than "
            f"{table['p5']:.2g}, {ties}"
        )
    if math.isnan(loads["p100"]):
        return f"{words}."
    busiest = f"{loads['p100']:g} quer{'y' if loads['p100'] == 1 else 'ies'}"
    return f"{words}. The busiest key is kept by {busiest}{f', {SAMPLED}' if model in drawn(findings) else ''}."
