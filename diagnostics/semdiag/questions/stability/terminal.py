"""The tables of ``semdiag stability``."""

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.columns import Column, percent, plain
from semdiag.presenting.terminal.console import NumberTable, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.presenting.terminal.verdicts import print_verdicts
from semdiag.questions.stability.answer import stability_findings, stability_summary

_COLUMNS = (
    Column("layer", form=plain), Column("head", form=plain),
    Column("local.p50"), Column("local.p100", drop=4), Column("secant.p50"), Column("secant.p100"),
    Column("ln_pair.p50", "ln ξ pair p50"), Column("ln_pair.p100", "ln ξ pair p100", drop=3),
    Column("ln_sound.p50", "ln ξ p50"), Column("ln_sound.p100", "ln ξ p100", drop=2),
    Column("ln_paper.p50", "ln ξ paper p50"), Column("ln_paper.p100", "ln ξ paper p100", drop=1),
    Column("same_set", form=percent),
)  # fmt: skip
_WITHOUT_NOISE: Summary = dict.fromkeys(("secant", "ln_pair", "ln_sound", "ln_paper", "same_set"))


def print_stability(findings: Findings) -> None:
    """Print one table per model and noise level, and each model's verdicts."""
    console = wide_console()
    for result in findings(stability_summary)["results"]:
        rows = [*result["layers"], {"layer": "all", "head": "", **result["all"]}]
        levels = [level["noise"] for level in result["all"].get("response", [])]
        for place, level in enumerate(levels or [None]):
            at = f" at noise {level:g}" if len(levels) > 1 else ""
            console.print(f"\n{title(result)}: softmax stability{at}")
            moved = [{**row, **row["by_noise"][place]} if at else row for row in rows]
            response = [Column(f"response.{place}.mean", f"response {level:g}")] if levels else []
            console.print(NumberTable([*_COLUMNS, *response], [_WITHOUT_NOISE | row for row in moved]))
        print_verdicts(console, (f for f in findings(stability_findings) if f.subject == result["model"]))
