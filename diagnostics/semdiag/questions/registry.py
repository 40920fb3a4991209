"""All questions, in the order of a report. A new one is a folder beside this file and a line here."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from semdiag.presenting.question import Question

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from semdiag.measuring.findings.findings import Findings, Summary
    from semdiag.measuring.probe import Probe
    from semdiag.presenting.section import Section

_FOLDERS = (
    "dispersion",
    "heads",
    "counterfactual",
    "separation",
    "learning",
    "stability",
    "bounds",
    "mask_stability",
    "mask_precision",
    "k_sweep",
    "overlap",
    "look",
    "selections",
    "compare",
    "lipschitz",
    "landscape",
    "convergence",
)

_EACH: tuple[Question, ...] = tuple(import_module(f"semdiag.questions.{folder}").QUESTION for folder in _FOLDERS)
QUESTIONS: dict[str, Question] = {question.name: question for question in _EACH}


def probes() -> "list[Probe]":
    """Return what the questions measure beyond the tables of every forward pass."""
    return [question.probe for question in QUESTIONS.values() if question.probe is not None]


@cache
def all_sections() -> "dict[str, Section]":
    """Return the sections of a report by name."""
    return {name: question.section for name, question in QUESTIONS.items() if question.section is not None}


@cache
def figures() -> "dict[str, Callable[[Findings], Figure]]":
    """Return the figures of all sections by name."""
    headings = [heading for s in all_sections().values() for heading in (*s.headings, *s.external)]
    return {shown.figure: shown.draw for heading in headings for shown in heading.figures}


@cache
def summaries() -> "dict[str, Callable[[Findings], Summary]]":
    """Return what prints the JSON of each command, by name."""
    return {name: question.summary for name, question in QUESTIONS.items() if question.summary is not None}
