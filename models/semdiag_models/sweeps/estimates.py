"""Estimate how long the runs of a sweep will take."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from semdiag_models.device import find_device
from semdiag_models.errors import InputError
from semdiag_models.memory_needs import training_memory
from semdiag_models.random_state import random_state, restore_random_state
from semdiag_models.sweeps.grid import SweepRun
from semdiag_models.sweeps.records import read_history
from semdiag_models.sweeps.runs import at_its_end, inspect
from semdiag_models.training import Trainer

STEPS = 3  # timed steps, after an untimed one
_COSTLY = (
    "train_samples", "holdout_samples", "batch_size", "optimizer", "precision", "compiled", "listops",
)  # fmt: skip
_HELD_OUT = 25  # further samples to evaluate
_COLD = 20.0  # seconds: anything faster is timed again, without warm-up costs
_WHOLE, _LARGEST = 2**28, 2**30  # bytes up to which a whole model, or one block of it, is timed


@dataclass(frozen=True)
class Estimate:
    """The remaining work of one run."""

    epochs: int  # left to train; fewer if the target accuracy is reached before
    epoch_seconds: float  # per epoch, including evaluation

    @property
    def hours(self) -> float:
        """Upper limit in hours, on one thread."""
        return self.epochs * self.epoch_seconds / 3600


def estimate(
    runs: list[SweepRun],
    folder: Path,
    device: str,
    tell: Callable[[str], None] = lambda line: None,
    records: Path | None = None,
) -> list[Estimate]:
    """Estimate every run by timing a few steps."""
    known: dict[tuple[tuple[str, object], ...], float] = {}
    estimates = []
    first: dict[str, tuple[tuple[str, object], ...]] = {}
    for run in runs:
        left, cost = _epochs_left(folder / run.name, run, records), _cost(run)
        label = f"{run.training.task_label}, {run.model.attention_label}, length {run.model.length}"
        usual = first.setdefault(label, cost)
        if cost not in known and left:
            other = (f", {name.replace('_', ' ')} {value}" for name, value in cost if (name, value) not in usual)
            tell(f"Timing {label}{''.join(other)}")
            known[cost] = time_epoch(run, device)
        estimates.append(Estimate(left, known.get(cost, 0.0)))
    return estimates


def _epochs_left(folder: Path, run: SweepRun, records: Path | None) -> int:
    """Return the number of epochs that are left to train."""
    recorded = None if records is None else read_history(records, run)
    if recorded is not None and at_its_end(recorded, run.training):
        return 0
    try:
        status, saved = inspect(folder, run)
    except InputError:
        return 0
    return 0 if status == "done" else max(0, run.training.epochs - (0 if saved is None else saved.epoch))


def _cost(run: SweepRun) -> tuple[tuple[str, object], ...]:
    """Return what determines an epoch's cost up to a few per cent: equal across seeds and tasks of a length."""
    model = replace(run.model, activation="relu", selection_seed=0)
    if run.training.text is None:  # a small vocabulary costs nothing
        model = replace(model, vocabulary_size=2, classes=2)
    return (*vars(model).items(), *((name, getattr(run.training, name)) for name in _COSTLY))


def _timed(trainer: Trainer) -> tuple[float, float]:
    """Return the seconds of a step, and of evaluating a sample, in a short training."""
    moments: list[float] = []
    trainer.run(lambda progress: None, lambda: moments.append(time.perf_counter()))
    evaluated = trainer.training.train_samples + trainer.training.holdout_samples
    sample = (time.perf_counter() - moments[-1]) / evaluated
    return statistics.median(later - sooner for sooner, later in pairwise(moments)), sample


def time_epoch(run: SweepRun, device: str) -> float:
    """Return the seconds of one epoch of a run on one thread, extrapolated from a few steps and evaluations."""
    training, where, threads = run.training, find_device(device), torch.get_num_threads()
    batch = min(training.batch_size, training.train_samples)
    few = replace(
        training,
        epochs=1,
        until=None,
        snapshots=(),
        train_samples=(STEPS + 1) * batch,
        holdout_samples=_HELD_OUT,
    )
    model, times, on_cpu = run.model, 1, where.type == "cpu"
    if training_memory(model, few, on_cpu) > _WHOLE:
        model, times = replace(model, blocks=1), model.blocks
    if (needed := training_memory(model, few, on_cpu)) > _LARGEST:
        raise InputError(
            f"{run.name} cannot be timed: one block in training takes more than {needed / 2**30:,.1f} GiB of "
            f"memory, and a dry run takes up to {_LARGEST / 2**30:.0f}. Make it smaller, or train it without "
            "--dry-run."
        )
    before = random_state(where)
    try:
        torch.set_num_threads(1)
        began = time.perf_counter()
        step, sample = _timed(Trainer(model, few, where))
        if time.perf_counter() - began < _COLD:  # it may have included the compilation of kernels
            step, sample = _timed(Trainer(model, few, where))
    finally:
        torch.set_num_threads(threads)
        restore_random_state(before)
    steps = -(-training.train_samples // training.batch_size)
    return times * (steps * step + (training.train_samples + training.holdout_samples) * sample)
