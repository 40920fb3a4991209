"""One process at a time trains in a folder, or writes to a file."""

from contextlib import suppress
from pathlib import Path

from semdiag_models.errors import InputError


class RunLock:
    """A lock of the operating system on a file in the folder: it ends with the process, however that ends.

    Args:
        folder: an existing folder that can be written to.
        file: in the folder, which alone is locked; None means the folder.

    Raises:
        InputError: if another process, or another run of this one, holds it.
        OSError: if no file can be made in the folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lock = RunLock(Path(folder))
        ...     held = [path.name for path in Path(folder).iterdir()]
        ...     lock.release()
        ...     held, list(Path(folder).iterdir())
        (['.lock'], [])
    """

    def __init__(self, folder: Path, file: str | None = None) -> None:
        from filelock import FileLock, Timeout  # what only reads must not need it

        self._path = folder / (".lock" if file is None else f".{file}.lock")
        self._lock = FileLock(self._path)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            if not self._path.exists():  # none can be made, as in /proc; filelock tells of another, too
                self._path.touch()
            if file is not None:
                raise InputError(
                    f"{folder / file} is in use: another writes to it. Name a file for each."
                ) from None
            raise InputError(
                f"{folder} is in use: another process trains there. Wait for it, or choose another folder "
                "with --out."
            ) from None

    def release(self) -> None:
        """Let go, and take the file away. Letting go twice is letting go once."""
        if self._lock.is_locked:
            with suppress(PermissionError):  # Windows keeps a file that is open; the lock removes it there
                self._path.unlink(missing_ok=True)  # while it is still ours
            self._lock.release()
