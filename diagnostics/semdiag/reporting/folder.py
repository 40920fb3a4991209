"""Replace the folder of a report safely."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from semdiag.measuring.findings.strict_json import has_schema
from semdiag.reporting.exchange import exchange
from semdiag_models import InputError
from semdiag_models.reading import read_json


def check_folder(folder: Path, keep_queries: bool) -> None:
    """Refuse to replace anything but an earlier report, or to lose measurements in it."""
    folder = Path(os.path.realpath(folder))
    existing = next(parent for parent in folder.parents if parent.exists())
    if not existing.is_dir():
        raise InputError(f"The report cannot be written to {folder}: {existing} is a file.")
    if not os.access(existing, os.W_OK):
        raise InputError(f"The report cannot be written to {folder}: nothing can be written in {existing}.")
    _tidy(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file. Name a folder for the report with --out DIR.")
    try:
        if not any(folder.iterdir()):
            return
        content = read_json(folder / "summary.json")
    except (OSError, InputError):
        content = None
    if not has_schema(content, "report"):
        raise InputError(f"{folder} is not empty and not a semdiag report. Name another folder with --out DIR.")
    if (folder / "data" / "queries.parquet").exists() and not keep_queries:
        raise InputError(
            f"{folder} holds the queries of an earlier report, which would be lost. "
            "Add --keep-queries, or name another folder with --out DIR."
        )


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a new folder that replaces ``folder`` once everything is written, and leaves nothing on failure."""
    folder = Path(os.path.realpath(folder))
    building = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        try:
            building.mkdir(parents=True)
            yield building
            _swap(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise InputError(f"The report cannot be written to {folder}: {error.strerror or error}.") from None


def _tidy(folder: Path) -> None:
    """Clean up after a killed process: restore the old report, delete the partial one."""
    if not folder.parent.is_dir():
        return
    for path in sorted(folder.parent.iterdir()):
        match = re.fullmatch(rf"\.{re.escape(folder.name)}\.(\d+)\.(partial|old)", path.name)
        if match is None or _runs(int(match[1])):
            continue
        if match[2] == "old" and not folder.exists():
            path.rename(folder)
        shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    """Return whether the process with this number is running, so that its folder must be left alone."""
    if process == os.getpid() or os.name == "nt":
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process
        return True
    return True


def _swap(building: Path, folder: Path) -> None:
    """Replace the older folder by the finished one; on failure keep or restore the older one."""
    if folder.exists() and exchange(building, folder):
        return  # the older one now has the name that will be deleted
    old = building.with_suffix(".old")
    if folder.exists():
        folder.rename(old)
    try:
        building.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
