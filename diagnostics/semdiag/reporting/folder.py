"""The folder of a report: reserved before the measuring, replaced as a whole, and never anybody else's."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from semdiag.measuring.findings.findings import has_schema
from semdiag_files import InputError, RunLock, read_bytes, read_json

UNFINISHED = "unfinished"  # folder in a report's folder: what an interrupted command finished
_FINISHED = "*/*.jsonl"  # in it, by model
# A file in it.
_PART = re.compile(r"\.semdiag|[0-9a-f]{12}/(runs-\d+\.jsonl|\.?(conditions\.json|index\.html)(\.tmp)?)")
MARKER = ".semdiag"  # in what semdiag made, and may delete; in a report with the names of its files
_PARTS = {
    "index.html",
    "look.html",
    "summary.json",
    "data",
    "figures",
}  # of a report before 0.13, without a marker
_OF_SYSTEMS = {".DS_Store", "Thumbs.db", "desktop.ini"}
_ANOTHER = "name another folder with --out DIR"


class ReportFolder:
    """A folder that this process alone may write a report to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder  # as the user gave it
        self._place = Path(os.path.realpath(folder))
        self._building = self._place.with_name(f".{self._place.name}.partial")
        self._old = self._place.with_name(f".{self._place.name}.old")

    @contextmanager
    def replacing(self) -> Iterator[Path]:
        """Yield a new folder that takes the report's place once all is written; leave nothing on failure."""
        try:
            self._building.mkdir()
            (self._building / MARKER).touch()
            yield self._building
            names = sorted(_files(self._building) - {MARKER})
            (self._building / MARKER).write_text("\n".join(names), encoding="utf-8", errors="surrogateescape")
            if self._place.exists():
                _retire(self._place, self._old)
            self._building.rename(self._place)
        except OSError as error:
            raise _unwritable(self._place, error) from None
        finally:
            self.tidy()

    def unfinished(self, models: Sequence[str]) -> Path:
        """Return the folder of what is finished, for the same command to go on; refuse that of other models."""
        folder = self._place / UNFINISHED
        if (folder / MARKER).is_file() and any(folder.glob(_FINISHED)):
            listed = read_bytes(folder / MARKER).decode("utf-8", "surrogateescape").splitlines()
            if listed != [*models]:
                raise InputError(
                    f"{folder} holds what an unfinished command finished of {', '.join(listed) or 'no model'}, "
                    f"not of {', '.join(models)}. Repeat that command, {_ANOTHER}, or delete the folder."
                )
            return folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MARKER).write_text("\n".join(models), encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise _unwritable(self._place, error) from None
        return folder

    def without_empty_parts(self) -> None:
        """Remove the folder of finished parts if there is none, and the report's if that was all."""
        folder = self._place / UNFINISHED
        if _finished_parts(self._place) and not any(folder.glob(_FINISHED)) and not _foreign_parts(self._place):
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                self._place.rmdir()

    def check_scraps(self) -> None:
        """Refuse folders with the names of a killed process's scraps that are none."""
        for scraps in (self._building, self._old):
            if os.path.lexists(scraps) and not _is_ours(scraps):
                raise InputError(f"{scraps} is in the way, and semdiag did not make it. Move it, or {_ANOTHER}.")

    def tidy(self) -> None:
        """Restore the older report if the new one is not there, and delete what a killed process left."""
        if _is_ours(self._old) and not self._place.exists():
            self._old.rename(self._place)
        for scraps in (self._building, self._old):
            if _is_ours(scraps):
                shutil.rmtree(scraps, ignore_errors=True)


def check_folder(folder: Path, keep_queries: bool) -> None:
    """Refuse to replace anything but an earlier report, or to lose measurements or other files in it."""
    with reserved(folder, keep_queries):
        pass


@contextmanager
def reserved(folder: Path, keep_queries: bool) -> Iterator[ReportFolder]:
    """Keep other processes from a report's folder in the context; refuse one that holds anything else."""
    place = Path(os.path.realpath(folder))
    existing = next((parent for parent in place.parents if parent.exists()), place)
    if not existing.is_dir():
        raise InputError(f"The report cannot be written to {place}: {existing} is a file.")
    if os.path.ismount(place):
        raise InputError(
            f"The report cannot replace {place}, where a disk is mounted. Name a folder in it: --out DIR."
        )
    if not os.access(existing, os.W_OK):
        raise InputError(f"The report cannot be written to {place}: nothing can be written in {existing}.")
    missing = [parent for parent in place.parents if not parent.exists()]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = RunLock(place.parent, place.name)
    except OSError as error:
        raise _unwritable(place, error) from None
    report = ReportFolder(folder)
    try:
        report.check_scraps()
        report.tidy()
        _check_content(place, keep_queries)
        yield report
    finally:
        report.without_empty_parts()
        lock.release()
        with suppress(OSError):  # it is not empty, or somebody else was quicker
            for parent in missing:
                parent.rmdir()


def _check_content(folder: Path, keep_queries: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file. Name a folder for the report with --out DIR.")
    if foreign_parts := _foreign_parts(folder):
        raise InputError(f"{folder} holds {foreign_parts[0]}, which semdiag did not make. Move it, or {_ANOTHER}.")
    try:
        if not {path.name for path in folder.iterdir()} - _finished_parts(folder):
            return
        content = read_json(folder / "summary.json")
    except (OSError, InputError):
        content = None
    if not has_schema(content, "report"):
        raise InputError(f"{folder} is not empty and not a semdiag report. Name another folder with --out DIR.")
    if foreign_files := _foreign_files(folder):
        more = f" and {len(foreign_files) - 1} more" if len(foreign_files) > 1 else ""
        raise InputError(
            f"{folder} holds {foreign_files[0]}{more} beside an earlier report. Move it, or {_ANOTHER}."
        )
    if (folder / "data" / "queries.parquet").exists() and not keep_queries:
        raise InputError(
            f"{folder} holds the queries of an earlier report, which would be lost. "
            "Add --keep-queries, or name another folder with --out DIR."
        )


def _foreign_files(folder: Path) -> list[str]:
    """Return what stands in a report's folder and is not the report's."""
    if not (folder / MARKER).is_file():
        return sorted({path.name for path in folder.iterdir()} - _PARTS - _OF_SYSTEMS - _finished_parts(folder))
    names = read_bytes(folder / MARKER).decode("utf-8", "surrogateescape").splitlines()
    foreign_files = _files(folder) - {MARKER, *names}
    parts = _finished_parts(folder)
    return sorted(
        name
        for name in foreign_files
        if name.rpartition("/")[2] not in _OF_SYSTEMS and name.partition("/")[0] not in parts
    )


def _finished_parts(folder: Path) -> set[str]:
    """Return the name of the folder with what an interrupted command finished, if there is one of semdiag's."""
    return {UNFINISHED} if (folder / UNFINISHED / MARKER).is_file() else set()


def _foreign_parts(folder: Path) -> list[str]:
    """Return what stands among finished parts and is none."""
    return sorted(
        f"{part}/{name}"
        for part in _finished_parts(folder)
        for name in _files(folder / part)
        if not _PART.fullmatch(name) and name.rpartition("/")[2] not in _OF_SYSTEMS
    )


def _files(folder: Path) -> set[str]:
    """Return the relative names of everything in a folder that is no folder."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }  # fmt: skip


def _is_ours(scraps: Path) -> bool:
    """Return whether a folder holds nothing, or semdiag's marker."""
    if scraps.is_symlink() or not scraps.is_dir():
        return False
    return (scraps / MARKER).is_file() or not any(scraps.iterdir())


def _retire(report: Path, old: Path) -> None:
    """Move an earlier report out of the way, marked as semdiag's."""
    if any(report.iterdir()):
        (report / MARKER).touch()
        report.rename(old)
    else:
        report.rmdir()


def _unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(f"The report cannot be written to {folder}: {error.strerror or error}.")
