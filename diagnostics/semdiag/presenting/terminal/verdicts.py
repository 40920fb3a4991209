"""The verdict on a claim, in one line."""

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console

from semdiag.measuring.findings.finding import Finding, Verdict
from semdiag.presenting.columns import finite
from semdiag.presenting.drawing.powers import factors

_COUNTS = ("holds", "violated", "vacuous", "not_met")
_GAPS = ("smallest log10 gap", "largest log10 gap")
_COUNTED = {
    "promises no less than 2": "for {:,} it allows 2 or more, and weights cannot move further",
    "below the sound form": "for {:,} it lies below the sound form",
}
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


def _number_words(numbers: Mapping[str, float]) -> Iterator[str]:
    """Yield the numbers beside a verdict; what a count or a logarithm means is said."""
    ends = [numbers[name] for name in _GAPS if name in numbers]
    if len(ends) == 2:
        yield f"bounds are {factors(*ends)} times what was measured"
    for name, value in numbers.items():
        if name in _COUNTED:
            yield from [_COUNTED[name].format(int(value))] if value else []
        elif name not in (*_COUNTS, *_GAPS):
            yield f"{name} = {finite(value)}"


def verdict_line(finding: Finding) -> str:
    """Return a claim with its verdict; for a claim about many rows, how many of how many exceed the bound."""
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
    others = ", ".join(_number_words(numbers))
    line = f"{claim}: {'; '.join(parts)}" + (f" ({others})" if others else "")
    return f"{line}; {finding.note}" if finding.note else line
