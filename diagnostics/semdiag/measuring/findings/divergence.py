"""Find models, layers and heads with scores that are not finite, about which nothing can be said."""

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import records
from semdiag.measuring.table import ALL

Place = tuple[int, int]  # layer and head


def broken_places(findings: Findings, model: str) -> set[Place]:
    """Return the layers and heads of a model with scores that are not finite, and the pools that include them."""
    bad = findings.measurements.non_finite
    places = {(int(row["layer"]), int(row["head"])) for row in records(bad[bad["model"] == model])}
    return places | {(layer, ALL) for layer, _ in places} | ({(ALL, ALL)} if places else set())


def diverged(findings: Findings, model: str) -> bool:
    """Return whether some scores of a model are not finite, so that nothing can be said of its pooled queries."""
    return bool(broken_places(findings, model))
