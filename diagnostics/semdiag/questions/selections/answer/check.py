"""The answer on one selection: is it the top-k?"""

from typing import Any

from semdiag.mathematics.selections.top_k_check import NOT_JUDGED
from semdiag.measuring.findings.strict_json import Summary, json_ready, schema
from semdiag.questions.selections.measure.check import CheckedSelection

_NUMBERS = ("worst_chosen", "kth", "gap", "gap_ulps", "left_out", "separation", "separation_ulps")


def check_summary(found: CheckedSelection, file: str, provenance: dict[str, Any]) -> Summary:
    """Return what ``--json`` prints of a checked selection.

    Args:
        found: by :func:`~semdiag.questions.selections.measure.check.check_selection`.
        file: its name.
        provenance: versions, command and options.
    """
    entry = {
        "file": file,
        "rows": len(found.rows),
        "not_checked": found.not_checked,
        "not_judged": found.not_judged,
        "k": found.k,
        "keys": found.keys,
        "format": found.format,
        "counts": found.counts,
        "faults": found.faults,
        "passed": not found.faults,
        "worst": _numbers(found.worst),
        "worst_of_class": {name: _numbers(found.worst_of(name)) for name in _present(found)},
    }
    return Summary(json_ready({"schema": schema("selections"), "provenance": provenance, "results": [entry]}))


def _present(found: CheckedSelection) -> list[str]:
    """Classes that have rows."""
    return [*(name for name, number in found.counts.items() if number), *[NOT_JUDGED] * (found.not_judged > 0)]


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row in plain numbers: its place, class, scores and distances."""
    place = [int(value) for name, value in row.items() if name.startswith("dim_")]
    return {"row": place, "class": str(row["class"]), **{name: float(row[name]) for name in _NUMBERS}}
