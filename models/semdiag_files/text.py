"""Text that neither a terminal nor a spreadsheet obeys, and numbers in words."""

import re
from contextlib import suppress

# Control characters except tabs and line ends, and marks that change the writing direction.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# What spreadsheets compute, including full-width forms, after any spaces and apostrophes.
_FORMULA = re.compile("['\\s]*[=+\\-@\uff1d\uff0b\uff0d\uff20]|'*[\t\r\n]")


def visible(text: str) -> str:
    r"""Replace control characters and direction marks in a text by escapes."""
    return _CONTROL.sub(lambda mark: mark[0].encode("unicode_escape").decode("ascii"), text)


def visible_json(text: str) -> str:
    r"""Escape what :func:`visible` escapes in a JSON text, as JSON does; its values stay the same."""
    return _CONTROL.sub(lambda mark: f"\\u{ord(mark[0]):04x}", text)


def csv_cell(text: str) -> str:
    """Return a text for a cell of a CSV file: never a formula, without control characters."""
    text = visible(text)
    with suppress(ValueError):
        float(text)
        if text == text.strip():
            return text
    return f"'{text}" if _FORMULA.match(text) else text


def from_csv_cell(cell: str) -> str:
    """Undo :func:`csv_cell`; control characters stay escapes."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell[1:]) else cell


def counted(number: int, noun: str) -> str:
    """Return a number and what it counts."""
    plural = f"{noun[:-1]}ies" if re.search("[^aeiou]y$", noun) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
