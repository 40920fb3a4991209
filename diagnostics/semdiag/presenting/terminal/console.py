"""Tables of results in a terminal."""

import math
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from semdiag.measuring.findings.strict_json import number_from_json
from semdiag.presenting.terminal.terminal import results_on_stderr, terminal

_ENDLESS = 10_000
_PARTS = re.compile(r"(?<=-)")  # parts of a name, which breaks only after hyphens
_LOG = 150  # columns for a file, whose reader can wrap lines


def wide_console() -> Console:
    """Return a console on stdout (stderr with JSON), as wide as the terminal or ``COLUMNS``, else wide."""
    console = terminal(stderr=results_on_stderr(), markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, _LOG)
    return console


class NumberTable:
    """A table that fits the width of the terminal.

    A number is shown whole or not at all, because a truncated one would be wrong. If a table is too wide, its
    headings are broken between words, then names at hyphens, and then columns are left out, with a note that names
    them.

    Args:
        columns: their headings.
        names: number of leading columns with names, aligned left; they are never left out.
        title: above the table; may be empty.
        least: headings of the columns to leave out first, in this order; then the others from the right.
        kept: headings of columns that are never left out, because they hold the answer.

    Attributes:
        caption: below the table; may be empty.

    Example:
        >>> table = NumberTable(["task", "best loss", "epochs"], names=1, least=["best loss"])
        >>> table.add_row("missing-duplicate", "0.0123", "17")
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
        columns: Iterable[str],
        names: int = 0,
        title: str = "",
        least: Sequence[str] = (),
        kept: Sequence[str] = (),
    ) -> None:
        self.columns, self.names, self.title, self.caption = list(columns), names, title, ""
        self.rows: list[tuple[str, ...]] = []
        first = [self.columns.index(name) for name in least if name in self.columns]
        rest = [place for place in reversed(range(names, len(self.columns))) if place not in first]
        going = [place for place in (*first, *rest) if self.columns[place] not in kept]
        self._going = going[: max(0, len(self.columns) - names - 1)]

    @property
    def row_count(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def add_row(self, *cells: str) -> None:
        """Add a row; missing cells on the right are empty."""
        self.rows.append((*cells, *[""] * (len(self.columns) - len(cells))))

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
    """Return a name on as many lines as it needs, broken after hyphens."""
    lines = [""]
    for part in _PARTS.split(name):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def number_table(columns: Iterable[str], names: int = 0, **more: Any) -> NumberTable:
    """Return a :class:`NumberTable` without rows."""
    return NumberTable(columns, names, **more)


def number(value: float | str | None, digits: int = 3) -> str:
    """Return a number to three digits; whole numbers, mostly counts, in full."""
    value = number_from_json(value)
    if math.isnan(value):
        return "–"
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.{digits}g}"


def ends(low: float | str | None, high: float | str | None) -> tuple[str, str]:
    """Return both ends of an interval to three digits, or as many as distinguish them.

    Example:
        >>> ends(0.1496, 0.1504), ends(0.15, 0.15)
        (('0.1496', '0.1504'), ('0.15', '0.15'))
    """
    texts = [(number(low, digits), number(high, digits)) for digits in range(3, 7)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[0])


def interval(low: float, high: float) -> str:
    """Return an interval to three digits, like ``92.6–93.1``; ``-0.2 to 0.1`` if a dash would look like a sign.

    Example:
        >>> interval(92.61, 93.08), interval(-0.2, 0.1)
        ('92.6–93.1', '-0.2 to 0.1')
    """
    if math.isnan(low) or math.isnan(high):
        return "no interval"
    return (" to " if low < 0 or high < 0 else "–").join(ends(low, high))
