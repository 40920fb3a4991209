"""The tables of ``semdiag landscape``."""

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import number_from_json
from semdiag.presenting.terminal.console import number, number_table, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.questions.landscape.answer import landscape_summary

_NAMED = ("dispersion_p50", "dispersion_p95", "separation_p50", "load_max")
_PLAIN = str.maketrans({"_": " "})


def print_landscape(findings: Findings) -> None:
    """Print one row per plane of every model.

    Args:
        findings: of what was measured.
    """
    console = wide_console()
    for result in findings(landscape_summary)["results"]:
        console.print(f"\n{title(result)}: landscape")
        planes = [plane for plane in result["planes"] if "checkpoint_loss" in plane]
        if planes:
            heads = ["plane", "cells", "loss here", "lowest", "highest", "accuracy here", "≥ 95% up to (‖θ‖)"]
            table = number_table(heads, names=1)
            for plane in planes:
                numbers = (plane[name] for name in ("checkpoint_loss", "lowest_loss", "highest_loss"))
                accuracy = number(plane["checkpoint_accuracy"]), number(plane["working_distance"])
                cells = [f"{plane['plane']} {plane['kind']}", str(plane["cells"])]
                table.add_row(*cells, *map(number, numbers), *accuracy)
            console.print(table)
        measured = [plane for plane in result["planes"] if "dispersion_p50" in plane]
        for plane in measured:
            said = [f"{name} {_spread(plane[name])}" for name in _NAMED if name in plane]
            console.print(f"plane {plane['plane']}: " + "; ".join(said).translate(_PLAIN))


def _spread(matrix: list[list[float | str | None]]) -> str:
    values = [number_from_json(value) for row in matrix for value in row if value is not None]
    return f"{min(values):.3g} to {max(values):.3g}" if values else "–"
