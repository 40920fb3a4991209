"""The findings of ``semdiag convergence`` as plain values."""

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import MODEL_FACTS, Summary, json_object, records
from semdiag.questions.convergence.answer.epochs import arrivals
from semdiag.questions.convergence.answer.speed_and_dispersion import run_statistics, speed_dispersion_table

_ARRIVAL = (
    *("target", "arrival", "epochs", "planned", "state", "train_accuracy", "holdout_accuracy"),
    *("best_holdout_accuracy", "best_epoch", "gap"),
)


def convergence_summary(findings: Findings) -> Summary:
    """Return epochs to the target, speed-ups, and their relation to dispersion."""
    measurements = findings.measurements
    found, table = findings(arrivals), findings(speed_dispersion_table)
    models = {row["model"]: row for row in measurements.models.to_dict("records")}
    return json_object(
        "convergence",
        findings,
        target=measurements.provenance.get("target"),
        targets=measurements.provenance.get("targets", {}),
        results=[
            {name: models[run["model"]][name] for name in MODEL_FACTS} | {name: run[name] for name in _ARRIVAL}
            for run in records(found)
        ],
        runs=records(found.drop(columns="setting")),
        speed_ups=records(table),
        over_seeds=records(findings(run_statistics)),
    )
