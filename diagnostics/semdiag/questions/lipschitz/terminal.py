"""The tables of ``semdiag lipschitz``."""

from typing import Any

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import number_from_json
from semdiag.presenting.terminal.console import interval, number, number_table, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.presenting.terminal.verdicts import verdict_line
from semdiag.questions.lipschitz.answer.summary import lipschitz_summary

Summary = dict[str, Any]


def print_lipschitz(findings: Findings) -> None:
    """Print estimates and bounds of every model by group, and the ratios of every pair by radius.

    Args:
        findings: of what was measured.
    """
    console = wide_console()
    summary = findings(lipschitz_summary)
    for result in summary["results"]:
        console.print(f"\n{title(result)}: Lipschitz estimates of the loss")
        heads = ["tensors", "gradient here", "gradient p50", "largest gradient", "largest secant", "end point",
                 "p", "ln bound"]  # fmt: skip
        table = number_table(heads, names=1, least=["p", "gradient p50"], kept=["largest secant", "ln bound"])
        for row in result["groups"]:
            gradient, end = row["gradient"], row["end_point"]
            numbers = (row["at_checkpoint"], gradient["p50"], gradient["p100"], row["largest_secant"])
            shown = number(end["estimate"]) if end["accepted"] else "refused"
            table.add_row(
                row["group"], *map(number, numbers), shown, number(end["p_value"]), number(row["ln_sound"])
            )
        console.print(table)
        for verdict in result["verdicts"]:
            line = verdict_line(verdict["verdict"], verdict["claim"], verdict["form"], verdict["numbers"])
            console.print(line, style="red" if line.startswith("ERROR") else None)
    for pair in summary["pairs"]:
        console.print(f"\n{pair['label']}: secants of {pair['other']} over those of {pair['reference']}")
        percentiles = sorted({row["percentile"] for row in pair["ratios"]})
        table = number_table(["radius (‖θ‖)", *(f"p{p}" for p in percentiles)], names=1)
        for radius in sorted({row["radius"] for row in pair["ratios"]}):
            rows = [row for row in pair["ratios"] if row["radius"] == radius]
            cells = [
                f"{number(r['estimate'])} ({interval(*map(number_from_json, (r['low'], r['high'])))})"
                for r in rows
            ]
            table.add_row(number(radius), *cells)
        console.print(table)
    console.print(summary["scope"])
