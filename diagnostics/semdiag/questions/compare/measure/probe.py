"""The probe ``compare``: two models run on the same inputs, batch by batch, and compared call by call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing import hooks
from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.random_numbers import RandomNumbers
from semdiag.measuring.calls.running import running
from semdiag.measuring.encoders.inputs import checked_batch
from semdiag.measuring.probe import Probe, Subject
from semdiag.questions.compare.measure.call_pairs import COMPARED, CallPairs
from semdiag.questions.compare.measure.outputs import COMPARED_OUTPUTS, Outputs
from semdiag_models import Encoder, InputError

TOP = 8


@dataclass(frozen=True)
class ComparePlan:
    """What a model is compared with."""

    top: int = TOP  # k of the top-k whose overlap is measured
    base: LoadedModel | None = None  # None: the model itself, where nothing changes
    dtype: torch.dtype | None = None  # of the base; None: that of the model

    def __post_init__(self) -> None:
        if self.top < 1:
            raise InputError(f"--top must be at least 1. Got {self.top}.")


def compare(
    base: LoadedModel,
    other: LoadedModel,
    batches: Sequence[Batch],
    top: int = TOP,
    *,
    labels: Tensor | None = None,
    device: torch.device | str | None = None,
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
    after_batch: Callable[[int], None] = lambda samples: None,
    remark: Callable[[str, str], None] = lambda text, code: None,
) -> dict[str, pd.DataFrame]:
    """Run two models on the same batches and compare their attention, call by call, and their outputs.

    The queries, keys and values of the base are kept for one batch; scores are computed for some queries at a
    time. Where a forward draws random numbers, both draw the same. Weights are those of
    :func:`~semdiag.questions.compare.measure.head_changes.head_changes`; outputs are read as those of
    ``semdiag k-sweep --rerun``.

    Source: docs/commands/compare.md. Deviation: not in the paper.

    Args:
        base: the model before.
        other: the model after, with as many attention calls of the same sizes.
        batches: inputs of both.
        top: k of the top-k whose overlap is measured.
        labels: (N,) classes, for the loss; None: those in the batches, else the next token of a language model.
        device: where both run; None: where they are.
        dtypes: of the base and of the other model; None: unchanged.
        after_batch: called with the number of samples of each batch.
        remark: called with the text and the code of each remark on the comparison.

    Returns:
        The tables ``compared`` and ``compared_outputs``.

    Raises:
        InputError: if a model cannot be run on the inputs, the two differ in their attention calls, or a score is
            not a finite number.
        NotAvailableError: if no query attends to a key in both.
    """
    pair = CallPairs(base.path, other.path, top)
    with running(base, pair.keep, device, dtypes[0]) as one, running(other, pair.match, device, dtypes[1]) as two:
        outputs, first = Outputs(one.module), 0
        with _answers(one.module) as before, _answers(two.module) as after:
            for batch in batches:
                _check_batch(base, batch)
                _check_batch(other, batch)
                moved, size = batching.moved(batch, one.device, one.dtype), batching.samples_of(batch)
                batch_labels = None if labels is None else labels[first : first + size]
                random_numbers = RandomNumbers(one.device)
                pair.start(size)
                with pair.of("base"):
                    one(batch)
                answer = before.pop()
                outputs.prepare(moved, batch_labels, lambda given: batching.call(one.module, given))
                random_numbers.again()
                with pair.of("other"):
                    two(batch)
                outputs.add(answer, after.pop(), moved, batch_labels, first)
                before.clear()
                after.clear()
                pair.finish()
                first += size
                after_batch(size)
    if pair.left_out:
        said = f"{pair.left_out:,} queries attend to a key in one of the two models alone, and are left out"
        remark(said, "queries-left-out")
    for text, code in outputs.notes:
        remark(text, code)
    names = {"model": other.path, "base": base.path}
    rows = COMPARED_OUTPUTS.of_rows({**names, **row} for row in outputs.rows)
    return {"compared": pair.table(names), "compared_outputs": rows}


@contextmanager
def _answers(module: nn.Module) -> Iterator[list[Any]]:
    """Collect what a module returns, call by call."""
    answers: list[Any] = []
    own = hooks.Hooks(module, lambda *_: None, lambda _module, _inputs, output: answers.append(output))
    try:
        own.put_on()
        yield answers
    finally:
        own.remove()


def _check_batch(model: LoadedModel, batch: Batch) -> None:
    """Refuse a batch that one of semdiag's encoders does not take, naming the model."""
    if isinstance(model.module, Encoder):
        try:
            checked_batch(model.module, batch)
        except InputError as error:
            raise InputError(f"{model.path}: {error}") from None


def _measure(subject: Subject, plan: ComparePlan, prepared: Any) -> Mapping[str, pd.DataFrame]:
    base = subject.model if plan.base is None else plan.base
    subject.expect(sum(map(batching.samples_of, subject.batches)))
    return compare(
        base, subject.model, subject.batches, plan.top, labels=subject.labels, device=subject.device,
        dtypes=(plan.dtype or subject.dtype, subject.dtype), after_batch=subject.after_point,
        remark=subject.remark,
    )  # fmt: skip


def _provenance(plan: ComparePlan, samples: int, few: int) -> dict[str, Any]:
    return {"compare_top": plan.top} | ({} if plan.base is None else {"base": plan.base.path})


COMPARISON = Probe("compare", ComparePlan, (COMPARED, COMPARED_OUTPUTS), _measure, provenance=_provenance)
