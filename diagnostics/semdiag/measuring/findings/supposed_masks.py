"""Masks that a model which keeps every key is supposed to have."""

from semdiag.capturing.attention_kinds import DENSE
from semdiag.measuring.encoders.inputs import fitting
from semdiag.measuring.findings.distributions import pooled_percentiles
from semdiag.measuring.findings.findings import Findings


def check_supposed_k(findings: Findings, k: int) -> None:
    """Refuse a k that would drop no key of a full-attention model, because no query has more keys."""
    kinds = findings.measurements.models.set_index("model")["attention"]
    for model, keys in findings(pooled_percentiles, "keys").items():
        if kinds[model] in DENSE and keys["p100"] < k:
            fitting((k,), int(keys["p100"]), "the largest number of keys")
