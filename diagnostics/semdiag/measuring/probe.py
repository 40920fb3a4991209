"""Probes and their subjects; percentiles of tables, and rows without a size limit as totals and a sample."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeVar

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Remark
from semdiag.capturing.batches import Batch, first_samples
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring import PROBE_SOURCES
from semdiag.measuring.row_sample import SKETCHES
from semdiag.measuring.table import CALLS, HEADS, REMARKS, SKIPPED, Table
from semdiag.measuring.training_runs import RUNS
from semdiag_files import InputError

P = TypeVar("P")


class Watcher(Protocol):
    """Looks on while a model makes its clean pass, so that a probe need not repeat the pass."""

    def watched(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return the context of the pass, for the module that runs."""

    def start(self, samples: int) -> None:
        """Start a batch of this many samples."""

    def add(self, call: AttentionCall) -> None:
        """Observe a call while its tensors are alive."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under survey, as probes see it."""

    model: LoadedModel  # model to measure
    batches: list[Batch]  # inputs of the model
    labels: Tensor | None  # (N,) classes; None if unknown
    seed: int  # random seed for all draws
    batch_size: int  # samples at a time
    device: torch.device  # device on which to run
    dtype: torch.dtype  # dtype in which the model runs and scores are computed
    queries: int | None = None  # number drawn per sample and head; None means all
    few: int | None = None  # number of samples for costly probes; None means all
    after_point: Callable[[int], None] = lambda points: None  # called with the number of finished steps
    expect: Callable[[int], None] = lambda steps: None  # called with the number of steps that becomes known later
    missing: dict[str, Remark] = field(default_factory=dict)  # reason why something is not available, by its name
    said: list[Remark] = field(default_factory=list)  # other remarks on how the model was measured
    watchers: dict[str, Watcher] = field(default_factory=dict)  # observer of the clean pass by name of its probe

    def note(self, name: str, why: str, where: str = "") -> None:
        """Note that something is not available for this model."""
        what = f"{name} of {where}" if where else name
        code = f"no-{name.lower().replace(' ', '-')}{'-there' * bool(where)}"
        self.missing[what] = Remark("", f"{what} not available, because {why}", code)

    def remark(self, text: str, code: str) -> None:
        """Note something about how this model was measured."""
        self.said.append(Remark("", text, code))

    def watch(self, probe: "Probe", plan: Any, prepared: Any) -> None:
        """Let a probe observe the clean pass that follows, if it would make the same one."""
        if (watcher := probe.watch(self, plan, prepared)) is not None:
            self.watchers[probe.name] = watcher

    @property
    def remarks(self) -> pd.DataFrame:
        """Table ``remarks``: what is not available for this model, and further notes."""
        every = [*self.missing.values(), *self.said]
        return REMARKS.of_rows({"model": self.model.path, **each.to_dict(), "times": 1} for each in every)

    @property
    def tokens(self) -> Tensor:
        """Tokens (N, L), int64, of an encoder of semdiag_models."""
        return torch.cat([batch for batch in self.batches if isinstance(batch, Tensor)])

    @property
    def first(self) -> tuple[list[Batch] | Tensor, Tensor | None]:
        """Few inputs for costly probes, and their labels."""
        labels = None if self.labels is None else self.labels[: self.few]
        if self.model.external:
            return (list(first_samples(self.batches, self.few)) if self.few else self.batches), labels
        return self.tokens[: self.few], labels


@dataclass(frozen=True)
class ReportOptions:
    """Options of ``semdiag report`` that concern probes."""

    noise: tuple[float, ...]  # levels of noise
    seed: int  # random seed for all draws
    k: int | None = None  # smallest k that was requested; None means none
    thorough: bool = False  # whether minutes per model may be spent
    rerun_seconds: float | None = None  # for running an external model with masks; None means the default
    lengths: tuple[int, ...] = ()  # of the pieces on which an external model is run with masks, too


def _none(*known: Any) -> Any:
    return {}


@dataclass(frozen=True)
class Probe:
    """A measurement that belongs to a question, whose record names it."""

    name: str  # name in messages
    plan: type  # frozen dataclass of its options; a survey finds the probe by the type of a plan
    tables: tuple[Table, ...]  # tables that it makes
    measure: Callable[[Subject, Any, Any], Mapping[str, pd.DataFrame]]  # of a plan, and what ``prepare`` returned
    # makes an observer of the clean pass from the arguments of ``measure``; None for no observer
    watch: Callable[[Subject, Any, Any], Watcher | None] = lambda subject, plan, prepared: None
    prepare: Callable[[Any, Any], Any] = _none
    check: Callable[[LoadedModel, Any, Any], object] = _none
    steps: Callable[[Any], int] = lambda plan: 0  # for one encoder, from the plan, for the progress bar
    # what to record, from the plan, the largest number of samples of a model, and the number of few
    provenance: Callable[[Any, int, int], dict[str, Any]] = _none
    draws: bool = False  # whether it works on drawn queries; other probes need every query
    reported: Callable[[ReportOptions], Any] = lambda options: None  # plan that ``semdiag report`` measures


def plan_of(kind: type[P], plan: P | None) -> P:
    """Return the plan of a probe, or its default plan for None."""
    if plan is not None and not isinstance(plan, kind):
        raise InputError(f"The plan must be a {kind.__name__}. Got {plan!r}.")
    return kind() if plan is None else plan


@cache
def probes() -> dict[type, Probe]:
    """Return the probe of every plan, in the order of the questions."""
    return {probe.plan: probe for source in PROBE_SOURCES for probe in source()}


EVERYWHERE = (CALLS, HEADS, REMARKS, SKIPPED, SKETCHES)  # tables of every forward pass, whatever is asked


@cache
def optional_tables() -> dict[str, Table]:
    """Return the declared tables by name: those of every forward pass, of probes, and of training runs."""
    probed = [table for probe in probes().values() for table in probe.tables]
    return {table.name: table for table in (*EVERYWHERE, *probed, RUNS)}
