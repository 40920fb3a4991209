"""How far apart kept and dropped scores are, in sentences."""

from semdiag.capturing.attention_kinds import DENSE
from semdiag.findings.findings import Findings
from semdiag.measurement.percentiles import percentiles
from semdiag.presentation.drawing.panels import panels_of


def separation_in_short(findings: Findings) -> list[str]:
    """Median and lower end of Δ of the top-k models; of all sparse ones if there is none."""
    measurements = findings.measurements
    models = measurements.models[~measurements.models["attention"].isin(DENSE)]
    models = models[models["snapshot"] == "last"] if (models["snapshot"] == "last").any() else models
    models = models[models["attention"] == "topk"] if (models["attention"] == "topk").any() else models
    said = []
    for panel in panels_of(models) if len(models) else []:
        for series in panel.series:
            queries = measurements.queries[measurements.queries["model"] == series.model]
            loads = measurements.loads[measurements.loads["model"] == series.model]
            table = percentiles(queries["separation"])
            said.append(
                f"{panel.title}, {series.label}: the separation Δ has the median {table['p50']:.2g} nats, 5 % of "
                f"the queries lie below {table['p5']:.2g}, and {table['not_positive']:,} of {table['queries']:,} "
                f"are not positive. The busiest key is kept by {percentiles(loads['load'])['p100']:g} queries."
            )
    return said or ["No model drops a key: separation is undefined for full attention."]
