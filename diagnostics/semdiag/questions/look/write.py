"""Name and write the file of a page on one text."""

import hashlib
from pathlib import Path

from semdiag.presenting.file_names import file_safe
from semdiag.questions.look.measure.heads import Seen
from semdiag.questions.look.page import is_page_of, render_look
from semdiag_models import InputError
from semdiag_models.reading import open_file
from semdiag_models.writing import write_text

_HEAD = 4096  # bytes of a page that contain its generator tag


def place_of(model: str, given: Path | None) -> Path:
    """Return the file for a page, before anything is measured; refuse one that is something else."""
    place = given or Path("reports") / f"look-{file_safe(model)}.html"
    if place.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out takes the name of an .html file. Got {place}.")
    head = _head(place)
    if head is not None and not is_page_of(None, head):
        raise InputError(
            f"{place} is not a page of semdiag look and is not replaced. Name another file with --out FILE.html."
        )
    if given is None and head is not None and not is_page_of(model, head):
        digest = hashlib.sha256(model.encode("utf-8", "surrogateescape")).hexdigest()
        return place_of(model, place.with_name(f"{place.stem}-{digest[:8]}.html"))
    return place


def write_look(seen: Seen, k: int, command: str, place: Path) -> None:
    """Write the page, whole or not at all."""
    page = render_look(seen, k, command)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, page)
    except OSError as error:
        raise InputError(f"{place} cannot be written: {error.strerror or error}.") from None


def _head(place: Path) -> str | None:
    """Return the beginning of a file; None if it does not exist."""
    if not place.exists():
        return None
    with open_file(place) as file:
        return file.read(_HEAD).decode("utf-8", "replace")
