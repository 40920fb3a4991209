"""Probes: measurements of a model beyond the attention of a clean forward pass."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Remark
from semdiag.capturing.batches import Batch, first_samples
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.table import Table
from semdiag.measuring.tables import REMARKS
from semdiag_models import InputError

P = TypeVar("P")


class Watcher(Protocol):
    """Looks on while a model makes its clean pass, so that a probe need not make the same pass again."""

    def watched(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return the context of the pass, from what runs."""

    def start(self, samples: int) -> None:
        """Start a batch with so many samples."""

    def add(self, call: AttentionCall) -> None:
        """Look at a call while its tensors are alive."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under survey, as probes see it."""

    model: LoadedModel  # loaded
    batches: list[Batch]  # its inputs
    labels: Tensor | None  # (N,) classes; None if unknown
    seed: int  # of all draws
    batch_size: int  # samples at a time
    device: torch.device  # where to run
    dtype: torch.dtype  # of the model and of its scores
    queries: int | None = None  # number drawn per sample and head; None means all
    few: int | None = None  # number of samples for costly probes; None means all
    after_point: Callable[[int], None] = lambda points: None  # called with the number of finished steps
    # called with the number of steps, if it becomes known only while measuring
    expect: Callable[[int], None] = lambda steps: None
    missing: dict[str, Remark] = field(default_factory=dict)  # by name, why something is not available
    said: list[Remark] = field(default_factory=list)  # other remarks on how the model was measured; probes fill it
    # by name of a probe, what looked on for it during the clean pass
    watchers: dict[str, Watcher] = field(default_factory=dict)

    def note(self, name: str, why: str, where: str = "") -> None:
        """Note that something is not available for this model."""
        what = f"{name} of {where}" if where else name
        code = f"no-{name.lower().replace(' ', '-')}{'-there' * bool(where)}"
        self.missing[what] = Remark("", f"{what} not available, because {why}", code)

    def remark(self, text: str, code: str) -> None:
        """Note something about how this model was measured."""
        self.said.append(Remark("", text, code))

    def watch(self, probe: "Probe", plan: Any, prepared: Any) -> None:
        """Let a probe look on during the clean pass that follows, if it would make the same one."""
        if (watcher := probe.watch(self, plan, prepared)) is not None:
            self.watchers[probe.name] = watcher

    @property
    def remarks(self) -> pd.DataFrame:
        """The table ``remarks``: what is not available for this model, and further notes."""
        every = [*self.missing.values(), *self.said]
        return REMARKS.of_rows({"model": self.model.path, **each.to_dict(), "times": 1} for each in every)

    @property
    def tokens(self) -> Tensor:
        """(N, L) int64, for an encoder of semdiag_models."""
        return torch.cat([batch for batch in self.batches if isinstance(batch, Tensor)])

    @property
    def first(self) -> tuple[list[Batch] | Tensor, Tensor | None]:
        """The few inputs for costly probes, and their labels."""
        labels = None if self.labels is None else self.labels[: self.few]
        if self.model.external:
            return (list(first_samples(self.batches, self.few)) if self.few else self.batches), labels
        return self.tokens[: self.few], labels


@dataclass(frozen=True)
class ReportOptions:
    """Options of ``semdiag report`` that concern probes."""

    noise: tuple[float, ...]  # levels
    seed: int  # of whatever is drawn
    k: int | None = None  # the smallest requested; None means none
    thorough: bool = False  # whether minutes per model may be spent
    rerun_seconds: float | None = None  # for running an external model with masks; None means the default


def _none(*known: Any) -> Any:
    return {}


@dataclass(frozen=True)
class Probe:
    """A measurement that belongs to a question, whose record names it."""

    name: str  # in words, for messages
    plan: type  # the frozen dataclass of its options; a survey finds the probe by the type of a plan
    tables: tuple[Table, ...]  # that it makes
    # makes tables by name from subject, plan and the result of ``prepare``
    measure: Callable[[Subject, Any, Any], Mapping[str, pd.DataFrame]]
    # what looks on during the clean pass, from what ``measure`` is given; None: nothing does
    watch: Callable[[Subject, Any, Any], Watcher | None] = lambda subject, plan, prepared: None
    prepare: Callable[[Any, Any], Any] = _none
    check: Callable[[LoadedModel, Any, Any], object] = _none
    # number of steps for one encoder, from the plan, for the progress bar
    steps: Callable[[Any], int] = lambda plan: 0
    # what to record, from the plan, the largest number of samples of a model, and the number of few
    provenance: Callable[[Any, int, int], dict[str, Any]] = _none
    draws: bool = False  # whether it works on drawn queries; others need every query
    reported: Callable[[ReportOptions], Any] = lambda options: None  # the plan that ``semdiag report`` measures


def plan_of(kind: type[P], plan: P | None) -> P:
    """Return the plan of a probe, or its default plan for None."""
    if plan is None:
        return kind()
    if not isinstance(plan, kind):
        raise InputError(f"The plan must be a {kind.__name__}. Got {plan!r}.")
    return plan
