"""What the tables on stderr have in common."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def wide_console() -> Console:
    """Stderr, wide enough for a table where it is not a terminal."""
    console = Console(stderr=True, markup=False, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 150)  # a log has room; a number cut short would be a wrong one
    return console


def number_table(columns: Iterable[str], names: int = 0) -> Table:
    """A table without rows; its cells are aligned right, but for those of the first columns, which are names."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < names else "right")
    return table


def number(value: float | None) -> str:
    """A number to three digits; whole numbers, which are mostly counts, with all of theirs."""
    if value is None:
        return "–"
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.3g}"
