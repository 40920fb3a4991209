"""Tables of ``semdiag landscape`` and ``semdiag lipschitz`` on stderr."""

from typing import Any

from semdiag.presenting.terminal.console import interval, number, number_table, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.presenting.terminal.verdicts import verdict_line
from semdiag.measuring.findings.findings import Findings
from semdiag.questions.landscape.answer import landscape_summary
from semdiag.measuring.findings.strict_json import number_from_json
from semdiag.questions.lipschitz.answer.summary import lipschitz_summary

Summary = dict[str, Any]


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
            heads = ["plane", "cells", "loss here", "lowest", "highest", "accuracy here", "≥ 95 % up to (‖θ‖)"]
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


_NAMED = ("dispersion_p50", "dispersion_p95", "separation_p50", "load_max")
_PLAIN = str.maketrans({"_": " "})


def _spread(matrix: list[list[float | str | None]]) -> str:
    values = [number_from_json(value) for row in matrix for value in row if value is not None]
    return f"{min(values):.3g} to {max(values):.3g}" if values else "–"
