"""The tables of ``semdiag stability``."""

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.terminal.console import number, number_table, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.presenting.terminal.verdicts import print_verdicts
from semdiag.questions.stability.answer import stability_findings, stability_summary


def print_stability(findings: Findings) -> None:
    """Print one table per model and noise level, and each model's verdicts.

    Args:
        findings: of what was measured.
    """
    console = wide_console()
    summary = findings(stability_summary)
    for result in summary["results"]:
        responses = result["all"].get("response", [])
        rows = [*result["layers"], {"layer": "all", "head": "", **result["all"]}]
        for place, level in enumerate(responses or [None]):
            several = len(responses) > 1
            heads = ["layer", "head", "local p50", "local p100", "secant p50", "secant p100"]
            heads += [f"{name} {p}" for name in ("ln ξ pair", "ln ξ", "ln ξ paper") for p in ("p50", "p100")]
            heads += ["same set"]
            heads += [f"response {level['noise']:g}"] if level else []
            at = f" at noise {level['noise']:g}" if level and several else ""
            console.print(f"\n{title(result)}: softmax stability{at}")
            table = number_table(heads, least=["ln ξ paper p100", "ln ξ p100", "ln ξ pair p100", "local p100"])
            for row in rows:
                moved = {**row, **row["by_noise"][place]} if several else row
                cells = [str(row["layer"]), str(row["head"])]
                for name in ("local", "secant", "ln_pair", "ln_sound", "ln_paper"):
                    cells += [number(moved.get(name, {}).get(p)) for p in ("p50", "p100")]
                cells.append("–" if moved.get("same_set") is None else f"{moved['same_set']:.1%}")
                table.add_row(*cells, *([number(row["response"][place]["mean"])] if level else []))
            console.print(table)
        print_verdicts(console, (f for f in findings(stability_findings) if f.subject == result["model"]))
