"""An answer at a glance: a word, a number with its denominator, and what it counts."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.estimates import drawn
from semdiag.measuring.findings.findings import Findings


class Answer(StrEnum):
    """The kinds of answers to a question of a report."""

    HOLDS = "holds"
    DOES_NOT = "does not hold"
    OPEN = "cannot tell"
    PLAUSIBLE = "plausible"  # sparse attention suffices
    COSTS = "not without loss"  # sparse attention does not suffice
    CHANGES = "not without change"  # the same for outputs without a known loss
    MEASURED = "measured"  # the question has no yes or no


@dataclass(frozen=True)
class Glance:
    """An answer at a glance."""

    answer: Answer  # in a word
    number: str  # with its denominator, like ``3 of 3 pairs``; empty if there is none
    words: str  # what the number counts
    # whether the answer is about a claim of the paper, and so says nothing good or bad about a model
    claim: bool = False

    def to_dict(self) -> dict[str, str | bool]:
        """Return plain values."""
        return {**asdict(self), "answer": self.answer.value}


def measured_glance(*tables: str) -> Callable[[Findings], Glance]:
    """Return the glance of a question without a single number: how many models were measured."""

    def glance(findings: Findings) -> Glance:
        measurements = findings.measurements
        models = {model for name in tables for model in getattr(measurements, name)["model"]}
        return Glance(
            Answer.MEASURED, f"{len(models)} of {counted(len(measurements.models), 'model')}", "measured"
        )

    return glance


def drawn_word(findings: Findings) -> str:
    """Return `` drawn`` if only some queries were measured, else nothing."""
    return " drawn" if drawn(findings) else ""


def top_words(findings: Findings) -> str:
    """Return ``top-5`` where all models that keep their largest scores keep as many of them, else ``top-k``."""
    models = findings.measurements.models
    ks = models[models["attention"] == "topk"]["k"].dropna().unique()
    return f"top-{int(ks[0])}" if len(ks) == 1 else "top-k"


def count_of(some: int, every: int, thing: str) -> str:
    """Return a count with its denominator, like ``3 of 4 pairs``."""
    return f"{some:,} of {every:,} {thing}{'s' * (every != 1)}"


def span_words(values: list[float], form: str | Callable[[float], str]) -> str:
    """Return one number, or the range of several, all finite."""
    words_of = form.format if isinstance(form, str) else form
    low, high = (re.sub("^-", "−", words_of(end)) for end in (min(values), max(values)))
    signed = any(end.startswith(("−", "<", ">")) for end in (low, high))  # −3 to 98, 85 to > 99.9
    return low if low == high else f"{low} to {high}" if signed else f"{low}–{high}"
