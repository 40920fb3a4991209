"""Watching a model's attention while it is trained."""

import math
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.mathematics.row_statistics import RowStatistics, row_statistics
from semdiag.mathematics.softmax_secants import local_stability_of_weight
from semdiag.measurement.calls.monitor_log import MonitorLog
from semdiag_models import InputError

_QUERIES, _SAMPLES = 8, 4  # looked at in each attention call: rows of scores = their product × heads


class ScalarWriter(Protocol):
    """What is needed of a TensorBoard SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Log one number."""


class Monitor:
    """Follow dispersion, separation, stability and entropy of a model's attention during training.

    Every ``every``-th forward call in training mode, a few query rows of each attention call are scored: 8 random
    queries of 4 random samples, all heads. Nothing else happens at the other calls. Outputs, gradients and
    random numbers are those of the training without a monitor. With gradient accumulation, forward calls are
    more than optimiser steps.

    One row per step, attention layer and occurrence of the layer in that step:
    ``step, layer, module, occurrence, rows`` (scored queries, padded ones left out), and medians over these rows
    of ``keys``, ``dispersion`` (δ, nats), ``separation`` (Δ, nats; empty where nothing is dropped), ``xi`` (the
    local stability 2p(1 − p) of the largest weight p, docs/theory.md#local-stability) and ``entropy`` (nats);
    for each k also ``dispersion_kK``, ``separation_kK``, ``mass_kK`` as if the K largest scores were kept.

    Args:
        model: the module whose forward calls are counted; an encoder of semdiag_models or any transformer that
            :func:`semdiag.watch_attention` understands.
        every: forward calls in training mode from one look to the next; the first call is looked at.
        k: numbers of heavy hitters for the counterfactual columns.
        path: ``.csv`` or ``.parquet`` to which the rows are added as they come; an existing one is continued.
        tensorboard: a directory for TensorBoard, or a SummaryWriter.
        seed: of the choice of samples and queries.
        first_step: number of the first step, for resumed trainings.

    Raises:
        InputError: if an argument is illegal, the file cannot be continued, TensorBoard is not installed, or
            (on start) the model has no attention that can be watched.

    Example:
        >>> from semdiag_models import Encoder, ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=2)).train()
        >>> with Monitor(encoder, every=2) as monitor:
        ...     for _ in range(3):
        ...         loss = encoder(torch.tensor([[0, 1, 1, 0]])).sum()
        >>> monitor.table[["step", "layer", "rows"]].values.tolist()
        [[0, 0, 4], [0, 1, 4], [2, 0, 4], [2, 1, 4]]
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 200,
        *,
        k: Sequence[int] = (),
        path: Path | str | None = None,
        tensorboard: Path | str | ScalarWriter | None = None,
        seed: int = 0,
        first_step: int = 0,
    ) -> None:
        if every < 1:
            raise InputError(f"every must be at least 1 forward call. Got {every}.")
        if any(value < 1 for value in k):
            raise InputError(f"k must be at least 1. Got {min(k)}.")
        self.model, self.every, self.k, self.step = model, every, tuple(k), first_step
        self.seconds = 0.0
        self._log = MonitorLog(None if path is None else Path(path), columns(self.k))
        self._tensorboard, self._own_writer = tensorboard, False
        self._writer: Any = None
        self._generator = torch.Generator().manual_seed(seed)
        self._handles: list[Any] = []
        self._look = ExitStack()
        self._looked_at: int | None = None
        self._rows: list[dict[str, Any]] = []

    @property
    def table(self) -> pd.DataFrame:
        """All rows so far, those of a continued file included."""
        return self._log.table()

    def start(self) -> Self:
        """Begin to count and to look; ``with Monitor(…)`` does it.

        Returns:
            This monitor.

        Raises:
            InputError: if the model has no attention that can be watched, or TensorBoard is not installed.
        """
        if self._handles:
            return self
        with watch_attention(self.model, lambda call: None):
            pass  # a model that cannot be watched is refused here, not in the middle of a training
        self._writer, self._own_writer = _writer(self._tensorboard)
        self._handles = [
            self.model.register_forward_pre_hook(self._before),
            self.model.register_forward_hook(self._after, always_call=True),
        ]
        return self

    def stop(self) -> None:
        """Leave the model as it was found; rows stay readable."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._look.close()
        if self._own_writer and self._writer is not None:
            self._writer.close()
        self._writer, self._own_writer = None, False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _before(self, model: nn.Module, inputs: object) -> None:
        if not model.training:
            return
        self._look.close()  # of a call that was interrupted
        self._looked_at = None
        step, self.step = self.step, self.step + 1
        if step % self.every == 0:
            self._rows = []
            self._look.enter_context(watch_attention(model, lambda call: self._reduce(call, step)))
            self._looked_at = step

    def _after(self, model: nn.Module, inputs: object, output: object) -> None:
        self._look.close()
        step, self._looked_at = self._looked_at, None
        if step is not None and output is not None:  # None: the forward raised an exception
            self._finish(step)

    def _reduce(self, call: AttentionCall, step: int) -> None:
        start = time.perf_counter()
        place = {"step": step, "layer": call.layer, "module": call.module, "occurrence": call.occurrence}
        self._rows.append(place | describe(*sampled_rows(call, self.k, self._generator), self.k))
        self.seconds += time.perf_counter() - start

    def _finish(self, step: int) -> None:
        start = time.perf_counter()
        if not self._rows:
            warnings.warn(f"No attention was captured in step {step}.", stacklevel=2)
        self._log.add(self._rows)
        if self._writer is not None:
            self._write_scalars(step)
        self._rows = []
        self.seconds += time.perf_counter() - start

    def _write_scalars(self, step: int) -> None:
        for row in self._rows:
            again = f".{row['occurrence']}" if row["occurrence"] else ""
            for name in columns(self.k)[5:]:
                if not math.isnan(row[name]):
                    self._writer.add_scalar(f"{name}/layer {row['layer']}{again}", row[name], step)


def columns(k: Sequence[int]) -> list[str]:
    """Names of the columns of a monitor's table."""
    own = ["step", "layer", "module", "occurrence", "rows", "keys", "dispersion", "separation", "xi", "entropy"]
    return own + [f"{name}_k{value}" for value in k for name in ("dispersion", "separation", "mass")]


def sampled_rows(
    call: AttentionCall, k: Sequence[int], generator: torch.Generator
) -> tuple[RowStatistics, Tensor]:
    """Statistics of a few random rows of an attention call.

    Args:
        call: one attention call.
        k: counterfactual numbers of heavy hitters.
        generator: on CPU; chooses samples and queries, the same for all heads.

    Returns:
        The statistics (b, H, r), and which of the rows count, bool (b, 1, r).
    """
    batch, _, length, _ = call.q.shape
    device = call.q.device
    b = torch.randperm(batch, generator=generator)[:_SAMPLES].sort().values.to(device)
    r = torch.randperm(length, generator=generator)[:_QUERIES].sort().values.to(device)
    allowed = _rows_of(call.allowed, b, r)
    if call.causal:
        past = torch.arange(call.k.shape[2], device=device) <= (call.first_query + r)[:, None]
        allowed = past if allowed is None else allowed & past
    statistics = row_statistics(
        call.q[b][:, :, r],
        call.k[b],
        call.scale,
        allowed,
        _rows_of(call.selected, b, r),
        top=min(max(k, default=0), call.k.shape[2]),
        bias=_rows_of(call.bias, b, r),
        softcap=call.softcap,
        sinks=call.sinks,
    )
    everyone = torch.ones(len(b), len(r), dtype=torch.bool, device=device)
    counted = everyone if call.queries is None else call.queries[b][:, r]
    return statistics, counted[:, None]


def describe(statistics: RowStatistics, counted: Tensor, k: Sequence[int]) -> dict[str, float | int]:
    """Medians over the rows that count and have keys; NaN where no row has the quantity."""
    weight = statistics.largest_weight()
    values = {
        "keys": statistics.keys.to(weight.dtype),
        "dispersion": statistics.dispersion(),
        "separation": statistics.separation(),
        "xi": local_stability_of_weight(weight),
        "entropy": statistics.entropy,
    }
    for value in k:
        most = min(value, len(statistics.top_load))
        values[f"dispersion_k{value}"] = statistics.dispersion(most)
        values[f"separation_k{value}"] = statistics.separation(most)
        values[f"mass_k{value}"] = statistics.mass_kept(most)
    used = (counted & (statistics.keys > 0)).expand(weight.shape)
    found: dict[str, float | int] = {"rows": int(used.sum())}
    for name, numbers in values.items():
        there = numbers[used & numbers.isfinite()]
        found[name] = float(there.quantile(0.5)) if len(there) else math.nan
    return found


def _rows_of(values: Tensor | None, b: Tensor, r: Tensor) -> Tensor | None:
    """Rows of a tensor that has four axes and is broadcastable to (B, H, Lq, …)."""
    if values is None:
        return None
    values = values[(None,) * (4 - values.ndim)]
    values = values[b] if values.shape[0] > 1 else values
    return values[:, :, r] if values.shape[2] > 1 else values


def _writer(tensorboard: Path | str | ScalarWriter | None) -> tuple[Any, bool]:
    """The writer, and whether it is ours to close."""
    if not isinstance(tensorboard, Path | str):
        return tensorboard, False
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("TensorBoard is not installed. Install it with: pip install tensorboard.") from None
    return SummaryWriter(str(tensorboard)), True
