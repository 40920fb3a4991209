"""Files that are whole or not there, and on the disk before they get their name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8 by :func:`write_bytes`; what UTF-8 cannot hold is written as an escape."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write atomically: a temporary file in the same folder, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with _naming(path):
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:  # an interruption, too, leaves nothing half-written
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an error of the system name the file that is written: it names the temporary one, or none at all."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk, where the system can."""
    with suppress(OSError):  # some systems open no folders, some file systems sync none
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
