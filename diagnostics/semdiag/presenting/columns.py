"""Declare the columns of an answer's table once: the entry they show, their heading, how a value reads."""

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
    """Return a number to three digits; a whole number, mostly a count, in full."""
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
    """Return both ends of an interval to three digits, or as many as distinguish them."""
    texts = [(number(low, digits), number(high, digits)) for digits in range(3, 7)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[0])


def interval(low: Value, high: Value, factor: float = 1, none: str = _NONE) -> str:
    """Return an interval to three digits, like ``92.6–93.1``; ``-0.2 to 0.1`` where a dash would look like a sign."""
    first, last = factor * number_from_json(low), factor * number_from_json(high)
    if math.isnan(first) or math.isnan(last):
        return none
    return (" to " if first < 0 or last < 0 else "–").join(ends(first, last))


percent_interval = partial(interval, factor=100)


@dataclass(frozen=True)
class Column:
    """A column."""

    name: str  # of the entry in a row
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
