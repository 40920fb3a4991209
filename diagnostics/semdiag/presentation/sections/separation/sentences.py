"""How far apart kept and dropped scores are, in sentences."""

from semdiag.capturing.attention_kinds import DENSE
from semdiag.findings.distributions import pooled_percentiles
from semdiag.findings.estimates import SAMPLED, drawn
from semdiag.findings.findings import Findings
from semdiag.presentation.drawing.panels import panels_of


def separation_in_short(findings: Findings) -> list[str]:
    """Median and lower end of Δ of the top-k models; of all sparse ones if there is none."""
    models = findings.measurements.models
    models = models[~models["attention"].isin(DENSE)]
    models = models[models["snapshot"] == "last"] if (models["snapshot"] == "last").any() else models
    models = models[models["attention"] == "topk"] if (models["attention"] == "topk").any() else models
    said = []
    for panel in panels_of(models) if len(models) else []:
        for series in panel.series:
            table, loads = (findings(pooled_percentiles, name)[series.model] for name in ("separation", "load"))
            said.append(
                f"{panel.title}, {series.label}: the separation Δ has the median {table['p50']:.2g} nats, 5 % of "
                f"the queries lie below {table['p5']:.2g}, and {table['not_positive']:,} of {table['queries']:,} "
                f"are not positive. The busiest key is kept by {loads['p100']:g} queries"
                f"{f', {SAMPLED}' if series.model in drawn(findings) else ''}."
            )
    return said or ["No model drops a key: separation is undefined for full attention."]
