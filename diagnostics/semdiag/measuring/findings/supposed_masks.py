"""Masks that a model which keeps every key is supposed to have."""

from semdiag.capturing.attention_kinds import DENSE
from semdiag.measuring.encoders.inputs import fitting
from semdiag.measuring.findings.distributions import pooled_percentiles
from semdiag.measuring.findings.findings import Findings


def check_supposed_k(findings: Findings, k: int) -> None:
    """Refuse masks of a k that drops nothing of a model that keeps every key, as no query has so many keys.

    Args:
        findings: of what was measured.
        k: of the mask that such a model would choose, named by the user.

    Raises:
        InputError: if the largest number of keys of such a model is smaller.
    """
    kinds = findings.measurements.models.set_index("model")["attention"]
    for model, keys in findings(pooled_percentiles, "keys").items():
        if kinds[model] in DENSE and keys["p100"] < k:
            fitting((k,), int(keys["p100"]), "the largest number of keys")
