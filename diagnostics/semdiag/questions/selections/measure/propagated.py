"""A model's own selections where it runs in a number format throughout: forecast, and measured."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing.batches import Batch, samples_of
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.selections.number_formats import FORMATS, NumberFormat
from semdiag.measuring.calls.running import running
from semdiag.measuring.calls.scored_rows import NotAvailableError
from semdiag.measuring.rounded_runs import rounded_runs
from semdiag.questions.selections.measure.own_rows import (
    Choices,
    Place,
    causal_modules,
    choices_of,
    kind_of,
    tokens_of,
)
from semdiag.questions.selections.measure.stages import in_stages
from semdiag.questions.selections.measure.watch import Selected, watch_selections
from semdiag_models import InputError

_NOT_COMPARABLE = "its selections in float64 are not those of its rounded run"


class _Chosen(NamedTuple):
    """What one selection chose in a batch."""

    place: tuple[str, int]  # its module, and which of the module's selections it is
    shape: tuple[int, ...]  # of the rows: samples, other axes, tokens
    keys: Tensor  # (rows, k), sorted
    decides: Tensor  # bool (rows,): not padding, and more than k to choose from
    broken: Tensor  # bool (rows,): a score is NaN or +inf


def propagated_selections(
    loaded: LoadedModel, batches: Sequence[Batch], kind: NumberFormat, device: torch.device
) -> pd.DataFrame:
    """Compare what a model selects in float64 with what it selects where it runs in a number format throughout.

    The runs are those of :func:`~semdiag.measuring.rounded_runs.rounded_runs`. A choice is what the run itself
    chose, ties included.

    Source: docs/theory.md#propagated-rounding. Deviation: not in the paper.

    Args:
        loaded: an external model; copies of it run.
        batches: its inputs.
        kind: the format, float32 or coarser.
        device: where to run.

    Returns:
        One row per selection and sample: module, number (which of the module's selections), sample; queries
        (tokens with more than k to choose from); how many of them choose otherwise, as forecast and as measured;
        for how many this is the first selection to change (first).

    Raises:
        InputError: if the format is float64, the model cannot be run, or copies of it do not fit into memory.
        NotAvailableError: if its selections depend on the format, or its forward draws random numbers.
    """
    if kind.digits > FORMATS["float32"].digits:
        raise InputError(f"Choices are compared with those in float64. Name a coarser format. Got {kind.name}.")
    exact, runs = rounded_runs(loaded, [kind], seed=0)
    counts: dict[tuple[str, int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    before = 0
    for batch in batches:
        chosen = _chosen(exact, batch, device)
        for run in runs:
            (reading,) = run.readings
            seen = _chosen(run.model, batch, device, run.inside)
            for place, columns in _changes(chosen, seen):
                for sample, (queries, changed, first) in enumerate(columns.tolist()):
                    row = counts[*place, before + sample]
                    row[reading.column] += reading.weight * changed
                    if reading.column == "measured":
                        row["queries"] += queries
                        row["first"] += first
        before += samples_of(batch)
    rows = [
        {"module": module, "number": number, "sample": sample, **row}
        for (module, number, sample), row in counts.items()
        if row["queries"]
    ]
    return pd.DataFrame(rows, columns=["module", "number", "sample", "queries", "forecast", "measured", "first"])


def _chosen(
    loaded: LoadedModel, batch: Batch, device: torch.device, inside: AbstractContextManager[object] | None = None
) -> list[_Chosen]:
    """Return what the parts of a model select in a batch, in order."""
    collected: list[_Chosen] = []

    def consume(name: str, module: nn.Module, selected: list[Selected]) -> None:
        text = f"{name} {type(module).__name__}".lower()
        for number, (chosen, group) in enumerate(in_stages(selected)):
            kind = kind_of(text, tuple(chosen.scores.shape), tokens)
            if kind and not chosen.positions:
                place = Place(text, kind, name in causal, tokens)
                collected.append(_of_choices((name, number), choices_of(place, chosen, group)[0]))

    with running(loaded, lambda call: None, device) as run:
        tokens, causal = tokens_of(run.module, batch), causal_modules(run.module)
        with inside or nullcontext(), watch_selections(run.module, consume):  # it sees what is rounded
            run(batch)
        run.alike()
    return [one for one in collected if one.place[0]] or collected


def _of_choices(place: tuple[str, int], choices: Choices) -> _Chosen:
    k, order = choices.indices.shape[1], choices.order
    return _Chosen(
        place,
        choices.shape,
        choices.indices.sort(1).values,
        choices.real & (choices.available.sum(1) > k),
        (order.isnan() | (order == torch.inf)).any(1),
    )


def _changes(before: list[_Chosen], after: list[_Chosen]) -> Iterator[tuple[tuple[str, int], Tensor]]:
    """Yield (samples, 3) by selection: rows that decide, that choose otherwise, that are a token's first to."""
    alike = [[(one.place, one.shape, one.keys.shape) for one in each] for each in (before, after)]
    if alike[0] != alike[1]:
        raise NotAvailableError(_NOT_COMPARABLE)
    seen: dict[tuple[int, int], Tensor] = {}
    for one, other in zip(before, after, strict=True):
        shape = (one.shape[0], -1, one.shape[-1])
        changed = one.decides & (other.broken | (one.keys != other.keys).any(1))
        decides, changed = one.decides.view(shape), changed.view(shape)
        anywhere = changed.any(1)
        known = seen.setdefault((shape[0], shape[2]), torch.zeros_like(anywhere))
        first = anywhere & ~known
        known |= anywhere
        yield one.place, torch.stack([decides.sum((1, 2)), changed.sum((1, 2)), first.sum(1)], 1)
