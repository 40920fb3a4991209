"""The page of one text beside a report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from semdiag.capturing.inputs import SUFFIXES
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.measure import Conditions
from semdiag.questions.look.measure import fitting_k, see_loaded
from semdiag.questions.look.page import is_page_of, render_look
from semdiag.reporting.report import LOOK
from semdiag_models import InputError
from semdiag_models.reading import open_file

_TOKENS = 48  # shown at most: about 2 MB for 270 heads
_LARGEST = 2**25  # bytes of a page that is copied to the new report


def one_text_page(loaded: Sequence[LoadedModel], conditions: Conditions) -> str | None:
    """Run a language model on the first of its texts, and return the page that shows every head on it."""
    inputs = conditions.inputs
    if [model.source for model in loaded] != ["hugging face"] or inputs is None or inputs.suffix not in SUFFIXES:
        return None
    longest = min(conditions.texts.max_length or _TOKENS, _TOKENS)
    one = replace(
        conditions, samples=1, first=1, batch_size=1, k=(), plans=(),
        texts=replace(conditions.texts, max_length=longest),
    )  # fmt: skip
    try:
        seen = see_loaded(loaded[0], one)
    except InputError:  # it can be measured, but does not fit a page
        return None
    return render_look(
        seen, fitting_k(seen, None), f"semdiag look {loaded[0].path} --inputs {inputs} --max-length {longest}"
    )


def kept_page(report: Path) -> str | None:
    """Return the one-text page beside a report that is drawn again; None if there is none."""
    page = report / LOOK
    if not page.is_file() or page.stat().st_size > _LARGEST:
        return None
    with open_file(page) as file:
        text = file.read(_LARGEST).decode("utf-8", "replace")
    return text if is_page_of(None, text[:4096]) else None
