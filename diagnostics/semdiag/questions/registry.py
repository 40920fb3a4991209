"""All questions, in the order of a report. A new one is a folder or a file beside this file, and a line here."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from semdiag.measuring.plan import Plan
from semdiag.presenting.question import Question

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from semdiag.measuring.findings.findings import Findings
    from semdiag.measuring.table import Table

# A folder, whose ``__init__.py`` holds the record; or, of a question without a command, a file with its parts.
_PLACES: tuple[str | Question, ...] = (
    "dispersion",
    Question("heads", f"{__package__}.heads", place="screen", leads=3),
    "separation",
    Question("learning", f"{__package__}.learning", external=False, place="screen"),
    "stability",
    "bounds",
    "mask_stability",
    "mask_precision",
    "k_sweep",
    "retrieval",
    "indexer",
    "overlap",
    "look",
    "compare",
    "selections",
    "lipschitz",
    "landscape",
    "convergence",
)

_EACH = [
    place if isinstance(place, Question) else import_module(f"{__package__}.{place}").QUESTION for place in _PLACES
]
QUESTIONS: dict[str, Question] = {question.name: question for question in _EACH}


def plans() -> list[type[Plan]]:
    """Return the plans of all questions: what they measure beyond the tables of every forward pass."""
    listed = [plan for question in QUESTIONS.values() for plan in (question.plan, question.report_plan)]
    return [plan for plan in listed if plan is not None and issubclass(plan, Plan)]


def tables() -> "dict[str, Table]":
    """Return the declared tables by name: those of every forward pass, of plans, and of training runs."""
    from semdiag.measuring.measurements import EVERYWHERE
    from semdiag.measuring.training_runs import RUNS

    planned = [table for plan in plans() for table in plan.tables()]
    return {table.name: table for table in (*EVERYWHERE, *planned, RUNS)}


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
