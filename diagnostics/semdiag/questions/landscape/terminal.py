"""The tables of ``semdiag landscape``."""

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import number_from_json
from semdiag.presenting.columns import Column, text, three_digits
from semdiag.presenting.terminal.console import NumberTable, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.questions.landscape.answer import landscape_summary

_COLUMNS = (
    Column("plane kind", "plane", text), Column("cells"), Column("checkpoint_loss", "loss here"),
    Column("lowest_loss", "lowest"), Column("highest_loss", "highest"),
    Column("checkpoint_accuracy", "accuracy here"), Column("working_distance", "≥ 95% up to (‖θ‖)"),
)  # fmt: skip
_SPREADS = ("dispersion_p50", "dispersion_p95", "separation_p50", "load_max")


def print_landscape(findings: Findings) -> None:
    """Print a row for every plane of every model."""
    console = wide_console()
    for result in findings(landscape_summary)["results"]:
        console.print(f"\n{title(result)}: landscape")
        if planes := [plane for plane in result["planes"] if "checkpoint_loss" in plane]:
            console.print(NumberTable(_COLUMNS, planes))
        for plane in result["planes"]:
            if spreads := [f"{name} {_spread(plane[name])}" for name in _SPREADS if name in plane]:
                console.print(f"plane {plane['plane']}: {'; '.join(spreads).replace('_', ' ')}")


def _spread(matrix: list[list[float | str | None]]) -> str:
    values = [number_from_json(value) for row in matrix for value in row if value is not None]
    return f"{three_digits(min(values))} to {three_digits(max(values))}" if values else "–"
