"""What a probe is: something that can be measured of a model besides the attention of a clean forward pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.audit import Remark
from semdiag.capturing.batches import Batch, first_samples
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.table import Table
from semdiag.measuring.tables import REMARKS
from semdiag_models import InputError

P = TypeVar("P")


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under survey, as probes see it.

    Attributes:
        model: loaded; :attr:`~semdiag.capturing.loading.LoadedModel.external` if only its attention is known.
        batches: its inputs.
        labels: (N,) classes; None if unknown.
        seed: of whatever is drawn.
        batch_size: samples at a time.
        device: where to run.
        dtype: of the model and of its scores.
        queries: drawn per sample and head; None: all are looked at.
        few: of the inputs those that costly probes use; None: all.
        after_point: called with the number of finished steps.
        expect: called with the number of steps, where that turns out while measuring.
        missing: why what is not available, by name; probes fill it.
        said: what else is to be known of how the model was measured; probes fill it.
    """

    model: LoadedModel
    batches: list[Batch]
    labels: Tensor | None
    seed: int
    batch_size: int
    device: torch.device
    dtype: torch.dtype
    queries: int | None = None
    few: int | None = None
    after_point: Callable[[int], None] = lambda points: None
    expect: Callable[[int], None] = lambda steps: None
    missing: dict[str, Remark] = field(default_factory=dict)
    said: list[Remark] = field(default_factory=list)

    def note(self, name: str, why: str, where: str = "") -> None:
        """Say what is not available of this model.

        Args:
            name: of what is not; the remark's code is ``no-NAME``.
            why: ends a sentence: "not available, because …".
            where: it is not; the code is then ``no-NAME-there``. Empty: nowhere.
        """
        what = f"{name} of {where}" if where else name
        code = f"no-{name.lower().replace(' ', '-')}{'-there' * bool(where)}"
        self.missing[what] = Remark("", f"{what} not available, because {why}", code)

    def remark(self, text: str, code: str) -> None:
        """Say what is to be known of how this model was measured.

        Args:
            text: a sentence without its end.
            code: of the remark.
        """
        self.said.append(Remark("", text, code))

    @property
    def remarks(self) -> pd.DataFrame:
        """The table ``remarks`` of what is not available of this model, and what else is to be known."""
        every = [*self.missing.values(), *self.said]
        return REMARKS.of_rows({"model": self.model.path, **each.to_dict(), "times": 1} for each in every)

    @property
    def tokens(self) -> Tensor:
        """(N, L) int64, of an encoder of semdiag_models."""
        return torch.cat([batch for batch in self.batches if isinstance(batch, Tensor)])

    @property
    def first(self) -> tuple[list[Batch] | Tensor, Tensor | None]:
        """The few inputs, and their labels."""
        labels = None if self.labels is None else self.labels[: self.few]
        if self.model.external:
            return (list(first_samples(self.batches, self.few)) if self.few else self.batches), labels
        return self.tokens[: self.few], labels


@dataclass(frozen=True)
class ReportOptions:
    """What ``semdiag report`` was asked, as far as it concerns what is measured besides the clean pass."""

    noise: tuple[float, ...]  # levels
    seed: int  # of whatever is drawn
    k: int | None = None  # the smallest that was asked for; None: none
    thorough: bool = False  # whether minutes per model may be spent
    rerun_seconds: float | None = None  # that a model from elsewhere may be run with masks


def _none(*known: Any) -> Any:
    return {}


@dataclass(frozen=True)
class Probe:
    """A probe. It belongs to a question, whose record names it.

    Attributes:
        name: in words, for messages.
        plan: the frozen dataclass that says what is asked of it; a survey finds the probe by the type of a plan.
        tables: that it makes.
        measure: from subject, plan and what ``prepare`` made to tables by name. What cannot be measured of a model
            is noted with :meth:`Subject.note`, or a
            :class:`~semdiag.measuring.calls.scored_rows.NotAvailableError` is raised.
        prepare: what must be there before the first model is measured, from plan and conditions, so that a wrong
            path does not cost minutes.
        check: raises an :class:`~semdiag_models.InputError` if a model is none of which the plan can be measured,
            from model, plan and what ``prepare`` made; called likewise before the first model is measured.
        steps: of one encoder, from the plan, for the progress bar.
        draws: whether it can do with queries that were drawn; others rest on every query.
        reported: the plan that ``semdiag report`` measures; None: it leaves the probe out.
        provenance: what is recorded, from the plan, the largest number of samples of a model, and the few of them.
    """

    name: str
    plan: type
    tables: tuple[Table, ...]
    measure: Callable[[Subject, Any, Any], Mapping[str, pd.DataFrame]]
    prepare: Callable[[Any, Any], Any] = _none
    check: Callable[[LoadedModel, Any, Any], object] = _none
    steps: Callable[[Any], int] = lambda plan: 0
    provenance: Callable[[Any, int, int], dict[str, Any]] = _none
    draws: bool = False
    reported: Callable[[ReportOptions], Any] = lambda options: None


def plan_of(kind: type[P], plan: P | None) -> P:
    """What is asked of a probe; by default the defaults of its plan.

    Args:
        kind: of plan that the probe takes.
        plan: what was given; None: the default.

    Raises:
        InputError: if it is another probe's.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Plan:
        ...     draws: int = 5
        >>> plan_of(Plan, None)
        Plan(draws=5)
    """
    if plan is None:
        return kind()
    if not isinstance(plan, kind):
        raise InputError(f"The plan must be a {kind.__name__}. Got {plan!r}.")
    return plan
