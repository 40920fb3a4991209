"""Checksums that show whether saved files have changed."""

from collections.abc import Collection
from pathlib import Path

from semdiag_models import InputError, sha256
from semdiag_models.reading import MEBIBYTE, read_bytes

SUMS = "SHA256SUMS"


def write_sums(folder: Path, names: Collection[str]) -> None:
    """Write the SHA-256 of files to ``SHA256SUMS`` beside them; ``sha256sum -c`` can check it."""
    lines = [f"{sha256(folder / name)}  {name}\n" for name in sorted(names)]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path, names: Collection[str]) -> None:
    """Refuse files that differ from those that :func:`write_sums` saw; without its file, check nothing."""
    if not (folder / SUMS).exists():  # saved by an older version
        return
    lines = read_bytes(folder / SUMS, MEBIBYTE).decode("utf-8", errors="replace").splitlines()
    recorded = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in sorted({*recorded, *names}):
        if name not in names or name not in recorded or sha256(folder / name) != recorded[name]:
            raise InputError(
                f"{folder / name} differs from what {SUMS} beside it recorded: it is damaged, missing or changed. "
                f"Restore it from a copy, or remove {SUMS} if the change is intended."
            )
