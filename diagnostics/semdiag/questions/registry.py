"""All questions, in the order of a report. A new one is a folder or a file beside this file, and a line here."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from semdiag.presenting.question import Question

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from semdiag.measuring.findings.findings import Findings
    from semdiag.measuring.probe import Probe

# A folder, whose ``__init__.py`` holds the record; or, of a question without a command, a file with its parts.
_PLACES: tuple[str | Question, ...] = (
    "dispersion",
    Question("heads", f"{__package__}.heads"),
    "separation",
    Question("learning", f"{__package__}.learning", external=False),
    "stability",
    "bounds",
    "mask_stability",
    "mask_precision",
    "k_sweep",
    "retrieval",
    "overlap",
    "look",
    "selections",
    "compare",
    "lipschitz",
    "landscape",
    "convergence",
)

_EACH = [
    place if isinstance(place, Question) else import_module(f"{__package__}.{place}").QUESTION for place in _PLACES
]
QUESTIONS: dict[str, Question] = {question.name: question for question in _EACH}


def probes() -> "list[Probe]":
    """Return what the questions measure beyond the tables of every forward pass."""
    return [question.probe for question in QUESTIONS.values() if question.probe is not None]


@cache
def reported() -> dict[str, Question]:
    """Return the questions that measurements answer, by name: each has its part of a report."""
    return {name: question for name, question in QUESTIONS.items() if question.answer is not None}


@cache
def figures() -> "dict[str, Callable[[Findings], Figure]]":
    """Return the figures of all questions by name."""
    headings = [
        heading for q in reported().values() for external in (False, True) for heading in q.headings_for(external)
    ]
    return {figure.name: figure for heading in reversed(headings) for figure in heading.figures}
