"""What a file or a name says, written so that the reader's program shows it and does nothing else."""

import re

# Control characters but tabs and line ends, and marks that turn the direction of what follows.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# What spreadsheets compute, wide forms included, behind any blanks and apostrophes.
_COMPUTED = re.compile("['\\s]*[=+\\-@\uff1d\uff0b\uff0d\uff20]|'*[\t\r\n]")


def visible(text: str) -> str:
    r"""Return a text with its control characters and marks of direction as their escapes.

    Args:
        text: whatever a file says.

    Example:
        >>> print(visible("a title" + chr(27) + "[31m"))
        a title\x1b[31m
    """
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def csv_cell(text: str) -> str:
    r"""Return a text as it stands in a cell of a CSV file: never a formula, no control characters.

    In front of what a spreadsheet would compute stands an apostrophe, as one would type it there. A text that is
    a number stays as it is. Give it texts alone: numbers are for the CSV writer.

    Args:
        text: of the cell, before the writer quotes it.

    Example:
        >>> [csv_cell(text) for text in ("=1+1", "'=1", "-0.5", "-inf", "a-b")]
        ["'=1+1", "''=1", '-0.5', '-inf', 'a-b']
    """
    text = visible(text)
    return f"'{text}" if _COMPUTED.match(text) and not _is_number(text) else text


def from_csv_cell(cell: str) -> str:
    """Return the text of a cell that :func:`csv_cell` wrote; control characters stay escapes.

    Args:
        cell: as a CSV reader gives it.

    Example:
        >>> [from_csv_cell(csv_cell(text)) for text in ("=1+1", "'=1", "-0.5", "it's")]
        ['=1+1', "'=1", '-0.5', "it's"]
    """
    return cell[1:] if cell.startswith("'") and _COMPUTED.match(cell[1:]) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()
