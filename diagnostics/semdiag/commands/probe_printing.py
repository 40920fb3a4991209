"""Tables of ``semdiag landscape`` and ``semdiag lipschitz`` on stderr."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Summary = dict[str, Any]


def print_landscape(summary: Summary) -> None:
    """Print one row per plane of every model.

    Args:
        summary: schema ``semdiag.landscape/1``.
    """
    console = _console()
    for result in summary["results"]:
        console.print(f"\n{result['model']}  {result['task']} {result['attention']}: landscape")
        planes = [plane for plane in result["planes"] if "checkpoint_loss" in plane]
        if planes:
            heads = ["plane", "cells", "loss here", "lowest", "highest", "accuracy here", "≥ 95 % up to (‖θ‖)"]
            table = _table(heads)
            for plane in planes:
                numbers = (plane[name] for name in ("checkpoint_loss", "lowest_loss", "highest_loss"))
                accuracy = _number(plane["checkpoint_accuracy"]), _number(plane["working_distance"])
                cells = [f"{plane['plane']} {plane['kind']}", str(plane["cells"])]
                table.add_row(*cells, *map(_number, numbers), *accuracy)
            console.print(table)
        measured = [plane for plane in result["planes"] if "dispersion_p50" in plane]
        for plane in measured:
            said = [f"{name} {_spread(plane[name])}" for name in _NAMED if name in plane]
            console.print(f"plane {plane['plane']}: " + "; ".join(said).translate(_PLAIN))


_NAMED = ("dispersion_p50", "dispersion_p95", "separation_p50", "load_max")
_PLAIN = str.maketrans({"_": " "})


def _spread(matrix: list[list[float | None]]) -> str:
    values = [value for row in matrix for value in row if value is not None]
    return f"{min(values):.3g} to {max(values):.3g}" if values else "–"


def _console() -> Console:
    console = Console(stderr=True, markup=False, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a log has room; a number cut short would be a wrong one
    return console


def _table(heads: list[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, name in enumerate(heads):
        table.add_column(name, justify="right" if place else "left")
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
