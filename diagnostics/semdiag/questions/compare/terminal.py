"""What the terminal shows of two models."""

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.terminal.console import number, number_table, wide_console
from semdiag.presenting.terminal.terminal import counted
from semdiag.questions.compare.answer import compare_summary
from semdiag.questions.compare.words import comparison_sentences

_SHOWN = 10  # heads, without --all


def print_comparison(findings: Findings, every: bool = False) -> None:
    """Print the heads of a model that changed most, and what changed in all.

    Args:
        findings: with the table compared.
        every: whether all heads are shown.
    """
    console = wide_console()
    summary = findings(compare_summary)
    for found in summary["results"]:
        console.print(f"\nA: {found['base']}\nB: {found['model']}\n{_sizes(found)}")
        heads = found["heads"] if every else found["heads"][:_SHOWN]
        columns = [
            "rank", "layer", "head", "total variation", "largest", "δ of A", "δ of B", "|change|",
            f"top-{summary['top']} overlap", "output change", "by weights", "by values",
        ]  # fmt: skip
        table = number_table(columns, names=3, least=["|change|", "largest"], kept=["total variation"])
        for row in heads:
            table.add_row(str(row["rank"]), str(row["layer"]), str(row["head"]), *_numbers(row))
        table.add_row("all", "", "", *_numbers(found["all"]))
        console.print(table)
        if len(heads) < len(found["heads"]):
            console.print(f"{len(found['heads']) - len(heads)} further heads: --all shows them.")
        for sentence in comparison_sentences(found):
            console.print(sentence)


def _sizes(found: Summary) -> str:
    layers, heads = len(found["layers"]), len(found["heads"])
    return f"{counted(layers, 'layer')}, {counted(heads, 'head')}, {found['all']['queries']:,} queries"


def _numbers(row: Summary) -> list[str]:
    names = (
        "total_variation", "largest", "dispersion_base", "dispersion", "moved", "overlap", "output_change",
        "by_weights", "by_values",
    )  # fmt: skip
    return [number(row[name]) for name in names]
