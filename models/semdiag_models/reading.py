"""The only way to open files: regular files, no larger than expected for their kind."""

import json
import os
import stat
import tomllib
from io import BufferedReader
from pathlib import Path
from typing import Any

from semdiag_models.errors import InputError

MEBIBYTE = 2**20
LARGEST_TEXT = 2**30  # bytes, for a text to train or measure on
LARGEST_JSON = 64 * MEBIBYTE  # for a configuration, a summary, a baseline
LARGEST_TOML = MEBIBYTE
MEMORY_SHARE = 0.25  # share of the machine's memory: no honest file needs more
_PACKED = 100  # largest credible compression ratio: real token ids, pixels and numbers deflate less
_LARGEST_PACKED = 2**28  # bytes up to which it does not matter
_DEEPEST = 50  # levels of nested tables
_LARGEST_NUMBER = 10**300  # fits a floating-point number


def open_file(path: Path, largest: int | None = None) -> BufferedReader:
    """Open a regular file for reading; nothing else, because a pipe would block and a device never end."""
    try:
        # Non-blocking: opening a pipe would wait for a writer.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder, not a file.") from None
    except PermissionError:
        raise InputError(f"{path} cannot be read: permission denied.") from None
    except (OSError, ValueError) as error:  # a name that is too long, or contains a zero byte
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or _made_up(descriptor, found.st_size):
        os.close(descriptor)
        folder = stat.S_ISDIR(found.st_mode)
        kind = "a folder, not a file" if folder else "no regular file, but a pipe, a device or a socket"
        raise InputError(f"{path} is {kind}.")
    file = os.fdopen(descriptor, "rb")
    size, allowed = found.st_size, memory_share() if largest is None else largest
    if size > allowed:
        file.close()
        raise InputError(f"{path} has {size:,} bytes; files of its kind may have up to {allowed:,}.")
    return file


def _made_up(descriptor: int, size: int) -> bool:
    """Return whether the system makes the content up while one reads, perhaps without end, as in /proc."""
    if size:
        return False
    try:
        return bool(os.read(descriptor, 1))
    except OSError:  # nothing to read yet
        return True


def check_packed(path: Path, size: int, packed: int) -> None:
    """Refuse what unpacks to more than memory, or to far more than any honest content is packed into."""
    require_memory(size, f"{path}, unpacked,")
    if size > max(_LARGEST_PACKED, _PACKED * packed):
        raise InputError(
            f"{path} unpacks to {size / 2**20:,.0f} MiB from {packed / 2**20:.2g} MiB: it is almost only "
            "repetition."
        )


def read_bytes(path: Path, largest: int) -> bytes:
    """Read a regular file whole."""
    with open_file(path, largest) as file:
        return file.read(largest)


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    content = read_bytes(path, LARGEST_JSON)
    try:
        found = json.loads(content)
        _check_depth(found)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise InputError(f"{path} cannot be read as JSON ({reason}).") from None
    return found


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """Read a TOML file; return its content and its text."""
    content = read_bytes(path, LARGEST_TOML)
    try:
        text = content.decode("utf-8")
        found = tomllib.loads(text)
        _check_depth(found)
    except (ValueError, RecursionError) as error:  # also for too many digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"{path} cannot be read: {reason}.") from None
    return found, text


def _check_depth(content: Any) -> None:
    """Refuse numbers that are too large, and nesting that printing or copying could not survive."""
    layer = [content]
    for _ in range(_DEEPEST):
        if any(isinstance(entry, int) and abs(entry) > _LARGEST_NUMBER for entry in layer):
            raise ValueError("a number is too large")
        layer = [
            inner
            for entry in layer
            if isinstance(entry, dict | list)
            for inner in (entry.values() if isinstance(entry, dict) else entry)
        ]
        if not layer:
            return
    raise RecursionError


def memory_share() -> int:
    """Return the bytes that one file may declare: a quarter of the memory of the machine, or of its cgroup."""
    return int(MEMORY_SHARE * _memory())


def require_memory(size: int, what: str, largest: float = MEMORY_SHARE) -> None:
    """Refuse what would not fit, before any of it is allocated."""
    if size > largest * _memory():
        than = "more than" if largest == 1 else "more than a quarter of"
        raise InputError(
            f"{what} would take {size / 2**30:,.1f} GiB of memory, {than} the {_memory() / 2**30:,.1f} GiB that "
            "this machine has. Use a smaller one, or a larger machine."
        )


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
