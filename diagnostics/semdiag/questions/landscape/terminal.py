"""The tables of ``semdiag landscape``."""

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.columns import Column, text
from semdiag.presenting.terminal.console import NumberTable, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.questions.landscape.answer import landscape_summary

_COLUMNS = (
    Column("plane kind", "plane", text), Column("cells"), Column("checkpoint_loss", "loss here"),
    Column("lowest_loss", "lowest"), Column("highest_loss", "highest"),
    Column("checkpoint_accuracy", "accuracy here"), Column("working_distance", "≥ 95% up to (‖θ‖)"),
)  # fmt: skip


def print_landscape(findings: Findings) -> None:
    """Print a row for every plane of every model."""
    console = wide_console()
    for result in findings(landscape_summary)["results"]:
        console.print(f"\n{title(result)}: landscape")
        console.print(NumberTable(_COLUMNS, result["planes"]))
