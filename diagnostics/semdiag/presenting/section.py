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
        reading: two sentences: what to look at, what it means.
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
        needs: tables of measurements, at least one of which must have rows; none if it needs no table of its own.
        headings: with its figures.
        external: headings for external models, of which only the attention is known; none if they have no such
            section.
        measured: a further condition.
        glance: its answer at a glance, for the first screen; None means no tile there.
        glanced: the anchor of the heading that it answers; empty means the first.
        in_short: its sentences for the first screen.
        details: its sentences by model and pair; None if it has none.
        verdicts: of the claims that it judges; None if it judges none.
        tables: by file name without suffix, to write as CSV; the second argument says whether the section is the
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

    def asked(self, findings: Findings) -> tuple[Heading, ...]:
        """Return the headings that apply to the measured models."""
        return self.external if external(findings.measurements.models).all() else self.headings

    def applies(self, findings: Findings) -> bool:
        """Return whether there is something to show."""
        tables = [getattr(findings.measurements, name) for name in self.needs]
        some = not tables or any(len(table) for table in tables)
        return some and bool(self.asked(findings)) and self.measured(findings)
