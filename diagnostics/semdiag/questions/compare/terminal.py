"""Tables of ``semdiag compare``."""

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.columns import NEVER, Column, text
from semdiag.presenting.terminal.console import NumberTable, say_sentences, wide_console
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
    """Print what changed, the heads that changed most, or every head, and the whole model."""
    console = wide_console()
    summary = findings(compare_summary)
    for result in summary["results"]:
        say_sentences(comparison_sentences(result))
        sizes = f"{counted(len(result['layers']), 'layer')}, {counted(len(result['heads']), 'head')}"
        console.print(
            f"\nA: {result['base']}\nB: {result['model']}\n{sizes}, {result['all']['queries']:,} queries"
        )
        heads = result["heads"] if every else result["heads"][:_SHOWN]
        whole = {**result["all"], "rank": "all", "layer": "", "head": ""}
        console.print(NumberTable(_COLUMNS, [*heads, whole], unit=summary["top"]))
        if len(heads) < len(result["heads"]):
            console.print(f"{len(result['heads']) - len(heads)} further heads: --all shows them.")
