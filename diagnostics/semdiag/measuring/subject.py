"""A model under survey, and observers of its clean pass."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Remark
from semdiag.capturing.batches import Batch, first_samples
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.plan import Plan
from semdiag.measuring.progress import SurveyProgress
from semdiag.measuring.table import REMARKS


class Watcher(Protocol):
    """Looks on while a model makes its clean pass, so that a plan need not repeat the pass."""

    def watched(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return the context of the pass, for the module that runs."""

    def start(self, samples: int) -> None:
        """Start a batch of this many samples."""

    def add(self, call: AttentionCall) -> None:
        """Observe a call while its tensors are alive."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under survey, as plans see it."""

    model: LoadedModel  # model to measure
    batches: list[Batch]  # inputs of the model
    labels: Tensor | None  # (N,) classes; None if unknown
    seed: int  # random seed for all draws
    batch_size: int  # samples at a time
    device: torch.device  # device on which to run
    dtype: torch.dtype  # dtype in which the model runs and scores are computed
    queries: int | None = None  # number drawn per sample and head; None means all
    probe_samples: int | None = None  # number of samples for costly measurements; None means all
    min_keys: int = 1  # smallest number of keys of a query that counts
    progress: SurveyProgress = field(default_factory=SurveyProgress)  # told of finished steps
    unavailable: dict[str, Remark] = field(default_factory=dict)  # why something cannot be measured, by its name
    notes: list[Remark] = field(default_factory=list)  # other remarks on how the model was measured
    early: dict[str, Any] = field(default_factory=dict)  # what plans measured before the clean pass, by name
    unfinished: Path | None = None  # folder for parts that are finished; None: nothing is kept
    watchers: dict[str, Watcher] = field(default_factory=dict)  # observer of the clean pass by name of its plan

    def note(self, name: str, why: str, where: str = "") -> None:
        """Note that something is not available for this model, or somewhere in it."""
        subject = f"{name} of {where}" if where else name
        code = f"no-{name.lower().replace(' ', '-')}"
        if where:
            code = f"{code}-there"
        self.unavailable[subject] = Remark("", f"{subject} not available, because {why}", code)

    def remark(self, text: str, code: str) -> None:
        """Note something about how this model was measured."""
        self.notes.append(Remark("", text, code))

    def watch(self, plan: Plan) -> None:
        """Let a plan observe the clean pass that follows, if it would make the same one."""
        watcher = plan.watch(self)
        if watcher is not None:
            self.watchers[plan.name] = watcher

    @property
    def remarks(self) -> pd.DataFrame:
        """Table ``remarks``: what is not available for this model, and further notes."""
        remarks = [*self.unavailable.values(), *self.notes]
        return REMARKS.of_rows({"model": self.model.path, **each.to_dict(), "times": 1} for each in remarks)

    @property
    def tokens(self) -> Tensor:
        """Tokens (N, L), int64, of an encoder of semdiag_models."""
        return torch.cat([batch for batch in self.batches if isinstance(batch, Tensor)])

    @property
    def first(self) -> tuple[list[Batch] | Tensor, Tensor | None]:
        """Inputs for costly measurements, and their labels."""
        labels = None if self.labels is None else self.labels[: self.probe_samples]
        if not self.model.external:
            return self.tokens[: self.probe_samples], labels
        if self.probe_samples is None:
            return self.batches, labels
        return list(first_samples(self.batches, self.probe_samples)), labels
