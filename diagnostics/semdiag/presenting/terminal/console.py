"""Tables of results in a terminal."""

import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from semdiag.presenting.columns import STAYS, Column
from semdiag.presenting.terminal.terminal import results_on_stderr, terminal

_ENDLESS = 10_000
_PARTS = re.compile(r"(?<=[-.])")  # of a name, which is broken behind hyphens and dots alone
_LOG = 150  # columns of a file: it has room, and a reader who turns its lines


def wide_console() -> Console:
    """Return a console on stdout (stderr with JSON), as wide as the terminal or ``COLUMNS``, else wide."""
    console = terminal(stderr=results_on_stderr(), markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, _LOG)
    return console


class NumberTable:
    """A table that fits the width of the terminal.

    A number is shown whole or not at all: one cut short would be a wrong one. Where a table is too wide, first its
    headings are broken between words, then names at hyphens and dots, and then columns are left away, and named.

    Args:
        columns: as declared; those without a value in any row are left away.
        rows: their entries by name.
        title: above the table; empty: none.
        caption: below the table; empty: none.
        unit: what stands for ``{}`` in headings.

    Example:
        >>> from semdiag.presenting.columns import text
        >>> table = NumberTable(
        ...     [Column("task", said=text), Column("loss", "best loss", goes=1), Column("epochs")],
        ...     [{"task": "missing-duplicate", "loss": 0.0123, "epochs": 17}],
        ... )
        >>> Console(width=21).print(table)  # doctest: +NORMALIZE_WHITESPACE
        <BLANKLINE>
        task        epochs
        ──────────────────
        missing-        17
        duplicate
        <BLANKLINE>
        Left out to fit 21 columns: best loss.
    """

    def __init__(
        self,
        columns: Iterable[Column],
        rows: Iterable[Mapping[str, Any]],
        title: str = "",
        caption: str = "",
        unit: object = "",
    ) -> None:
        listed, asked = list(rows), list(columns)
        cells = {column: [column.cell(row) for row in listed] for column in asked}
        shown = [one for one in asked if one.goes == STAYS or any(cell != "–" for cell in cells[one])]
        self.title, self.caption, self.columns = title, caption, [column.title.format(unit) for column in shown]
        self.rows = list(zip(*(cells[column] for column in shown), strict=True))
        self.names = sum(column.left for column in shown)
        places = [place for place, column in enumerate(shown) if not column.left]
        order = [column.goes or len(shown) for column in shown]  # what stays goes after all others
        going = sorted(places, key=lambda place: (shown[place].goes == STAYS, order[place], -place))
        self._going = going[: max(0, len(shown) - self.names - 1)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what rich needs to print the table."""

        def excess(table: Table) -> int:
            return console.measure(table, options=options.update(max_width=_ENDLESS)).maximum - options.max_width

        left: list[int] = []
        table = self._table(left, breaking=False)
        if excess(table) > 0:
            for count in range(len(self._going) + 1):
                left = self._going[:count]
                table = self._table(left)
                table = self._table(left, narrower=max(0, excess(table)))
                if excess(table) <= 0:
                    break
        if self.title:
            yield self.title
        yield table
        if left:
            missing = ", ".join(self.columns[place] for place in sorted(left))
            yield f"Left out to fit {options.max_width} columns: {missing}."

    def _table(self, left: Sequence[int], breaking: bool = True, narrower: int = 0) -> Table:
        """Return the table without some columns, with broken headings and names narrower by so much in total."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=self.caption or None)
        columns = [[row[place] for row in self.rows] for place in range(len(self.columns))]
        for place, width in enumerate(self._widths_of_names(columns, narrower)):
            columns[place] = [_broken(name, width) for name in columns[place]]
        shown = [place for place in range(len(self.columns)) if place not in left]
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
        """Return the widths of columns of names: the widest shrinks first, none below its longest part."""
        names = columns[: self.names]
        widths = [max(map(cell_len, cells), default=0) for cells in names]
        least = [max((cell_len(p) for cell in cells for p in _PARTS.split(cell)), default=0) for cells in names]
        for _ in range(narrower):
            giving = [place for place, width in enumerate(widths) if width > least[place]]
            if giving:
                widths[max(giving, key=widths.__getitem__)] -= 1
        return widths


def _broken(name: str, width: int) -> str:
    """Return a name on as many lines as it needs, broken after hyphens and dots."""
    lines = [""]
    for part in _PARTS.split(name):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
