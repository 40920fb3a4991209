"""Findings: claims of the theory about a measured model or pair, with verdicts and the numbers behind them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from semdiag.measuring.findings.number_words import number_words


class Verdict(StrEnum):
    """What the measurements say about a claim."""

    HOLDS = "holds"
    VIOLATED = "violated"
    VACUOUS = "vacuous"  # true of every row, whatever the model: says nothing
    NOT_MET = "assumption not met"
    NOTHING = "nothing conclusive"


@dataclass(frozen=True)
class Finding:
    """One claim and its verdict."""

    subject: str  # a model's path, or a pair's label
    claim: str  # in words
    form: str  # ``sound`` or ``paper``; empty if the claim has only one
    where: str  # ``all``, a percentile (``p95``), a layer (``layer 2``) or a tensor's name
    verdict: Verdict  # one word
    numbers: Mapping[str, float] = field(default_factory=dict)  # the deciding numbers, by name
    note: str = ""  # a further remark for readers; may be empty
    percentile: int | None = None  # at which the claim was judged; None if it was not judged at a percentile

    def __str__(self) -> str:
        words_of = {name: number_words(value, "{:.4g}".format) for name, value in self.numbers.items()}
        numbers = ", ".join(f"{name} = {words}" for name, words in words_of.items())
        head = f"{self.verdict}: {self.claim}" + (f" [{self.form}]" if self.form else "")
        where = "" if self.where == "all" else f", {self.where}"
        return f"{head}{where}" + (f" ({numbers})" if numbers else "") + (f"; {self.note}" if self.note else "")


def of_rows(holds: int, violated: int, vacuous: int, not_met: int) -> Verdict:
    """Return the verdict on a claim about many rows: violated if any row violates it, else that of most rows."""
    if violated:
        return Verdict.VIOLATED
    counts = {Verdict.HOLDS: holds, Verdict.VACUOUS: vacuous, Verdict.NOT_MET: not_met}
    return max(counts, key=lambda word: counts[word]) if any(counts.values()) else Verdict.NOTHING


def agreed(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict that all have in common; inconclusive if they differ or there are none."""
    words = set(verdicts)
    return words.pop() if len(words) == 1 else Verdict.NOTHING


def log10(natural: float) -> float:
    """Return the decimal logarithm for a natural one."""
    return natural / math.log(10)


def verdicts_of(judged: Iterable[Finding], subject: str) -> list[dict[str, Any]]:
    """Return the findings about a model or pair as plain values."""
    return [
        {
            "claim": f.claim,
            "form": f.form,
            "where": f.where,
            "verdict": f.verdict.value,
            "numbers": {name: float(value) for name, value in f.numbers.items()},
            "note": f.note,
        }
        for f in judged
        if f.subject == subject
    ]
