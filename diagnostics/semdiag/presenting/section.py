"""Old names for ``questions/k_sweep``, until it is converted; nothing else may import this file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.words import plain, span_words, text
from semdiag.presenting.answer import Answer as NewAnswer
from semdiag.presenting.answer import Glance, with_facts
from semdiag.presenting.answer import Heading as NewHeading
from semdiag.presenting.answer import Outcome as Answer
from semdiag.presenting.drawing.style import Drawing
from semdiag.presenting.tables import NEVER, Column, NumberTable, say_sentences, wide_console

__all__ = [
    "NEVER", "Answer", "Column", "Glance", "Heading", "NumberTable", "Section", "Shown", "plain", "say_sentences",
    "span_words", "text", "wide_console", "with_facts",
]  # fmt: skip


def Shown(draw: Callable[[Findings], Figure], alt: str, reading: str) -> Drawing:  # noqa: N802
    """Describe a figure."""
    return Drawing(draw, alt, reading)


def Heading(anchor: str, title: str, figures: tuple[Drawing, ...], caveats: tuple[str, ...]) -> NewHeading:  # noqa: N802
    """Describe a heading."""
    return NewHeading(anchor, title, figures, caveats)


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    name: str
    needs: tuple[str, ...]
    headings: tuple[NewHeading, ...]
    external: tuple[NewHeading, ...]
    glance: Callable[[Findings], Glance]
    in_short: Callable[[Findings], list[str]]
    details: Callable[[Findings], list[str]]
    tables: Callable[[Findings, bool], Mapping[str, pd.DataFrame]]

    def answer(self, findings: Findings) -> NewAnswer:
        """Return the section's sentences and tables as an answer."""
        parts: dict[str, Any] = {"glance": findings(self.glance), "headline": self.in_short(findings)}
        tables: dict[str, Any] = {
            "tables": self.tables(findings, False),
            "tables_alone": self.tables(findings, True),
        }
        return NewAnswer(**parts, details=self.details(findings), **tables)
