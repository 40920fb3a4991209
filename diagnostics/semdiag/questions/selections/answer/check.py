"""The answer on one selection: is it the top-k?"""

from typing import Any

from semdiag.mathematics.selections.top_k_check import NOT_JUDGED
from semdiag.measuring.findings.strict_json import Summary, json_ready, schema
from semdiag.questions.selections.measure.check import CheckedSelection

_NUMBERS = ("worst_chosen", "kth", "gap", "gap_ulps", "left_out", "separation", "separation_ulps")


def check_summary(checked: CheckedSelection, file: str, provenance: dict[str, Any]) -> Summary:
    """Return what ``--json`` prints of a checked selection."""
    entry = {
        "file": file,
        "rows": len(checked.rows),
        "not_checked": checked.not_checked,
        "not_judged": checked.not_judged,
        "k": checked.k,
        "keys": checked.keys,
        "format": checked.format,
        "counts": checked.counts,
        "faults": checked.faults,
        "passed": not checked.faults,
        "worst": _numbers(checked.worst),
        "worst_of_class": {name: _numbers(checked.worst_of(name)) for name in _present(checked)},
    }
    return Summary(json_ready({"schema": schema("selections"), "provenance": provenance, "results": [entry]}))


def _present(checked: CheckedSelection) -> list[str]:
    """Return the classes that have rows."""
    return [*(name for name, number in checked.counts.items() if number), *[NOT_JUDGED] * (checked.not_judged > 0)]


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in plain numbers: its place, class, scores and distances."""
    place = [int(value) for name, value in row.items() if name.startswith("dim_")]
    return {"row": place, "class": str(row["class"]), **{name: float(row[name]) for name in _NUMBERS}}
