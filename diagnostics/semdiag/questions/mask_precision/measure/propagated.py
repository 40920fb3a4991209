"""Masks where a model runs in a number format throughout: forecast by a noisy run in float64, and measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch, samples_of, split
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.mask_stability import kept_in_common, top_set
from semdiag.mathematics.selections.number_formats import NumberFormat
from semdiag.mathematics.selections.rounded_operands import rounded
from semdiag.measuring.calls.batch_rows import SampleNumbers
from semdiag.measuring.calls.running import running
from semdiag.measuring.calls.scored_rows import NotAvailableError
from semdiag.measuring.rounded_operations import operands_alone
from semdiag.measuring.rounded_runs import Reading, rounded_runs
from semdiag.measuring.table import Table
from semdiag.questions.compare.measure.kept_calls import KeptCalls, own_copy
from semdiag.questions.mask_stability.measure.mask_rows import Selection

_STRIP = 2**21  # scores held at a time (or one query of every sample and head)
_NOT_COMPARABLE = (
    "its attention calls in float64 are not those of its rounded run (its attention may be written by hand)"
)

PROPAGATED_MASKS = Table(
    "propagated_masks",
    "One row per number format, sample and layer, heads pooled: how many queries drop a key; how many have other "
    "keys among the k largest scores where the model runs in the format throughout, as forecast (forecast) and as "
    "run (measured); how many change first in this layer, in any head (first).",
    {
        **dict.fromkeys(("model", "format"), "str"),
        **dict.fromkeys(("sample", "layer", "queries", "measured", "first"), "int32"),
        "forecast": "float64",
    },
)


def propagated_masks(
    loaded: LoadedModel,
    inputs: Batch | Iterable[Batch],
    formats: Sequence[NumberFormat],
    k: int,
    selection: Selection,
    *,
    batch_size: int = 100,
    device: torch.device | str | None = None,
    min_keys: int = 1,
    seed: int = 0,
) -> pd.DataFrame:
    """Compare the mask of every query in float64 with those where the model runs in a number format throughout.

    The sets are those of the k largest scores, computed in float64 from the queries and keys of a run. The runs
    are those of :func:`~semdiag.measuring.rounded_runs.rounded_runs`.

    Source: docs/theory.md#propagated-rounding. Deviation: not in the paper.

    Args:
        loaded: the model; copies of it run.
        inputs: what :func:`~semdiag.measuring.measure.measure` takes.
        formats: float32 or coarser.
        k: of the mask that top-k would choose in a model without a selection of its own.
        selection: how masks follow from the scores; by the scores alone.
        batch_size: samples at a time.
        device: where to run; None: where the model is.
        min_keys: queries with fewer keys are left out.
        seed: of what is drawn.

    Returns:
        The table ``propagated_masks``.

    Raises:
        InputError: if copies of the model do not fit into memory.
        NotAvailableError: if the model's attention calls depend on the format, cannot be captured where each
            operation is rounded, or its forward draws random numbers.
    """
    exact, runs = rounded_runs(loaded, formats, seed)
    collected = _Collector(loaded.path, k, selection, min_keys)
    for batch in split(inputs, batch_size):
        collected.start(samples_of(batch))
        with running(exact, collected.kept.add, device) as run:
            run(batch)
            run.alike()
        for other in runs:
            collected.begin(other.readings)
            with running(other.model, collected.match, device) as run, other.inside:
                run(batch)
            collected.finish()
    return PROPAGATED_MASKS.of_rows(collected.rows())


@dataclass
class _Collector:
    """Counts of one model, batch by batch and run by run."""

    model: str
    k: int
    selection: Selection
    min_keys: int
    kept: KeptCalls = field(default_factory=KeptCalls)
    _numbers: SampleNumbers = field(default_factory=SampleNumbers)
    _counts: dict[tuple[str, int, int], dict[str, float]] = field(default_factory=dict)

    def start(self, samples: int) -> None:
        """Begin a batch: the next calls are those of the float64 run."""
        self.kept.clear()
        self._numbers.start(samples)

    def begin(self, readings: Sequence[Reading]) -> None:
        """Begin a rounded run, whose calls are matched with those of the float64 run."""
        self._readings, self._next = readings, 0
        self._seen: dict[tuple[str, torch.Size], Tensor] = {}

    def finish(self) -> None:
        """End a run.

        Raises:
            NotAvailableError: if it has called attention less often than the float64 run.
        """
        if self._next != len(self.kept):
            raise NotAvailableError(_NOT_COMPARABLE)

    def match(self, call: AttentionCall) -> None:
        """Compare a call with the one of the float64 run at its place."""
        place, self._next = self._next, self._next + 1
        if place >= len(self.kept) or self.kept.at(place).q.shape != call.q.shape:
            raise NotAvailableError(_NOT_COMPARABLE)
        exact, other = self.kept.at(place), own_copy(call)
        samples = self._numbers.of(len(exact.q))
        for reading in self._readings:
            changed, counted = self._changed(exact, other, reading)
            key = reading.kind.name, changed.shape[:1] + changed.shape[-1:]
            anywhere = changed.any(1)
            first = anywhere & ~self._seen.get(key, torch.zeros_like(anywhere))
            self._seen[key] = anywhere | self._seen.get(key, anywhere)
            sums = {reading.column: reading.weight * changed.sum((1, 2))}
            if reading.column == "measured":
                sums |= {"queries": counted.sum((1, 2)), "first": first.sum(1)}
            for name, values in sums.items():
                for sample, value in zip(samples, values.tolist(), strict=True):
                    row = self._counts.setdefault((reading.kind.name, int(sample), exact.layer), {})
                    row[name] = row.get(name, 0) + value

    def rows(self) -> Iterator[Mapping[str, object]]:
        """Yield the rows of the table: samples and layers in which a query drops a key."""
        for (kind, sample, layer), counts in self._counts.items():
            if counts["queries"]:
                yield {"model": self.model, "format": kind, "sample": sample, "layer": layer, **counts}

    def _changed(self, exact: AttentionCall, other: AttentionCall, reading: Reading) -> tuple[Tensor, Tensor]:
        """Return which rows (B, H, L) change, and which count."""
        kept = self.k
        if self.selection.by_model and exact.selected is not None:
            kept = exact.selected.shape[-1]
        kept = min(kept, exact.k.shape[2])
        step = max(1, _STRIP // (exact.q.shape[0] * exact.q.shape[1] * exact.k.shape[2]))
        parts = []
        for start in range(0, exact.q.shape[2], step):
            strip = slice(start, start + step)
            parts.append(self._strip(exact.part(queries=strip), other.part(queries=strip), reading, kept))
        changed, counted = (torch.cat(values, -1) for values in zip(*parts, strict=True))
        return changed, counted

    def _strip(
        self, exact: AttentionCall, other: AttentionCall, reading: Reading, kept: int
    ) -> tuple[Tensor, Tensor]:
        scores = self.selection.sign * exact.scores(torch.float64)
        allowed = torch.ones_like(scores, dtype=torch.bool)
        if exact.allowed is not None:
            allowed = exact.allowed.expand_as(scores)
        number = allowed.sum(-1)
        counted = exact.counted & (number > kept) & (number >= self.min_keys)
        before = top_set(scores.masked_fill(~allowed, -torch.inf), kept)
        q, keys = other.q.double(), other.k.double()
        if operands_alone(reading.kind):
            q, keys = rounded(q, reading.kind), rounded(keys, reading.kind)
        later = self.selection.sign * replace(exact, q=q, k=keys).scores(torch.float64)
        broken = (allowed & ~later.isfinite()).any(-1)
        later = later.masked_fill(~allowed, -torch.inf)
        return counted & (broken | (kept_in_common(later[None], before)[0] < kept)), counted
