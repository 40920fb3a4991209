"""Tables and sentences on the terminal: rows with declared columns, as wide as the terminal allows."""

import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from semdiag.measuring.words import number, text
from semdiag.presenting.terminal import terminal

NEVER = -1


@dataclass(frozen=True)
class Column:
    """A column."""

    name: str  # entry in a row
    heading: str = ""  # above it; empty: the name
    form: Callable[..., str] = number  # turns the entries, or the row, into text
    drop: int = 0  # its turn to be dropped where the table is too wide: 1 goes first
    left: bool = False  # whether it is a name, aligned left and never dropped; a column of :func:`text` is

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", self.left or self.form is text)

    @property
    def title(self) -> str:
        """Return its heading."""
        return self.heading or self.name.replace("_", " ").replace(".", " ")

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return the text of its cell in a row."""
        return self.form(*(_entry(row, name) for name in self.name.split())) if self.name else self.form(row)


def _entry(row: Any, name: str) -> Any:
    first, _, rest = name.partition(".")
    inside = row[int(first)] if isinstance(row, list) else row[first]
    return inside if not rest else _entry(inside, rest) if inside else None


_ENDLESS = 10_000
_PARTS = re.compile(r"(?<=[-.])")  # names are broken after hyphens and dots only
_FILE_WIDTH = 150  # columns of text where output goes to a file


def wide_console() -> Console:
    """Return a console on stdout (stderr with JSON), as wide as the terminal or ``COLUMNS``; wide for a file."""
    console = terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, _FILE_WIDTH)
    return console


def say_sentences(sentences: Iterable[str]) -> None:
    """Print sentences: on a terminal broken between words, in a file one a line."""
    console = wide_console()
    for sentence in sentences:
        console.print(sentence, soft_wrap=not console.is_terminal)


def not_shown(rows: int) -> str:
    """Say where to find the rows that a table leaves out."""
    return f"{rows} rows are not shown: --all shows them, and the page has them as CSV."


class NumberTable:
    """A table that fits the width of the terminal."""

    def __init__(
        self,
        columns: Iterable[Column],
        rows: Iterable[Mapping[str, Any]],
        title: str = "",
        caption: str = "",
        unit: object = "",
    ) -> None:
        listed = list(rows)
        declared = list(columns)
        cells = {column: [column.cell(row) for row in listed] for column in declared}
        shown = [one for one in declared if one.drop == NEVER or any(cell != "–" for cell in cells[one])]
        self.title = title
        self.caption = caption
        self.columns = [column.title.format(unit) for column in shown]
        self.rows = list(zip(*(cells[column] for column in shown), strict=True))
        self.names = sum(column.left for column in shown)
        places = [place for place, column in enumerate(shown) if not column.left]
        turns = [column.drop or len(shown) for column in shown]
        in_turn = sorted(places, key=lambda place: (shown[place].drop == NEVER, turns[place], -place))
        self._droppable = in_turn[: max(0, len(shown) - self.names - 1)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def excess(table: Table) -> int:
            return console.measure(table, options=options.update(max_width=_ENDLESS)).maximum - options.max_width

        dropped: list[int] = []
        table = self._table(dropped, breaking=False)
        if excess(table) > 0:
            for count in range(len(self._droppable) + 1):
                dropped = self._droppable[:count]
                table = self._table(dropped)
                table = self._table(dropped, narrower=max(0, excess(table)))
                if excess(table) <= 0:
                    break
        if self.title:
            yield self.title
        yield table
        if dropped:
            missing = ", ".join(self.columns[place] for place in sorted(dropped))
            yield f"Left out to fit {options.max_width} columns: {missing}."

    def _table(self, dropped: Sequence[int], breaking: bool = True, narrower: int = 0) -> Table:
        """Return the table without some columns; ``narrower`` is how many columns of text its names give up."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=self.caption or None)
        columns = [[row[place] for row in self.rows] for place in range(len(self.columns))]
        for place, width in enumerate(self._widths_of_names(columns, narrower)):
            columns[place] = [_broken(name, width) for name in columns[place]]
        shown = [place for place in range(len(self.columns)) if place not in dropped]
        for place in shown:
            name = self.columns[place]
            words = [*name.split(), *(line for cell in columns[place] for line in cell.splitlines())]
            width = max(map(cell_len, words if breaking else [name]), default=1)
            heading = textwrap.wrap(name, width, break_long_words=False)
            table.add_column(
                "\n".join(heading), justify="left" if place < self.names else "right",
                no_wrap=place >= self.names, overflow="fold", vertical="top",
            )  # fmt: skip
        for cells in zip(*(columns[place] for place in shown), strict=True):
            table.add_row(*cells)
        return table

    def _widths_of_names(self, columns: Sequence[Sequence[str]], narrower: int) -> list[int]:
        """Return the widths of the columns of names: the widest shrinks first, none below its longest part."""
        names = columns[: self.names]
        widths = [max(map(cell_len, cells), default=0) for cells in names]
        least = [max((cell_len(p) for cell in cells for p in _PARTS.split(cell)), default=0) for cells in names]
        for _ in range(narrower):
            shrinkable = [place for place, width in enumerate(widths) if width > least[place]]
            if shrinkable:
                widths[max(shrinkable, key=widths.__getitem__)] -= 1
        return widths


def _broken(name: str, width: int) -> str:
    lines = [""]
    for part in _PARTS.split(name):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
