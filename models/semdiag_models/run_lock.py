"""Locks: one process at a time trains in a folder, or writes to a file."""

from contextlib import suppress
from pathlib import Path

from semdiag_models.errors import InputError


class RunLock:
    """An operating system's lock on a file in the folder: it ends with the process, however that ends."""

    def __init__(self, folder: Path, file: str | None = None) -> None:
        from filelock import FileLock, Timeout  # not needed for reading

        self._path = folder / (".lock" if file is None else f".{file}.lock")
        self._lock = FileLock(self._path)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            if (
                not self._path.exists()
            ):  # it cannot be created, as in /proc; filelock reports another holder the same way
                self._path.touch()
            if file is not None:
                raise InputError(
                    f"{folder / file} is in use: another monitor or process writes to it. Use a file for each."
                ) from None
            raise InputError(
                f"{folder} is in use: another process trains there. Wait for it, or choose another folder "
                "with --out."
            ) from None

    def release(self) -> None:
        """Release the lock and remove its file; further calls do nothing."""
        if self._lock.is_locked:
            with suppress(PermissionError):  # Windows keeps open files; there the lock removes it
                self._path.unlink(missing_ok=True)  # while we still hold it
            self._lock.release()
