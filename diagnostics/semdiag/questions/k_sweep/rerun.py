"""A model run again with real masks, sample by sample: loss, divergence of its outputs, changed predictions."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import MASK_NAMES, PADDED, Batch
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.rules import Keep
from semdiag.capturing.sparsify import sparsify
from semdiag.measuring.calls.running import DRAWS, RandomNumbers, in_evaluation, no_room
from semdiag.measuring.outputs import Answers, Reader, output_change, position_terms
from semdiag.measuring.table import Table, columns_of
from semdiag.measuring.training_runs import token_ids
from semdiag.measuring.words import FEWEST, counted
from semdiag.questions.k_sweep.finished import FinishedRun, FinishedRuns
from semdiag_files import InputError


def _chunk_sums(counted: Tensor, terms: Mapping[str, Tensor], chunk: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return into how many parts of at least ``chunk`` positions samples are cut, and sums over each."""
    if not chunk:
        return counted.new_ones(len(counted), dtype=torch.int64), {n: x.sum(1)[:, None] for n, x in terms.items()}
    among = counted.sum(1)
    parts = among.div(chunk, rounding_mode="floor").clamp(min=1)
    before = counted.long().cumsum(1) - 1
    place = (parts[:, None] * before).div(among.clamp(min=1)[:, None], rounding_mode="floor").where(counted, 0)
    sums = {n: x.new_zeros(len(x), int(parts.max())).scatter_add_(1, place, x) for n, x in terms.items()}
    return parts, sums


def packed(batches: Sequence[Batch], length: int, size: int) -> list[Batch]:
    """Cut the tokens of all samples, one behind the other, into pieces of a length."""
    read = [_ids_of(batch) for batch in batches]
    stream = torch.cat([ids.flatten() if real is None else ids[real] for _, ids, real in read])
    if len(stream) < length:
        raise InputError(f"--lengths {length}: the inputs hold {counted(len(stream), 'token')} in all.")
    pieces = stream[: len(stream) // length * length].view(-1, length)
    name = read[0][0]
    parts = [pieces[first : first + size] for first in range(0, len(pieces), size)]
    return [part if name is None else {name: part} for part in parts]


def _ids_of(batch: Batch) -> tuple[str | None, Tensor, Tensor | None]:
    """Return a batch's name of ids, ids, and which of them are real."""
    if isinstance(batch, Tensor):
        ids = token_ids((batch,))
        if ids:
            return None, batch, None
    elif isinstance(batch, Mapping):
        ids = token_ids(batch)
        unread = set(batch) - set(ids) - set(MASK_NAMES) - {"token_type_ids"}
        if len(ids) == 1 and not unread:
            name, values = next(iter(ids.items()))
            masks = [(mask, batch[mask].bool()) for mask in MASK_NAMES if batch.get(mask) is not None]
            real = [~tokens if mask in PADDED else tokens for mask, tokens in masks]
            return str(name), values, real[0] if real else None
    raise InputError("--lengths cuts texts or token ids alone: leave out labels and other arguments.")


NO_MASK = "none"
RERUN_FAILED = "not-run-with-masks"  # code of a remark, whose text is the reason
KIND_NOT_RUN = "kind-not-run"  # code of a remark: a kind was refused that nobody had named


@dataclass(frozen=True)
class _RerunOrder:
    """What a rerun was asked, with some of the masks; a process can be sent it."""

    loaded: LoadedModel
    batches: Sequence[Batch]
    labels: Tensor | None
    numbered: Sequence[tuple[int, str, int, Keep]]  # number, name, k and rule of each mask
    optional: Sequence[str]
    device: torch.device | str | None
    dtype: torch.dtype | None
    plain: bool = True  # whether the rows without a mask are wanted
    state: Tensor | None = None  # state of torch's generator at the start; None: unchanged
    chunk: int = 0  # positions of the parts of which samples have a row each; 0: one row a sample
    length: int = 0  # tokens of the pieces into which inputs were cut; 0: they are as given
    finished: FinishedRuns = field(default_factory=FinishedRuns)  # runs that need not be made


Place = tuple[int, int]  # of a batch, and of a mask in it; 0: none


@dataclass
class _Passes:
    """What came of running a model with masks: rows of the table, and what is to be remarked."""

    rows: dict[Place, list[Mapping[str, Any]]] = field(default_factory=dict)
    refused: dict[str, tuple[Place, str]] = field(default_factory=dict)  # the first time, by name, and why
    padded: bool = False
    drew: bool = False
    notes: list[tuple[str, str]] = field(default_factory=list)  # how outputs are read
    seconds: dict[str, float] = field(default_factory=dict)  # of the last run of each kind of mask
    state: Tensor = field(default_factory=torch.get_rng_state)  # state of torch's generator at the end


def carry_out(order: _RerunOrder) -> _Passes | str:
    """Carry out an order on one CPU thread, for a process of its own."""
    torch.set_num_threads(1)
    if order.state is not None:
        torch.set_rng_state(order.state)
    try:
        return passes(order, lambda samples: None)
    except InputError as error:
        return str(error)


def passes(order: _RerunOrder, after_batch: Callable[[int], None]) -> _Passes:
    """Run a model without a mask and with each of several, where that is not finished."""
    made = _Passes()
    with in_evaluation(order.loaded, order.device, order.dtype) as (module, place, dtype):
        runs = _Runs(order, made, module, after_batch)
        first = 0
        for number, inputs in enumerate(order.batches):
            size = batching.samples_of(inputs)
            if runs.restored(number, first, size):
                first += size
                continue
            batch = batching.moved(inputs, place, dtype)
            numbers = RandomNumbers(place)
            try:
                runs.add(number, batch, first, size, numbers)
            except InputError:
                raise
            except Exception as error:  # whatever the model raises
                if (full := no_room(order.loaded.path, batch, error)) is not None:
                    raise full from None
                message = " ".join(str(error).split())[:200]
                raise InputError(
                    f"{order.loaded.path} cannot be run with a mask ({type(error).__name__}: {message})."
                ) from error
            first += size
    made.notes = [] if runs.reader is None else output_notes(runs.reader)
    made.state = torch.get_rng_state()
    return made


class _Runs:
    """The runs of a model on one batch after another, which the first reads."""

    def __init__(
        self, order: _RerunOrder, passes_made: _Passes, module: nn.Module, after_batch: Callable[[int], None]
    ) -> None:
        self.order = order
        self.passes_made = passes_made
        self.module = module
        self.after_batch = after_batch
        self.reader: Reader | None = None

    def restored(self, number: int, first: int, size: int) -> bool:
        """Take over what is finished of a batch; return whether that is all, and the batch need not run."""
        plain = self._restore(number, (0, NO_MASK, 0), first, size)
        missing = [mask for mask in self.order.numbered if not self._restore(number, mask[:3], first, size)]
        missing = [mask for mask in missing if mask[1] not in self.passes_made.refused]
        return plain is not None and not plain.drew and not missing and self.reader is not None

    def _restore(self, number: int, mask: tuple[int, str, int], first: int, size: int) -> FinishedRun | None:
        """Return the finished run of a batch with a mask, and take over its rows once; None: it is to be made."""
        at, name, k = mask
        run = self.order.finished.runs.get((self.order.length, first, size, name, k))
        if run is None:
            return None
        passes_made = self.passes_made
        passes_made.drew = passes_made.drew or run.drew
        passes_made.padded = passes_made.padded or run.padded
        if (at or self.order.plain) and (number, at) not in passes_made.rows:
            passes_made.rows[number, at] = list(run.rows)
            self.after_batch(size)
        return run

    def add(self, number: int, batch: Batch, first: int, size: int, numbers: RandomNumbers) -> None:
        """Run a batch, which begins at sample ``first``, without a mask and with each that is not finished."""
        order = self.order
        passes_made = self.passes_made

        def run(batch: Batch) -> Any:
            numbers.again()
            return batching.call(self.module, batch)

        def finish(mask: int, name: str, k: int, run: FinishedRun) -> None:
            passes_made.rows[number, mask] = list(run.rows)
            passes_made.seconds[name] = run.seconds
            order.finished.add((order.length, first, size, name, k), run)
            self.after_batch(size)

        labels = None if order.labels is None else order.labels[first : first + size]
        before = self._before(batch, labels, run)
        unpadded = order.loaded.external and bool(before.counted.all())
        passes_made.drew = passes_made.drew or numbers.drawn
        if order.plain and (number, 0) not in passes_made.rows:
            rows = list(_rows(NO_MASK, 0, first, before, before, {}, order.chunk))
            finish(0, NO_MASK, 0, FinishedRun(rows, drew=numbers.drawn))
        for mask, name, k, rule in order.numbered:
            if name in passes_made.refused or (number, mask) in passes_made.rows:
                continue
            start = time.perf_counter()
            try:
                with sparsify(self.module, rule) as restricted:
                    output = run(batch)
            except InputError as error:
                if name not in order.optional:
                    raise
                passes_made.refused[name] = (number, mask), str(error)
                continue
            kept, keys = restricted.totals
            padded = unpadded and before.counted.shape[1] in restricted.padded
            passes_made.padded |= padded
            assert self.reader is not None
            after = self.reader.read(output, batch, labels)
            counts = {"kept": kept / size, "keys": keys / size}
            rows = list(_rows(name, k, first, before, after, counts, order.chunk))
            finish(mask, name, k, FinishedRun(rows, padded, numbers.drawn, time.perf_counter() - start))

    def _before(self, batch: Batch, labels: Tensor | None, run: Callable[[Batch], Any]) -> Answers:
        """Return what the model answers without a mask."""
        if self.reader is None:
            self.reader = Reader(self.module, batch, labels, run)
            before = self.reader.read(self.reader.output, batch, labels)
            self.reader.output = None  # its memory is needed
            return before
        return self.reader.read(run(batch), batch, labels)


def _rows(
    mask: str, k: int, first: int, before: Answers, after: Answers, counts: dict[str, float], chunk: int
) -> Iterator[dict[str, Any]]:
    if not before.distribution:
        chunk = 0
    parts, sums = _chunk_sums(before.counted, position_terms(before, after), chunk)
    changes = output_change(before, after).tolist()
    listed = {name: x.tolist() for name, x in sums.items()}
    counts = {"kept": math.nan, "keys": math.nan} | counts
    for at, number in enumerate(parts.tolist()):
        place = {"mask": mask, "k": k, "sample": first + at, "chunk": chunk, "classes": before.classes}
        place |= {"output_change": changes[at]} | {name: count / number for name, count in counts.items()}
        for part in range(number):
            yield {**place, "part": part, **{name: x[at][part] for name, x in listed.items()}}


RERUN_TABLE = Table(
    "rerun",
    "One row per mask, k and sample of a model that was run with it; of fewer than five samples one per part of "
    "a sample, of at least chunk tokens each (0: whole samples). mask: none, a kind of sparse attention, or a "
    "budget's name (k = -1). kept of keys: a sample's part of those of its batch (NaN without a mask). Sums over "
    "the sample's targets (loss, nats; correct) and its positions with a distribution (predictions, changed; "
    "divergence KL(without mask || with it), nats); output_change: norm of the change of its outputs relative to "
    "their norm, +inf where that is no number, NaN where the sample has no position.",
    columns_of(
        "model mask str; k int64; sample part chunk int32; targets correct predictions changed classes int64; "
        "loss divergence output_change kept keys float64"
    ),
)
LENGTHS_TABLE = Table(
    "rerun_lengths",
    "The same of inputs that --lengths cut into pieces. length: tokens of each.",
    {**RERUN_TABLE.columns, "length": "int64"},
)
# Up to which mean change a mask does no harm: of the loss and of the divergence 0.01 nats (1% of a perplexity);
# where nothing but outputs is known, 5% of their norm.
TOLERANCES = {"loss": 0.01, "divergence": 0.01, "output_change": 0.05}
HARM = 10  # times the tolerance: a sample that changes by more is harmed
MOST_HARMED = 0.01  # share of the inputs that may be, where a mask is said to do
LEAST_SAMPLES = 299  # of fewer, if none is harmed, a share above this cannot be excluded: 0.99^299 ≤ 0.05
CHUNK = 128  # positions of the parts over which intervals are, where there are fewer samples than FEWEST
UNITS = ["sample", "part"]  # over which intervals are
Numbers = NDArray[np.float64]


def rerun_ks(largest: int) -> list[int]:
    """Return the k of reruns of a model: powers of 2, values half-way between them, and the largest."""
    steps = sorted({1, *(2**n for n in range(31)), *(3 * 2**n for n in range(30))})
    return [*(k for k in steps if k < largest), largest]


def few_ks(keys: int) -> list[int]:
    """Return the default k of reruns of any model: powers of 2 from a sixteenth to half of its keys."""
    return [2**n for n in range(31) if keys / 16 <= 2**n <= keys / 2] or [1]


def measure_of(again: pd.DataFrame) -> str:
    """Return the measure for a model's reruns: its loss if targets are known, else divergence or output change."""
    if again["targets"].sum():
        return "loss"
    return "divergence" if again["predictions"].sum() else "output_change"


def unit_changes(measure: str, rows: pd.DataFrame, before: pd.DataFrame) -> tuple[Numbers, Numbers]:
    """Return the summed change of each unit, and the number of its terms; rows are indexed by UNITS."""
    before = before.loc[rows.index]
    output = measure == "output_change"
    sums = rows[measure] if output else rows[measure] - before[measure]
    counts = rows[measure].notna() if output else rows["targets" if measure == "loss" else "predictions"]
    return np.asarray(sums, np.float64), np.asarray(counts, np.float64)


def mean_change(again: pd.DataFrame, mask: str, k: int) -> tuple[float, float]:
    """Return the mean change by a mask, and its upper end: that and twice its standard error over samples."""
    parts = again[(again["mask"] == mask) & (again["k"] == k)], again[again["mask"] == NO_MASK]
    sums, counts = unit_changes(measure_of(again), *(part.set_index(UNITS) for part in parts))
    sums = sums[counts > 0]
    counts = counts[counts > 0]
    mean = float(sums.sum() / counts.sum())
    samples = max(2, len(sums))
    error = math.sqrt(samples / (samples - 1) * float(((sums - mean * counts) ** 2).sum())) / float(counts.sum())
    return mean, mean + 2 * error


def rerun(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    labels: Tensor | None,
    masks: Sequence[tuple[str, int, Keep]],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    remark: Callable[[str, str], None] = lambda text, code: None,
    optional: Sequence[str] = (),
    after_batch: Callable[[int], None] = lambda samples: None,
    jobs: int = 1,
    length: int = 0,
    finished: FinishedRuns | None = None,
) -> pd.DataFrame:
    """Run a model without a mask and with each of several, in evaluation mode and without gradients."""
    samples = sum(map(batching.samples_of, batches))
    if labels is not None:
        _check_labels(labels, samples)
    numbered = [(number, *mask) for number, mask in enumerate(masks, 1)]
    order = _RerunOrder(
        loaded, batches, labels, numbered, optional, device, dtype, chunk=chunk_of(samples), length=length
    )
    if finished is not None:
        order = replace(order, finished=finished)
    passes_made = passes(order, after_batch) if jobs == 1 else _divided(order, jobs)
    for text, code in _pass_notes(passes_made):
        remark(text, code)
    rows = (row for place in sorted(passes_made.rows) for row in passes_made.rows[place])
    return RERUN_TABLE.of_rows(
        {"model": loaded.path, **row} for row in rows if row["mask"] not in passes_made.refused
    )


def chunk_of(samples: int) -> int:
    """Return the positions of the parts over which intervals are; 0: they are over samples."""
    return CHUNK if samples < FEWEST else 0


def timed(
    loaded: LoadedModel,
    batch: Batch,
    labels: Tensor | None,
    masks: Sequence[tuple[str, int, Keep]],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    optional: Sequence[str],
    chunk: int,
    length: int,
    finished: FinishedRuns,
) -> dict[str, float]:
    """Run the first batch with some masks, and return the seconds of each kind; the runs are finished ones."""
    numbered = [(number, *mask) for number, mask in enumerate(masks, 1)]
    order = _RerunOrder(
        loaded, [batch], labels, numbered, optional, device, dtype, chunk=chunk, length=length, finished=finished
    )
    return passes(order, lambda samples: None).seconds


def _check_labels(labels: Any, samples: int) -> None:
    is_tensor = isinstance(labels, Tensor)
    if is_tensor and labels.ndim and len(labels) == samples:
        return
    got = f"shape {tuple(labels.shape)} for {counted(samples, 'sample')}" if is_tensor else type(labels).__name__
    raise InputError(f"labels are a tensor with an entry for each sample. Got {got}.")


def _pass_notes(made: _Passes) -> Iterator[tuple[str, str]]:
    """Return remarks on passes, each with a code."""
    if made.padded:
        yield (
            "outputs at padding count in its changes: its modules know it, and no mask among its inputs says it",
            "padding-compared",
        )
    for name, (_, reason) in sorted(made.refused.items(), key=lambda refusal: refusal[1]):
        yield f"{name} was not run: {reason}", KIND_NOT_RUN
    if made.drew:
        yield f"{DRAWS}: every run of a batch, with a mask or without, draws the same", "random-forward"
    yield from made.notes


def _divided(order: _RerunOrder, jobs: int) -> _Passes:
    from semdiag.measuring.survey import run_in_parallel
    from semdiag_files.workers import LocalWorkers  # which needs loky, as nothing else here does

    workers = LocalWorkers(jobs, carry_out, len(order.numbered), order.loaded.size)
    shares = [order.numbered[start :: workers.capacity] for start in range(workers.capacity)]
    state = torch.get_rng_state()
    orders = [
        (
            order.loaded.path,
            replace(
                order, numbered=share, plain=not place, state=state, finished=order.finished.of_process(place)
            ),
        )
        for place, share in enumerate(shares)
    ]
    merged: _Passes
    merged, *rest = run_in_parallel(orders, workers)
    for part in rest:
        merged.rows |= part.rows
        for name, refusal in part.refused.items():
            merged.refused[name] = min(refusal, merged.refused.get(name, refusal))
        merged.padded |= part.padded
    torch.set_rng_state(merged.state)
    return merged


def output_notes(reader: Reader) -> list[tuple[str, str]]:
    """Return remarks on how outputs are read, each with a code."""
    read_alone = f"of its inputs {', '.join(reader.unread)} are read by the model alone: its outputs are compared"
    as_outputs = f"logits are compared as outputs, not as a distribution: {reader.reason}"
    own_loss = f"the loss that is compared is the cross-entropy of logits and labels: {reader.loss}"
    notes = (
        (reader.not_compared, f"of its outputs {reader.not_compared}", "outputs-compared"),
        (reader.unread, read_alone, "labels-unread"),
        (reader.reason, as_outputs, "logits-as-outputs"),
        (reader.loss, own_loss, "loss-of-logits"),
    )
    return [(text, code) for applies, text, code in notes if applies]
