"""The verdict on a claim, in one line."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console

from semdiag.measuring.findings.finding import Finding, Verdict
from semdiag.measuring.findings.strict_json import number_from_json
from semdiag.presenting.columns import finite

_COUNTS = ("holds", "violated", "vacuous", "not_met")
_ANSWERS = {
    Verdict.HOLDS: "holds",
    Verdict.VIOLATED: "does not hold",
    Verdict.VACUOUS: "is too loose to test: it holds for every row, whatever was measured",
    Verdict.NOT_MET: "does not apply, an assumption is not met",
    Verdict.NOTHING: "nothing conclusive",
}


def print_verdicts(console: Console, judged: Iterable[Finding]) -> None:
    """Print a line for each finding.

    Args:
        console: where to.
        judged: of any verdict.
    """
    for f in judged:
        where = "" if f.where == "all" else f", {f.where}"
        line = verdict_line(f.verdict, f.claim + (f" [{f.form}]" if f.form else "") + where, f.form, f.numbers)
        console.print(f"{line}; {f.note}" if f.note else line, style="red" if line.startswith("ERROR") else None)


def verdict_line(verdict: str, claim: str, form: str, numbers: Mapping[str, Any]) -> str:
    """Return a claim with its verdict; for claims about many rows, how many of how many exceed the bound.

    Args:
        verdict: a value of :class:`~semdiag.measuring.findings.finding.Verdict`.
        claim: in words, with its form.
        form: ``paper`` or another: a sound claim that does not hold is an error of semdiag.
        numbers: behind the verdict.

    Example:
        >>> numbers = {"holds": 9000, "violated": 0, "vacuous": 1000, "not_met": 0}
        >>> verdict_line("holds", "ξ bounds pairs [sound]", "sound", numbers)
        'ξ bounds pairs [sound]: 0 of 10,000 exceed the bound; for 1,000 the bound is too loose to test'
        >>> verdict_line("violated", "better guarantee [paper]", "paper", {"left side": 1.21})
        'better guarantee [paper]: does not hold (left side = 1.21)'
    """
    values = {name: number_from_json(value) for name, value in numbers.items()}
    others = ", ".join(f"{name} = {finite(value)}" for name, value in values.items() if name not in _COUNTS)
    exceeded, vacuous, unmet = (int(values.get(name, 0)) for name in ("violated", "vacuous", "not_met"))
    rows = int(values.get("holds", 0)) + exceeded + vacuous
    if not rows:  # no claim about rows, or no rows
        return f"{claim}: {_ANSWERS[Verdict(verdict)]}" + (f" ({others})" if others else "")
    said = [f"{exceeded:,} of {rows:,} exceed the bound"]
    said += [f"for {vacuous:,} the bound is too loose to test"] if vacuous else []
    said += [f"{unmet:,} more do not meet its assumptions"] if unmet else []
    loud = "ERROR OF SEMDIAG: " if exceeded and form != "paper" else ""
    return f"{loud}{claim}: {'; '.join(said)}" + (f" ({others})" if others else "")
