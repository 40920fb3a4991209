"""The verdict on a claim, in one line."""

from collections.abc import Iterable

from rich.console import Console

from semdiag.measuring.findings.finding import Finding, Verdict
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
    """Print a line for each finding, in red if semdiag contradicts itself."""
    for finding in judged:
        line = verdict_line(finding)
        console.print(line, style="red" if line.startswith("ERROR") else None)


def verdict_line(finding: Finding) -> str:
    """Return a claim with its verdict; for a claim about many rows, how many of how many exceed the bound.

    Args:
        finding: of any verdict. A sound claim that does not hold is an error of semdiag.

    Example:
        >>> numbers = {"holds": 9000, "violated": 0, "vacuous": 1000, "not_met": 0}
        >>> verdict_line(Finding("model", "ξ bounds pairs", "sound", "all", Verdict.HOLDS, numbers))
        'ξ bounds pairs [sound]: 0 of 10,000 exceed the bound; for 1,000 the bound is too loose to test'
        >>> verdict_line(Finding("pair", "the mask wins", "paper", "p75", Verdict.VIOLATED, {"left side": 1.21}))
        'the mask wins [paper], p75: does not hold (left side = 1.21)'
    """
    numbers, form, where = finding.numbers, finding.form, finding.where
    claim = finding.claim + (f" [{form}]" if form else "") + ("" if where == "all" else f", {where}")
    exceeding, vacuous, unmet = (int(numbers.get(name, 0)) for name in ("violated", "vacuous", "not_met"))
    rows = int(numbers.get("holds", 0)) + exceeding + vacuous
    if rows:
        parts = [f"{exceeding:,} of {rows:,} exceed the bound"]
        parts += [f"for {vacuous:,} the bound is too loose to test"] if vacuous else []
        parts += [f"{unmet:,} more do not meet its assumptions"] if unmet else []
        claim = "ERROR OF SEMDIAG: " * bool(exceeding and form != "paper") + claim
    else:  # no claim about rows, or no rows
        parts = [_ANSWERS[finding.verdict]]
    others = ", ".join(f"{name} = {finite(value)}" for name, value in numbers.items() if name not in _COUNTS)
    line = f"{claim}: {'; '.join(parts)}" + (f" ({others})" if others else "")
    return f"{line}; {finding.note}" if finding.note else line
