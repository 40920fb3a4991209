"""How far apart kept and dropped scores are, and which keys are relied on."""

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.layered_summary import Percentile, by_layer, without
from semdiag.measuring.findings.strict_json import Summary


def separation_summary(findings: Findings) -> Summary:
    """Return percentiles of Δ and of the raw key loads per layer and head, and pooled."""

    def describe(of: Percentile, suffix: str) -> Summary:
        load = without(of("load" + suffix), "not_positive", "undefined")
        load["keys"] = load.pop("queries")
        return {"separation": of("separation" + suffix), "load": load}

    return by_layer("separation", findings, describe)
