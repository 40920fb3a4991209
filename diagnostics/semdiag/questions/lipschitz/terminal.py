"""The tables of ``semdiag lipschitz``."""

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.columns import NEVER, Column, interval, number, text
from semdiag.presenting.terminal.console import NumberTable, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.presenting.terminal.verdicts import print_verdicts
from semdiag.questions.lipschitz.answer.summary import estimate_findings, lipschitz_summary


def _ratio(estimate: float, low: float | None, high: float | None) -> str:
    return f"{number(estimate)} ({interval(low, high, none='no interval')})"


_COLUMNS = (
    Column("group", "tensors", text), Column("at_checkpoint", "gradient here"),
    Column("gradient.p50", "gradient p50", drop=2), Column("gradient.p100", "largest gradient"),
    Column("largest_secant", drop=NEVER),
    Column("ln_sound", "ln bound", drop=NEVER),
)  # fmt: skip


def print_lipschitz(findings: Findings) -> None:
    """Print estimates and bounds of every model by group, and the ratios of every pair by radius."""
    console = wide_console()
    summary = findings(lipschitz_summary)
    for result in summary["results"]:
        console.print(f"\n{title(result)}: Lipschitz estimates of the loss")
        console.print(NumberTable(_COLUMNS, result["groups"]))
        print_verdicts(console, (f for f in findings(estimate_findings) if f.subject == result["model"]))
    for pair in summary["pairs"]:
        console.print(f"\n{pair['label']}: secants of {pair['other']} over those of {pair['reference']}")
        console.print(_ratios(pair["ratios"]))
    console.print(summary["scope"])


def _ratios(ratios: list[Summary]) -> NumberTable:
    """Return a row a radius, a column a percentile."""
    rows: dict[float, Summary] = {}
    for one in sorted(ratios, key=lambda one: one["radius"]):
        rows.setdefault(one["radius"], {"radius": number(one["radius"])})[f"p{one['percentile']}"] = one
    percentiles = sorted({one["percentile"] for one in ratios})
    columns = [Column(f"p{p}.estimate p{p}.low p{p}.high", f"p{p}", _ratio) for p in percentiles]
    return NumberTable([Column("radius", "radius (‖θ‖)", text), *columns], rows.values())
