"""Reading a text file whose content nobody has checked."""

import hashlib
import io
from pathlib import Path

from semdiag_models.errors import InputError
from semdiag_models.reading import LARGEST_TEXT, read_bytes


def read_lines(path: Path) -> tuple[list[str], str]:
    """Read the lines of a UTF-8 file, stripped, without the blank ones."""
    content = read_bytes(path, LARGEST_TEXT)
    if b"\0" in content:
        raise InputError(f"{path} is not a text: it holds zero bytes. Name a UTF-8 text file.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} is not UTF-8: byte {content[error.start]:#04x} in line {line}. "
            "Convert it, for instance with: iconv -f latin1 -t utf-8."
        ) from None
    stripped = (line.strip() for line in io.StringIO(text, newline=None))
    lines = [line for line in stripped if line]
    if not lines:
        raise InputError(f"{path} is empty: there is no line with text in it.")
    return lines, hashlib.sha256(content).hexdigest()


def split_lines(path: Path, lines: list[str]) -> tuple[list[str], list[str]]:
    """Split training and held-out lines: the last tenth, and at least one line, is held out."""
    if len(lines) < 2:
        raise InputError(
            f"{path} has one line; the last tenth of the lines is held out, so two are needed at least. "
            "Break the text into lines, or name a second file with --holdout-text."
        )
    held_out = max(1, len(lines) // 10)
    return lines[:-held_out], lines[-held_out:]
