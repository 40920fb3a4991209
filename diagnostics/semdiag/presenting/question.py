"""A question: one folder, one record, one line in the registry."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from semdiag.capturing.loading import LoadedModel
    from semdiag.measuring.conditions import Conditions
    from semdiag.measuring.findings.findings import Findings
    from semdiag.measuring.findings.strict_json import Summary
    from semdiag.measuring.probe import Probe
    from semdiag.presenting.section import Section

ANSWERS = 5  # sentences of an answer, at most, on the terminal


class Shared(Protocol):
    """The values of the options that the measuring commands share."""

    values: dict[str, Any]  # by name; options that the command does not take are absent
    typed: frozenset[str]  # names of options, shared or the command's own, that differ from their defaults

    def conditions(self, keep_queries: bool = False, **more: Any) -> "Conditions":
        """Return the conditions for measuring; ``more`` are fields that the command sets."""

    def measured(
        self,
        models: Sequence[Path] | None,
        conditions: "Conditions",
        run: Callable[..., Any] | None = None,
        more_stages: int = 0,
        against: Path | None = None,
        then: "Callable[[Sequence[LoadedModel]], object]" = lambda loaded: None,
    ) -> "Findings":
        """Measure what the user named, with progress; ``then`` is called with the loaded models."""

    def deliver(
        self,
        command: str,
        findings: "Findings",
        show: Callable[["Findings"], None],
        sections: Sequence[str] | None = None,
        answered: bool = False,
    ) -> None:
        """Write the page, print answer and tables, and the summary with ``--json``."""


@dataclass(frozen=True)
class Command:
    """A command that measures: its own options, and which of the shared ones it takes."""

    run: Callable[..., None]  # called with its own options and ``shared``, a :class:`Shared`
    leave_out: tuple[str, ...] = ("per_query",)  # shared options that it does not take
    sampling: bool = False  # whether it takes the options that draw queries
    defaults: dict[str, Any] = field(default_factory=dict)  # of shared options that differ from the usual ones


def command(
    leave_out: Sequence[str] = ("per_query",), *, sampling: bool = False, **defaults: Any
) -> Callable[[Callable[..., None]], Command]:
    """Turn a function with a keyword ``shared`` into a command; arguments as in :class:`Command`."""
    return lambda run: Command(run, tuple(leave_out), sampling, defaults)


@dataclass(frozen=True)
class Question:
    """A question that semdiag answers."""

    name: str  # of its command, its summary and its section of a report
    package: str  # the folder, as a dotted name
    measured_by: str = ""  # a :class:`~semdiag.measuring.probe.Probe`
    summarised_by: str = ""  # a function of findings that returns what ``--json`` prints
    shown_by: str = ""  # a :class:`~semdiag.presenting.section.Section` of the report
    asked_by: str = ""  # a :class:`Command`

    def _part(self, where: str) -> Any:
        module, _, attribute = where.partition(":")
        return getattr(import_module(f"{self.package}.{module}"), attribute) if where else None

    @cached_property
    def probe(self) -> "Probe | None":
        """Return its probe; None if it needs no measurement of its own."""
        part: Probe | None = self._part(self.measured_by)
        return part

    @cached_property
    def summary(self) -> "Callable[[Findings], Summary] | None":
        """Return the function that makes what ``--json`` prints."""
        part: Callable[[Findings], Summary] | None = self._part(self.summarised_by)
        return part

    @cached_property
    def section(self) -> "Section | None":
        """Return its section of a report."""
        part: Section | None = self._part(self.shown_by)
        return part

    @cached_property
    def command(self) -> Command | None:
        """Return its command."""
        part: Command | None = self._part(self.asked_by)
        return part
