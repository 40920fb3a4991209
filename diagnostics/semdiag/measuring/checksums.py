"""Checksums that tell whether saved files were changed."""

from collections.abc import Collection
from pathlib import Path

from semdiag_models import InputError, sha256
from semdiag_models.reading import MEBIBYTE, read_bytes

SUMS = "SHA256SUMS"


def write_sums(folder: Path, names: Collection[str]) -> None:
    """Write the SHA-256 of files to ``SHA256SUMS`` beside them, as ``sha256sum`` does and ``sha256sum -c`` checks.

    Args:
        folder: where they lie.
        names: of the files.
    """
    lines = [f"{sha256(folder / name)}  {name}\n" for name in sorted(names)]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path, names: Collection[str]) -> None:
    """Refuse files that are no longer those of which :func:`write_sums` wrote; nothing if it never did.

    Args:
        folder: where they lie.
        names: of all files that are read there.

    Raises:
        InputError: if one was changed, is missing, or was added.
    """
    if not (folder / SUMS).exists():  # saved by a version before them
        return
    lines = read_bytes(folder / SUMS, MEBIBYTE).decode("utf-8", errors="replace").splitlines()
    said = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in sorted({*said, *names}):
        if name not in names or name not in said or sha256(folder / name) != said[name]:
            raise InputError(
                f"{folder / name} is not what was saved, says {SUMS} beside it: it is damaged, gone or changed. "
                f"Restore it from a copy, or remove {SUMS} if the change was meant."
            )
