"""Locks on folders and files, which end with the process that holds them."""

import errno
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from semdiag_files.errors import InputError

# What flock says where a file system has no locks, like NFS without lockd; 524 is Linux's own ENOTSUPP.
_NO_LOCKS = {524} | {
    getattr(errno, name)
    for name in ("ENOSYS", "ENOLCK", "EOPNOTSUPP", "ENOTSUP", "EINVAL")
    if hasattr(errno, name)
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
