"""Declare the columns of an answer's table once: the entry they show, their heading, how a value reads.

Names are those of the entries in CSV and JSON. Terminal and page read the same declaration.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from semdiag.measuring.findings.strict_json import number_from_json

NEVER = -1
_NONE = "–"
Value = float | str | None


def text(*values: Any) -> str:
    """Join the words of a name."""
    return " ".join(map(plain, values))


def plain(value: Any) -> str:
    """Return a layer, a head, a seed or a word unchanged."""
    return _NONE if value is None else str(value)


def number(value: Value, digits: int = 3) -> str:
    """Return a number to three digits; a whole number, mostly a count, in full.

    Example:
        >>> number(0.12345), number(12345), number("inf"), number(None)
        ('0.123', '12345', 'inf', '–')
    """
    value = number_from_json(value)
    if math.isnan(value):
        return _NONE
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.{digits}g}"


def finite(value: Value) -> str:
    """Return a number; a dash for an infinity."""
    numeric = number_from_json(value)
    return number(numeric if math.isfinite(numeric) else None)


def _as(form: str, factor: int = 1, unit: str = "") -> Callable[[Value], str]:
    """Return a function that formats numbers in a unit."""

    def format_value(value: Value) -> str:
        numeric = factor * number_from_json(value)
        return _NONE if math.isnan(numeric) else f"{numeric:{form}}{unit}"

    return format_value


count = _as(",.0f")
two_decimals, three_decimals, four_decimals = _as(".2f"), _as(".3f"), _as(".4f")
three_digits, four_digits = _as(".3g"), _as(".4g")
percent, fine_percent, rough_percent = _as(".1f", 100, "%"), _as(".2f", 100, "%"), _as(".3g", 100, "%")


def ends(low: Value, high: Value) -> tuple[str, str]:
    """Return both ends of an interval to three digits, or as many as distinguish them.

    Example:
        >>> ends(0.1496, 0.1504), ends(0.15, 0.15)
        (('0.1496', '0.1504'), ('0.15', '0.15'))
    """
    texts = [(number(low, digits), number(high, digits)) for digits in range(3, 7)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[0])


def interval(low: Value, high: Value, factor: float = 1, none: str = _NONE) -> str:
    """Return an interval to three digits, like ``92.6–93.1``; ``-0.2 to 0.1`` where a dash would look like a sign.

    Example:
        >>> interval(92.61, 93.08), interval(-0.2, 0.1), interval(None, None)
        ('92.6–93.1', '-0.2 to 0.1', '–')
    """
    first, last = factor * number_from_json(low), factor * number_from_json(high)
    if math.isnan(first) or math.isnan(last):
        return none
    return (" to " if first < 0 or last < 0 else "–").join(ends(first, last))


percent_interval = partial(interval, factor=100)


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: of the entry in a row; ``load.largest`` is an entry of an entry. Several names, divided by spaces,
            make one cell. Empty: the whole row makes it.
        heading: above it; empty: the name.
        form: turns the entries, or the row, into text.
        drop: its turn to be dropped where the table is too wide: 1 goes first; 0 later, from the right; a column
            with :data:`NEVER` after all these, where it would be cut. It alone stays where no row has a value.
        left: whether it is a name, aligned left and never dropped; a column of :func:`text` is.

    Example:
        >>> Column("low high", "95%", percent_interval).cell({"low": 0.1, "high": 0.25})
        '10–25'
        >>> Column("", "kept", lambda row: f"{row['k']} of {row['keys']}").cell({"k": 5, "keys": 40})
        '5 of 40'
    """

    name: str
    heading: str = ""
    form: Callable[..., str] = number
    drop: int = 0
    left: bool = False

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
