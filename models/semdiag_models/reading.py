"""Files: atomic writing, safe text for terminals and spreadsheets, reading of regular files of limited size."""

import csv
import errno
import io
import json
import os
import re
import stat
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from io import BufferedReader
from pathlib import Path
from typing import Any

MEBIBYTE = 2**20
LARGEST_TEXT = 2**30  # bytes, for a text to train or measure on
LARGEST_JSON = 64 * MEBIBYTE  # for a configuration, a summary, a baseline
LARGEST_TOML = MEBIBYTE
MEMORY_SHARE = 0.25  # largest share of the machine's memory: no honest file needs more
_PACKED = 100  # largest credible compression ratio: real token ids, pixels and numbers deflate less
_LARGEST_PACKED = 2**28  # bytes up to which the ratio does not matter
_DEEPEST = 50  # largest number of levels of nested containers
_SHARED = 10**6  # largest number of values in shared containers, counted at each occurrence
_LARGEST_NUMBER = 10**300  # largest number that fits a floating-point number
# Control characters except tabs and line ends, and marks that change the writing direction.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# What spreadsheets compute, including full-width forms, after any spaces and apostrophes.
_COMPUTED = re.compile("['\\s]*[=+\\-@\uff1d\uff0b\uff0d\uff20]|'*[\t\r\n]")


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


def visible(text: str) -> str:
    r"""Replace control characters and direction marks in a text by escapes."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def visible_json(text: str) -> str:
    r"""Escape what :func:`visible` escapes in a JSON text, as JSON does; its values stay the same."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def csv_cell(text: str) -> str:
    """Return a text for a cell of a CSV file: never a formula, without control characters."""
    text = visible(text)
    with suppress(ValueError):
        float(text)
        if text == text.strip():
            return text
    return f"'{text}" if _COMPUTED.match(text) else text


def from_csv_cell(cell: str) -> str:
    """Undo :func:`csv_cell`; control characters stay escapes."""
    return cell[1:] if cell.startswith("'") and _COMPUTED.match(cell[1:]) else cell


def write_csv(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write rows as a CSV file, whole or not at all."""
    table = io.StringIO()
    cells = ([csv_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    csv.writer(table, lineterminator="\n").writerows(cells)
    write_text(path, table.getvalue())


class InputError(ValueError):
    """Raised if a request cannot be done: what, why, what would work. Commands show it and exit with code 2."""


def refuse(wrong: Any, why: str) -> None:
    """Refuse a request for a reason, if it is wrong."""
    if wrong:
        raise InputError(why)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that is not in a registry."""
    known = list(known)
    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return InputError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")


def open_file(path: Path, largest: int | None = None) -> BufferedReader:
    """Open a regular file for reading; nothing else, because a pipe would block and a device never end."""
    try:  # non-blocking: opening a pipe would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:  # also a name that is too long, or contains a zero byte
        why = str(getattr(error, "strerror", None) or error)
        raise InputError(f"{path} cannot be read: {why[0].lower()}{why[1:]}.") from None
    found = os.fstat(descriptor)
    size, allowed = found.st_size, memory_share() if largest is None else largest
    odd, why = not stat.S_ISREG(found.st_mode), "is no regular file, but a pipe, a device or a socket"
    if not odd and not size:
        try:  # the system may make the content up while one reads, perhaps without end, as in /proc
            odd = bool(os.read(descriptor, 1))
        except OSError:  # nothing to read yet
            odd = True
    if stat.S_ISDIR(found.st_mode):
        why = "is a folder, not a file"
    elif not odd and size > allowed:
        odd, why = True, f"has {size:,} bytes; files of its kind may have up to {allowed:,}"
    if odd:
        os.close(descriptor)
        raise InputError(f"{path} {why}.")
    return os.fdopen(descriptor, "rb")


def check_packed(path: Path, size: int, packed: int) -> None:
    """Refuse content that unpacks to more than memory, or to far more than any honest content."""
    require_memory(size, f"{path}, unpacked,")
    sizes = f"{size / 2**20:,.0f} MiB from {packed / 2**20:.2g} MiB"
    too_large = size > max(_LARGEST_PACKED, _PACKED * packed)
    refuse(too_large, f"{path} unpacks to {sizes}: it is almost only repetition.")


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


def _parsed(path: Path, largest: int, parse: Callable[[bytes], Any], kind: str = "") -> Any:
    """Parse a file; refuse numbers that are too large, and too much nesting."""
    content = read_bytes(path, largest)
    try:
        found = parse(content)
        large = any(isinstance(v, int) and abs(v) > _LARGEST_NUMBER for layer in layers(found) for v in layer)
        refuse(large, "a number is too large")
        return found
    except (ValueError, RecursionError) as error:  # also for too many digits
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise InputError(f"{path} cannot be read{kind} ({why}).") from None


def layers(content: Any) -> Iterator[list[Any]]:
    """Yield the values in nested containers, level by level; refuse what printing or copying could not survive."""
    layer, seen, distinct, total = [content], set[int](), 0, 0
    for _ in range(_DEEPEST):
        yield layer
        inner: list[Any] = []
        for entry in layer:
            if isinstance(entry, dict | list | tuple):
                inner += entry.values() if isinstance(entry, dict) else entry
                total, distinct = total + len(entry), distinct + len(entry) * (id(entry) not in seen)
                seen.add(id(entry))
                if total > _SHARED + 10 * distinct:
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
    than, there = "more than" if largest == 1 else "more than a quarter of", _memory()
    much = f"{what} would take {size / 2**30:,.1f} GiB of memory, {than} the {there / 2**30:,.1f} GiB"
    refuse(size > largest * there, f"{much} that this machine has. Use a smaller one, or a larger machine.")


def _memory() -> int:
    """Return the machine's memory in bytes, or its cgroup's limit if that is lower."""
    try:
        known = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, OSError, ValueError):  # another system: assume a small one
        known = [8 * 2**30]
    for place in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            known.append(int(Path("/sys/fs/cgroup", place).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no cgroup, or "max"
            continue
    return min(size for size in known if size > 0)


# What flock says where a file system has no locks, like NFS without lockd.
_NO_LOCKS = {
    getattr(errno, name) for name in ("ENOSYS", "ENOLCK", "EOPNOTSUPP", "ENOTSUP") if hasattr(errno, name)
}


class RunLock:
    """An operating system's lock on a file in the folder, which ends with the process, however that ends.

    Where the file system has no locks, it says so and holds none.
    """

    def __init__(
        self, folder: Path, file: str | None = None, say: Callable[[str], object] = warnings.warn
    ) -> None:
        from filelock import FileLock, Timeout  # not needed for reading

        self._path = folder / (".lock" if file is None else f".{file}.lock")
        self._lock = FileLock(self._path)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            if not self._path.exists():  # if it cannot be created, as in /proc, filelock says the same
                self._path.touch()
            why = "another process trains there. Wait for it, or choose another folder with --out."
            if file is not None:
                why = "another process writes to it. Wait for it, or name another."
            raise InputError(f"{folder / (file or '')} is in use: {why}") from None
        except (OSError, NotImplementedError) as error:  # the latter by older versions of filelock
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise OSError(error.errno, error.strerror, error.filename or str(self._path)) from error
            self._path.unlink(missing_ok=True)
            say(f"The file system of {folder / (file or '')} has no locks: let no other process write there now.")

    def release(self) -> None:
        """Release the lock and remove its file; further calls do nothing."""
        if self._lock.is_locked:
            with suppress(PermissionError):  # Windows keeps open files; there the lock removes it
                self._path.unlink(missing_ok=True)  # while we still hold it
            self._lock.release()


def counted(number: int, noun: str) -> str:
    """Return a number and what it counts."""
    many = f"{noun[:-1]}ies" if re.search("[^aeiou]y$", noun) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else many}"
