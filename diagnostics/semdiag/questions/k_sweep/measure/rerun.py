"""A model run again with real masks, sample by sample: loss, divergence of its outputs, changed predictions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.mask_rules import Keep
from semdiag.measuring.calls.random_numbers import DRAWS
from semdiag.measuring.findings.resampling import FEWEST
from semdiag.measuring.table import Table
from semdiag.questions.k_sweep.measure.passes import NO_MASK, Passes, RerunOrder, carry_out, passes
from semdiag_models import InputError

RERUN_TABLE = Table(
    "rerun",
    (
        "One row per mask, k and sample of a model that was run with it; of fewer than five samples one per part "
        "of a sample, of at least chunk tokens each (0: whole samples). mask: none, a kind of sparse attention, "
        "or a budget's name (k = -1). kept of keys: over all queries, heads and layers of its batch, a sample's "
        "part (NaN without a mask). Sums over the sample's targets (loss, nats; correct) and over its "
        "positions with a distribution (predictions, changed; divergence KL(without mask || with it), nats); "
        "output_change: norm of the change of its outputs relative to their norm, +inf where that is no number, "
        "NaN where the sample has no position."
    ),
    {
        "model": "str",
        "mask": "str",
        "k": "int64",
        **dict.fromkeys(("sample", "part", "chunk"), "int32"),
        **dict.fromkeys(("targets", "correct", "predictions", "changed", "classes"), "int64"),
        **dict.fromkeys(("loss", "divergence", "output_change", "kept", "keys"), "float64"),
    },
)
# Up to which mean change a mask does no harm: of the loss and of the divergence 0.01 nats (1% of a perplexity);
# where nothing but outputs is known, 5% of their norm.
TOLERANCES = {"loss": 0.01, "divergence": 0.01, "output_change": 0.05}
HARM = 10  # times the tolerance: a sample that changes by more is harmed
MOST_HARMED = 0.01  # share of the inputs that may be, where a mask is said to do
LEAST_SAMPLES = 299  # of fewer, if none is harmed, a share above this cannot be excluded: 0.99^299 ≤ 0.05
CHUNK = 128  # positions of the parts over which intervals are, where there are fewer samples than FEWEST
Masks = Sequence[tuple[str, int, Keep]]


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


def mean_change(again: pd.DataFrame, mask: str, k: int) -> tuple[str, float]:
    """Return the mean change by a mask."""
    measure = measure_of(again)
    rows, before = again[(again["mask"] == mask) & (again["k"] == k)], again[again["mask"] == NO_MASK]
    if measure == "output_change":
        return measure, float(rows[measure].mean())
    unit = {"loss": "targets", "divergence": "predictions"}[measure]
    return measure, float((rows[measure].sum() - before[measure].sum()) / rows[unit].sum())


def upper_change(again: pd.DataFrame, mask: str, k: int) -> float:
    """Return the mean change by a mask, and twice its standard error over samples."""
    measure, mean = mean_change(again, mask, k)
    rows = again[(again["mask"] == mask) & (again["k"] == k)].set_index(["sample", "part"])
    before = again[again["mask"] == NO_MASK].set_index(["sample", "part"]).loc[rows.index]
    unit = {"loss": "targets", "divergence": "predictions"}.get(measure)
    weights = rows[unit] if unit else pd.Series(1, rows.index)
    rest = rows[measure] - before[measure] - mean * weights
    samples = max(2, len(rows))
    return mean + 2 * math.sqrt(samples / (samples - 1) * float((rest**2).sum())) / float(weights.sum())


def rerun(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    labels: Tensor | None,
    masks: Masks,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    remark: Callable[[str, str], None] = lambda text, code: None,
    optional: Sequence[str] = (),
    after_batch: Callable[[int], None] = lambda samples: None,
    quarters: Callable[[dict[str, Any]], None] = lambda row: None,
    jobs: int = 1,
) -> pd.DataFrame:
    """Run a model without a mask and with each of several, in evaluation mode and without gradients."""
    samples = sum(map(batching.samples_of, batches))
    if labels is not None:
        _check_labels(labels, samples)
    numbered = [(number, *mask) for number, mask in enumerate(masks, 1)]
    order = RerunOrder(
        loaded, batches, labels, numbered, optional, device, dtype, chunk=CHUNK * (samples < FEWEST)
    )
    passed = passes(order, after_batch) if jobs == 1 else _divided(order, jobs)
    if passed.padded:
        remark(
            "outputs at padding count in its changes: its modules know it, and no mask among its inputs says it",
            "padding-compared",
        )
    for name, (_, why) in sorted(passed.refused.items(), key=lambda each: each[1]):
        remark(f"{name} was not run: {why}", "kind-not-run")
    if passed.reader:
        _remark_outputs(passed.reader, passed.drew, remark)
    for place in sorted(passed.quarters):
        for row in passed.quarters[place]:
            quarters(row)
    every = (row for place in sorted(passed.rows) for row in passed.rows[place])
    return RERUN_TABLE.of_rows({"model": loaded.path, **row} for row in every if row["mask"] not in passed.refused)


def _divided(order: RerunOrder, jobs: int) -> Passes:
    """Divide the masks among processes, and put together what came of them."""
    from semdiag.measuring.parallel import run_in_parallel
    from semdiag_models.sweeps.workers import LocalWorkers  # which needs joblib, as nothing else here does

    workers = LocalWorkers(jobs, carry_out, len(order.numbered), order.loaded.size)
    shares = [order.numbered[start :: workers.capacity] for start in range(workers.capacity)]
    state = torch.get_rng_state()
    orders = [
        (order.loaded.path, replace(order, numbered=share, plain=not place, state=state))
        for place, share in enumerate(shares)
    ]
    first: Passes
    first, *others = run_in_parallel(orders, workers)
    for other in others:
        first.rows |= other.rows
        first.quarters |= other.quarters
        for name, refusal in other.refused.items():
            first.refused[name] = min(refusal, first.refused.get(name, refusal))
        first.padded |= other.padded
    torch.set_rng_state(first.state)
    return first


def _check_labels(labels: Any, samples: int) -> None:
    """Refuse labels that are no tensor with an entry for each sample."""
    if not isinstance(labels, Tensor) or not labels.ndim or len(labels) != samples:
        plain = isinstance(labels, Tensor)
        got = f"shape {tuple(labels.shape)} for {samples} samples" if plain else type(labels).__name__
        raise InputError(f"labels are a tensor with an entry for each sample. Got {got}.")


def _remark_outputs(
    reader: tuple[str, Sequence[str], str, str], drew: bool, remark: Callable[[str, str], None]
) -> None:
    """Remark on how outputs are compared, and that forward passes draw random numbers, if they do."""
    others, unread, reason, loss = reader
    if drew:
        remark(f"{DRAWS}: every run of a batch, with a mask or without, draws the same", "random-forward")
    if others:
        remark(f"of its outputs {others}", "outputs-compared")
    if unread:
        text = f"of its inputs {', '.join(unread)} are read by the model alone: its outputs are compared"
        remark(text, "labels-unread")
    if reason:
        text = f"logits are compared as outputs, not as a distribution: {reason}"
        remark(text, "logits-as-outputs")
    if loss:
        remark(f"the loss that is compared is the cross-entropy of logits and labels: {loss}", "loss-of-logits")
