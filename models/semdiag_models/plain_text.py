"""Write texts from files so that the reader's program only displays them."""

import re

# Control characters except tabs and line ends, and marks that change the writing direction.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# What spreadsheets compute, including full-width forms, after any spaces and apostrophes.
_COMPUTED = re.compile("['\\s]*[=+\\-@\uff1d\uff0b\uff0d\uff20]|'*[\t\r\n]")


def visible(text: str) -> str:
    r"""Replace control characters and direction marks in a text by escapes."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def visible_json(text: str) -> str:
    r"""Escape what :func:`visible` escapes in a JSON text, as JSON does; its values stay the same."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def csv_cell(text: str) -> str:
    r"""Return a text for a cell of a CSV file: never a formula, without control characters."""
    text = visible(text)
    return f"'{text}" if _COMPUTED.match(text) and not _is_number(text) else text


def from_csv_cell(cell: str) -> str:
    """Undo :func:`csv_cell`; control characters stay escapes."""
    return cell[1:] if cell.startswith("'") and _COMPUTED.match(cell[1:]) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()
