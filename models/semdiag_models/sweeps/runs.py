"""One run of a sweep: how far its folder is, and training it to its end in a process of its own."""

import csv
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from semdiag_models.checkpoint import Checkpoint, read_checkpoint
from semdiag_models.device import find_device
from semdiag_models.errors import InputError
from semdiag_models.run_folder import open_run, train_run
from semdiag_models.sweeps.grid import SweepRun, identity
from semdiag_models.training import DivergedError, Trainer
from semdiag_models.training_config import TrainingConfig

STATUSES = {
    "done": "at its last epoch, or at the accuracy to stop at",
    "begun": "stopped on the way; the next sweep goes on after its last whole epoch",
    "waiting": "not begun, or what was there could not be read",
    "diverged": "the loss is no longer a number; the last good epoch is kept",
    "failed": "stopped by an error, as often as it was tried",
}


@dataclass(frozen=True)
class RunResult:
    """A row of a sweep's results.

    Attributes:
        run: name of the folder.
        status: a key of ``STATUSES``.
        task: what was learned.
        attention: kind, with k and global tokens in columns of their own.
        epochs: finished ones.
        epochs_to_target: first epoch with at least the target's training accuracy; None if there was none.
        train_accuracy: after the last epoch, in [0, 1].
        holdout_accuracy: after the last epoch.
        best_holdout_accuracy: after the best epoch.
        seconds: of all epochs, evaluation included; sums over interruptions.
        problem: what went wrong, in one line.
    """

    run: str
    status: str
    task: str
    attention: str
    k: int | None
    global_tokens: int
    activation: str
    seed: int
    epochs: int
    epochs_to_target: int | None
    train_accuracy: float | None
    holdout_accuracy: float | None
    best_holdout_accuracy: float | None
    seconds: float
    problem: str

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Order:
    """What a worker needs to know: everything can be sent to another process.

    Attributes:
        run: what to train.
        folder: the run's, absolute.
        device: ``cpu``, ``cuda`` or ``mps``.
        provenance: stored in every snapshot.
        parent: process with which the training ends, if it should end with one.
    """

    run: SweepRun
    folder: Path
    device: str
    provenance: dict[str, Any]
    parent: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: a status, and in one line why, if it is not ``done``."""

    status: str
    problem: str = ""
    retry: bool = False  # whether another attempt could end better


def inspect(folder: Path, run: SweepRun) -> tuple[str, Checkpoint | None]:
    """How far a run is.

    Snapshots are written whole or not at all, so a crash leaves a folder with an older ``last.pt`` or without
    one; a file that still cannot be read, after a disk failed, counts as not there.

    Args:
        folder: the run's; it need not exist.
        run: what should be in it.

    Returns:
        ``done``, ``begun`` or ``waiting``, and what ``last.pt`` holds.

    Raises:
        InputError: if the folder holds another run: it is left alone.
    """
    last = folder / "last.pt"
    if not last.exists():
        return "waiting", None
    try:
        saved = read_checkpoint(last)
    except InputError:
        return "waiting", None
    if identity(saved.model, saved.training) != identity(run.model, run.training):
        raise InputError(f"{folder} holds a run of another configuration. Move it away, or choose another --out.")
    return ("done" if _at_its_end(saved, run.training) else "begun"), saved


def _at_its_end(saved: Checkpoint, training: TrainingConfig) -> bool:
    accuracies = saved.history.get("train_accuracy", [])
    converged = training.until is not None and bool(accuracies) and accuracies[-1] >= training.until
    return saved.epoch >= training.epochs or converged


def train_order(order: Order) -> Outcome:
    """Train a run from where it is to its end, on one CPU thread; for a process of its own.

    Args:
        order: what, where and on which device.

    Returns:
        How it ended; nothing is raised, so that one run's error stops no other.
    """
    torch.set_num_threads(1)
    try:
        status, saved = inspect(order.folder, order.run)
        if status == "done":
            return Outcome("done")
        device, begun = find_device(order.device), saved is not None
        trainer = open_run(
            order.folder, order.run.model, order.run.training, device, resume=begun, overwrite=not begun
        )
        train_run(order.folder, trainer, order.provenance, after_batch=lambda: _end_with_parent(order, trainer))
    except DivergedError as error:
        return Outcome("diverged", str(error))
    except InputError as error:
        return Outcome("failed", str(error))
    except Exception as error:  # a full disk, no memory, an error of ours: recorded, and tried again
        return Outcome("failed", f"{type(error).__name__}: {' '.join(str(error).split())}"[:300], retry=True)
    return Outcome("done")


def _end_with_parent(order: Order, trainer: Trainer) -> None:
    """Leave when the sweep was killed, so that the next one finds the folder free."""
    if order.parent is not None and os.getppid() != order.parent:
        trainer.release()
        os._exit(1)


def epochs_so_far(folder: Path) -> int:
    """Finished epochs of a run that may be in training, from ``history.csv``."""
    try:
        with (folder / "history.csv").open(encoding="utf-8", newline="") as file:
            return sum(1 for _ in csv.reader(file)) - 1
    except OSError:
        return 0


def result(run: SweepRun, folder: Path, target: float, outcome: Outcome | None = None) -> RunResult:
    """Read a run's row from its folder.

    Args:
        run: what was trained.
        folder: the run's.
        target: training accuracy in (0, 1].
        outcome: of the attempt just made; without one, the folder alone decides.

    Returns:
        The row.
    """
    problem = "" if outcome is None else outcome.problem
    try:
        status, saved = inspect(folder, run)
    except InputError as error:
        status, saved, problem = "failed", None, str(error)
    if outcome is not None and status != "done":
        status = outcome.status
    history = {} if saved is None else saved.history
    train, holdout = history.get("train_accuracy", []), history.get("holdout_accuracy", [])
    return RunResult(
        run=run.name,
        status=status,
        task=run.training.task_label,
        attention=run.model.attention,
        k=run.model.k,
        global_tokens=run.model.global_tokens,
        activation=run.model.activation,
        seed=run.training.seed,
        epochs=0 if saved is None else saved.epoch,
        epochs_to_target=next((n for n, reached in enumerate(train, start=1) if reached >= target), None),
        train_accuracy=train[-1] if train else None,
        holdout_accuracy=holdout[-1] if holdout else None,
        best_holdout_accuracy=max(holdout, default=None),
        seconds=round(sum(history.get("seconds", [])), 3),
        problem=problem,
    )
