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
    """A figure in a section."""

    draw: Callable[[Findings], Figure]  # makes the figure from findings; its name is the figure's
    alt: str  # what it shows, for readers who cannot see it; ``{shown}`` becomes its legend and panel titles
    reading: str  # two sentences: what to look at, and what it means

    @property
    def figure(self) -> str:
        """Return the figure's name, which its files also have."""
        return self.draw.__name__


@dataclass(frozen=True)
class Heading:
    """A heading in a section."""

    anchor: str  # its identifier in the page
    title: str  # a question
    figures: tuple[Shown, ...]  # that answer it
    caveats: tuple[str, ...]  # what the answer does not cover


def _nothing(findings: Findings) -> list[str]:
    return []


def _no_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    return {}


def _always(findings: Findings) -> bool:
    return True


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    name: str  # of the command that measures it, if there is one
    needs: tuple[str, ...]  # tables of measurements of which at least one must have rows
    headings: tuple[Heading, ...]  # with its figures
    external: tuple[Heading, ...]  # headings for external models, of which only the attention is known
    measured: Callable[[Findings], bool] = _always  # a further condition for the section
    glance: Callable[[Findings], Glance] | None = None  # its answer at a glance, a tile on the first screen
    glanced: str = ""  # the anchor of the heading that the glance answers; empty: the first
    in_short: Sentences = _nothing  # its sentences for the first screen
    details: Sentences | None = None  # its sentences by model and pair; None: none
    verdicts: Callable[[Findings], list[Finding]] | None = None  # of the claims that it judges; None: none
    tables: Tables = _no_tables  # by file name without suffix, written as CSV

    def applicable_headings(self, findings: Findings) -> tuple[Heading, ...]:
        """Return the headings that apply to the measured models."""
        return self.external if external(findings.measurements.models).all() else self.headings

    def applies(self, findings: Findings) -> bool:
        """Return whether there is something to show."""
        tables = [getattr(findings.measurements, name) for name in self.needs]
        measured = not tables or any(len(table) for table in tables)
        return measured and bool(self.applicable_headings(findings)) and self.measured(findings)
