"""What the terminal shows of two models."""

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.columns import NEVER, Column, text
from semdiag.presenting.terminal.console import NumberTable, wide_console
from semdiag.presenting.terminal.terminal import counted
from semdiag.questions.compare.answer import compare_summary
from semdiag.questions.compare.words import comparison_sentences

_SHOWN = 10  # heads, without --all
_COLUMNS = (
    Column("rank", form=text), Column("layer", form=text), Column("head", form=text),
    Column("total_variation", drop=NEVER), Column("largest", drop=2), Column("dispersion_base", "δ of A"),
    Column("dispersion", "δ of B"), Column("moved", "|change|", drop=1), Column("overlap", "top-{} overlap"),
    Column("output_change"), Column("by_weights"), Column("by_values"),
)  # fmt: skip


def print_comparison(findings: Findings, every: bool = False) -> None:
    """Print the heads of a model that changed most, and what changed in all; all heads if it is to be every."""
    console = wide_console()
    summary = findings(compare_summary)
    for found in summary["results"]:
        sizes = f"{counted(len(found['layers']), 'layer')}, {counted(len(found['heads']), 'head')}"
        console.print(f"\nA: {found['base']}\nB: {found['model']}\n{sizes}, {found['all']['queries']:,} queries")
        heads = found["heads"] if every else found["heads"][:_SHOWN]
        whole = {**found["all"], "rank": "all", "layer": "", "head": ""}
        console.print(NumberTable(_COLUMNS, [*heads, whole], unit=summary["top"]))
        if len(heads) < len(found["heads"]):
            console.print(f"{len(found['heads']) - len(heads)} further heads: --all shows them.")
        for sentence in comparison_sentences(found):
            console.print(sentence)
