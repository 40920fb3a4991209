"""The contract of a question: what is asked, and where its parts stand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from semdiag.capturing.loading import LoadedModel
    from semdiag.measuring.findings.findings import Findings, Summary
    from semdiag.measuring.measure import Conditions
    from semdiag.measuring.plan import Plan
    from semdiag.presenting.answer import Answer, Heading

Place = Literal["screen", "theory", "details"]  # parts of a report: open, and two that a click opens
YOUR_MODEL = "Your model: from Hugging Face, or built by a function of yours"
QUANTITIES = "Attention, quantity by quantity"
TRAINING = "Training"
CHECKPOINTS = "Checkpoints"
PANELS = (YOUR_MODEL, QUANTITIES, TRAINING, CHECKPOINTS)  # groups of ``semdiag --help``, in this order
SAMPLING = ("queries", "max_queries")  # shared options of questions that work on drawn queries


class Request(Protocol):
    """What the user typed, for commands that do more than measure and show."""

    values: dict[str, Any]  # shared options by name; those that the command does not take are absent
    typed: frozenset[str]  # names of options, shared or the command's own, that differ from their defaults
    folder: Any  # of the page; None until the models are known

    def conditions(self, keep_queries: bool = False, **more: Any) -> "Conditions":
        """Return the conditions for measuring; ``more`` are fields that the command sets."""

    def measured(
        self, models: Sequence[Path] | None, conditions: "Conditions", *how: Any, **more: Any
    ) -> "tuple[Findings, Sequence[LoadedModel]]":
        """Load and measure what the user named, with progress."""

    def deliver(self, findings: "Findings", sections: Sequence[str] | None = None) -> None:
        """Write the page, print answer and tables, and the object of ``--json``."""


@dataclass(frozen=True, eq=False)
class Question:
    """A question that semdiag answers. Its parts are found by their names, in its folder's files or its one file.

    Its plan measures it, ``answer.answer`` answers it, ``HEADINGS`` and ``EXTERNAL``, in ``figures`` or in
    ``answer``, are its part of a page: for encoders, and for external models if they have one of their own.
    """

    name: str  # of its command, its JSON and its part of a page
    package: str  # the folder or file, as a dotted name
    help: str = ""  # of its command; empty: it has none
    plan: type | None = None  # a dataclass whose fields are options of the command; a Plan if it is measured
    ask: Callable[..., None] | None = None  # a command of its own; None: measure the models and show the answer
    takes: tuple[str, ...] = ()  # shared options that only some commands take
    leave_out: tuple[str, ...] = ("per_query",)  # shared options that it does not take
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of shared options, that are not the usual ones
    conditions: Mapping[str, Any] = field(default_factory=dict)  # of the measurement, that are no options
    needs: tuple[str, ...] = ()  # tables of which one must have rows for an answer
    report_plan: "type[Plan] | None" = None  # what a report measures for it, where the command has no plan
    external: bool = True  # whether it is asked of external models, of which only the attention is known
    tile_anchor: str = ""  # the anchor of the heading that the glance answers; empty: the first
    place: Place = "details"  # the part of a report in which it stands
    leads: int = 0  # its rank among those that lead a report about external models alone; 0: it follows them
    panel: str = QUANTITIES  # the group of ``semdiag --help`` that lists its command
    pictured: bool = False  # whether its command draws figures without being asked

    def _part(self, file: str, name: str) -> Any:
        home = import_module(self.package)
        if not hasattr(home, "__path__"):
            return getattr(home, name, None)
        place = f"{self.package}.{file}"
        if file == "figures" and not find_spec(place):  # few figures stand beside the answer
            place = f"{self.package}.answer"
        return getattr(import_module(place), name, None) if find_spec(place) else None

    @cached_property
    def answer(self) -> "Callable[[Findings], Answer | None] | None":
        """Return the function that answers it; None if it is asked of files, or of one text."""
        answer: Callable[[Findings], Answer | None] | None = self._part("answer", "answer")
        return answer

    @cached_property
    def headings(self) -> "tuple[Heading, ...]":
        """Return its headings on a page."""
        return self._part("figures", "HEADINGS") or ()

    def headings_for(self, external: bool) -> "tuple[Heading, ...]":
        """Return its headings on a page about encoders, or about external models alone."""
        if external and self.external:
            return self._part("figures", "EXTERNAL") or self.headings
        return () if external else self.headings

    def answered(self, findings: "Findings") -> "Answer":
        """Return its answer, which is computed once."""
        from semdiag.presenting.answer import Answer

        return (findings(self.answer) if self.answer else None) or Answer()

    def applies(self, findings: "Findings") -> bool:
        """Return whether there is something to show on a page."""
        from semdiag.capturing.attention_call import external

        measured = not self.needs or any(name in findings.measurements for name in self.needs)
        if not measured or self.answer is None:
            return False
        headings = self.headings_for(bool(external(findings.measurements.models).all()))
        return bool(headings) and findings(self.answer) is not None

    def json(self, findings: "Findings") -> "Summary":
        """Return the object that its command prints with ``--json``."""
        from semdiag.presenting.answer import as_json

        return as_json(self.name, findings, self.answered(findings))
