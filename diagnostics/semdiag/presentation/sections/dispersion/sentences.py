"""Does the sparse model focus? In sentences."""

from semdiag.capturing.attention_kinds import FIXED_MASKS, external
from semdiag.findings.counterfactuals import counterfactual_ks
from semdiag.findings.dispersion import pair_comparisons
from semdiag.findings.findings import Findings
from semdiag.findings.pairing import find_pairs
from semdiag.measurement.percentiles import percentiles

_NO_PAIR = (
    "Nothing is compared: there is no full and top-k model of the same task, seed, size and snapshot. "
    "The figures show each model by itself."
)


def dispersion_in_short(findings: Findings) -> list[str]:
    """Whether δ_h < δ_s, pair by pair, and what fixed masks do; external models have no partner."""
    if external(findings.measurements.models).all():
        counterfactual = counterfactual_ks(findings.measurements.queries)  # then it stands with what k would leave
        return (
            [] if counterfactual else [span_sentence(findings, m) for m in findings.measurements.models["model"]]
        )
    said = [comparison.sentence for comparison in findings(pair_comparisons)]
    return (said or [_NO_PAIR]) + _controls(findings)


def span_sentence(findings: Findings, model: str) -> str:
    """How far apart a model's scores are, for one that is compared with no other.

    Args:
        findings: of any number of models.
        model: a value of the column ``model``.
    """
    own = findings.measurements.queries[findings.measurements.queries["model"] == model]
    delta = percentiles(own["dispersion"])
    return (
        f"{model}: the scores of a query span {delta['p50']:.3g} nats at the median and "
        f"{delta['p95']:.3g} at the 95th percentile, over {own['keys'].median():g} keys at the median."
    )


def _controls(findings: Findings) -> list[str]:
    """What masks that ignore the input do to the pooled median, last snapshots only."""
    measurements = findings.measurements
    models = measurements.models[measurements.models["snapshot"] == "last"]
    pairs, _ = find_pairs(models[models["attention"].isin(FIXED_MASKS)], attention=None)
    medians = {str(m): percentiles(d)["p50"] for m, d in measurements.queries.groupby("model")["dispersion"]}
    parts = [
        f"{pair.label} {medians[pair.other] / medians[pair.full]:.2g} times"
        for pair in pairs
        if medians.get(pair.full, 0) > 0 and pair.other in medians
    ]
    if not parts:
        return []
    return [
        f"For comparison, masks that ignore the scores have a median δ of: {'; '.join(parts)} full attention's. "
        "A smaller range is in part only a range over fewer keys."
    ]
