"""A section of a report: its headings, sentences, figures and tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from semdiag.capturing.attention_kinds import external
from semdiag.measuring.findings.finding import Finding
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.glance import Glance

Sentences = Callable[[Findings], list[str]]
Tables = Callable[[Findings, bool], Mapping[str, pd.DataFrame]]


@dataclass(frozen=True)
class Shown:
    """A figure in a section.

    Attributes:
        draw: makes the figure from findings; its name is the figure's.
        alt: what it shows, for readers who cannot see it; ``{shown}`` becomes its legend and panel titles.
        reading: two sentences: what to look at, and what it means.
    """

    draw: Callable[[Findings], Figure]
    alt: str
    reading: str

    @property
    def figure(self) -> str:
        """Return the figure's name, which its files also have."""
        return self.draw.__name__


@dataclass(frozen=True)
class Heading:
    """A heading in a section.

    Attributes:
        anchor: its identifier in the page.
        title: a question.
        figures: that answer it.
        caveats: what the answer does not cover.
    """

    anchor: str
    title: str
    figures: tuple[Shown, ...]
    caveats: tuple[str, ...]


def _nothing(findings: Findings) -> list[str]:
    return []


def _no_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    return {}


def _always(findings: Findings) -> bool:
    return True


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        name: of the command that measures it, if there is one.
        needs: tables of measurements of which at least one must have rows; empty: it needs none of its own.
        headings: with its figures.
        external: headings for external models, of which only the attention is known; empty: no section for them.
        measured: a further condition for the section.
        glance: its answer at a glance, a tile on the first screen; None: no tile.
        glanced: the anchor of the heading that the glance answers; empty: the first.
        in_short: its sentences for the first screen.
        details: its sentences by model and pair; None: none.
        verdicts: of the claims that it judges; None: none.
        tables: by file name without suffix, written as CSV; the second argument says whether the section is the
            report's only one.
    """

    name: str
    needs: tuple[str, ...]
    headings: tuple[Heading, ...]
    external: tuple[Heading, ...]
    measured: Callable[[Findings], bool] = _always
    glance: Callable[[Findings], Glance] | None = None
    glanced: str = ""
    in_short: Sentences = _nothing
    details: Sentences | None = None
    verdicts: Callable[[Findings], list[Finding]] | None = None
    tables: Tables = _no_tables

    def applicable_headings(self, findings: Findings) -> tuple[Heading, ...]:
        """Return the headings that apply to the measured models."""
        return self.external if external(findings.measurements.models).all() else self.headings

    def applies(self, findings: Findings) -> bool:
        """Return whether there is something to show."""
        tables = [getattr(findings.measurements, name) for name in self.needs]
        measured = not tables or any(len(table) for table in tables)
        return measured and bool(self.applicable_headings(findings)) and self.measured(findings)
