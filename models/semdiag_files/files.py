"""Files: atomic writing, and reading of regular files of limited size."""

import csv
import io
import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from semdiag_files.errors import InputError
from semdiag_files.text import csv_cell

MEBIBYTE = 2**20
LARGEST_TEXT = 2**30  # bytes, for a text to train or measure on
LARGEST_JSON = 64 * MEBIBYTE  # for a configuration, a summary, a baseline
LARGEST_TOML = MEBIBYTE
MEMORY_SHARE = 0.25  # largest share of the machine's memory: no honest file needs more
_LARGEST_RATIO = 100  # largest credible compression ratio: real token ids, pixels and numbers deflate less
_LARGEST_PACKED = 2**28  # bytes up to which the ratio does not matter
_DEEPEST = 50  # largest number of levels of nested containers
_LARGEST_SHARED = 10**6  # largest number of values in shared containers, counted at each occurrence
_LARGEST_NUMBER = 10**300  # largest number that fits a floating-point number


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8 by :func:`write_bytes`; what UTF-8 cannot hold is written as an escape."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write atomically: a temporary file in the same folder, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:  # an interruption, too, leaves nothing half-written
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # it names the temporary file, or none
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise
    with suppress(OSError):  # some systems open no folders, some file systems sync none
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_csv(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write rows as a CSV file, whole or not at all."""
    table = io.StringIO()
    cells = ([csv_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    csv.writer(table, lineterminator="\n").writerows(cells)
    write_text(path, table.getvalue())


def open_file(path: Path, largest: int | None = None) -> BufferedReader:
    """Open a regular file for reading; nothing else, because a pipe would block and a device never end."""
    try:  # non-blocking: opening a pipe would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:  # also a name that is too long, or contains a zero byte
        why = str(getattr(error, "strerror", None) or error)
        raise InputError(f"{path} cannot be read: {why[0].lower()}{why[1:]}.") from None
    problem = _problem(descriptor, memory_share() if largest is None else largest)
    if problem:
        os.close(descriptor)
        raise InputError(f"{path} {problem}.")
    return os.fdopen(descriptor, "rb")


def _problem(descriptor: int, largest: int) -> str:
    """Return why what was opened is not to be read; nothing for an honest file."""
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        return "is a folder, not a file"
    regular = stat.S_ISREG(status.st_mode)
    if regular and status.st_size == 0:
        try:  # the system may make the content up while one reads, perhaps without end, as in /proc
            regular = not os.read(descriptor, 1)
        except OSError:  # nothing to read yet
            regular = False
    if not regular:
        return "is no regular file, but a pipe, a device or a socket"
    if status.st_size > largest:
        return f"has {status.st_size:,} bytes; files of its kind may have up to {largest:,}"
    return ""


def check_packed(path: Path, size: int, packed: int) -> None:
    """Refuse content that unpacks to more than memory, or to far more than any honest content."""
    require_memory(size, f"{path}, unpacked,")
    if size > max(_LARGEST_PACKED, _LARGEST_RATIO * packed):
        sizes = f"{size / 2**20:,.0f} MiB from {packed / 2**20:.2g} MiB"
        raise InputError(f"{path} unpacks to {sizes}: it is almost only repetition.")


def read_bytes(path: Path, largest: int = LARGEST_JSON) -> bytes:
    """Read a whole regular file."""
    with open_file(path, largest) as file:
        return file.read(largest)


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return _parsed(path, LARGEST_JSON, json.loads, " as JSON")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    table: dict[str, Any] = _parsed(path, LARGEST_TOML, lambda text: tomllib.loads(text.decode("utf-8")))
    return table


def _parsed(path: Path, largest: int, parse: Callable[[bytes], Any], format_name: str = "") -> Any:
    """Parse a file; refuse numbers that are too large, and too much nesting."""
    content = read_bytes(path, largest)
    try:
        values = parse(content)
        for layer in layers(values):
            if any(isinstance(value, int) and abs(value) > _LARGEST_NUMBER for value in layer):
                raise ValueError("a number is too large")
        return values
    except (ValueError, RecursionError) as error:  # also for too many digits
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise InputError(f"{path} cannot be read{format_name} ({why}).") from None


def layers(content: Any) -> Iterator[list[Any]]:
    """Yield the values in nested containers, level by level; refuse what printing or copying could not survive."""
    layer = [content]
    visited = set[int]()
    total = 0
    distinct = 0
    for _ in range(_DEEPEST):
        yield layer
        inner: list[Any] = []
        for entry in layer:
            if isinstance(entry, dict | list | tuple):
                inner += entry.values() if isinstance(entry, dict) else entry
                total += len(entry)
                if id(entry) not in visited:
                    distinct += len(entry)
                visited.add(id(entry))
                if total > _LARGEST_SHARED + 10 * distinct:
                    raise ValueError("containers that contain each other too often")
        if not inner:
            return
        layer = inner
    raise ValueError("containers that are nested too deeply")


def memory_share() -> int:
    """Return the bytes that one file may declare: a quarter of the memory of the machine, or of its cgroup."""
    return int(MEMORY_SHARE * _memory())


def require_memory(size: int, what: str, largest: float = MEMORY_SHARE) -> None:
    """Refuse sizes that do not fit, before any memory is allocated."""
    memory = _memory()
    if size > largest * memory:
        limit = "more than" if largest == 1 else "more than a quarter of"
        sizes = f"{size / 2**30:,.1f} GiB of memory, {limit} the {memory / 2**30:,.1f} GiB that this machine has"
        raise InputError(f"{what} would take {sizes}. Use a smaller one, or a larger machine.")


def _memory() -> int:
    """Return the machine's memory in bytes, or its cgroup's limit if that is lower."""
    try:
        sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, OSError, ValueError):  # another system: assume a small one
        sizes = [8 * 2**30]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            sizes.append(int(Path("/sys/fs/cgroup", file).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no cgroup, or "max"
            continue
    return min(size for size in sizes if size > 0)
