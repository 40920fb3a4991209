"""Where the scores of a model are NaN or infinite, and what therefore nothing can be said of."""

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import records
from semdiag.measuring.table import ALL

Place = tuple[int, int]  # layer and head


def broken_places(findings: Findings, model: str) -> set[Place]:
    """Where a model's scores are NaN or infinite, and the pools that such a place is part of.

    Args:
        findings: of any number of models.
        model: its path.
    """
    bad = findings.measurements.non_finite
    places = {(int(row["layer"]), int(row["head"])) for row in records(bad[bad["model"] == model])}
    return places | {(layer, ALL) for layer, _ in places} | ({(ALL, ALL)} if places else set())


def diverged(findings: Findings, model: str) -> bool:
    """Whether scores of a model are NaN or infinite, so that nothing can be said of all its queries together.

    Args:
        findings: of any number of models.
        model: its path.
    """
    return bool(broken_places(findings, model))
