"""One run of a sweep: its progress, and training it to its end in a process of its own."""

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from semdiag_models.checkpoint import Checkpoint, read_checkpoint
from semdiag_models.device import find_device
from semdiag_models.errors import InputError
from semdiag_models.random_state import random_state
from semdiag_models.reading import LARGEST_JSON, read_bytes
from semdiag_models.run_folder import open_run, train_run
from semdiag_models.seed_runs import SeedRun, train_seed_runs
from semdiag_models.sweeps.grid import SweepRun, identity
from semdiag_models.sweeps.records import read_history, write_record
from semdiag_models.training import DivergedError
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
    """A row of a sweep's results."""

    run: str  # name of the folder
    status: str  # a key of ``STATUSES``
    task: str  # what was learned
    attention: str  # kind, with k and global tokens in columns of their own
    k: int | None
    global_tokens: int
    activation: str
    seed: int
    epochs: int  # finished ones, among those requested
    epochs_to_target: int | None  # first epoch that reaches the target's training accuracy; None if none does
    train_accuracy: float | None  # after the last epoch, in [0, 1]
    holdout_accuracy: float | None  # after the last epoch
    best_holdout_accuracy: float | None  # after the best epoch
    seconds: float  # of all epochs, including evaluation; summed over interruptions
    problem: str  # what went wrong, or that there are more epochs, in one line

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Order:
    """What a worker process needs to train runs; everything in it can be pickled."""

    runs: tuple[SweepRun, ...]  # to train; several of the same size share their steps
    folder: Path  # of the run folders, which have the runs' names; absolute
    device: str  # ``cpu``, ``cuda`` or ``mps``
    provenance: dict[str, Any]  # stored in every snapshot


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: a status, and one line with the reason unless it is ``done``."""

    status: str
    problem: str = ""
    retry: bool = False  # whether another attempt may succeed


def inspect(folder: Path, run: SweepRun) -> tuple[str, Checkpoint | None]:
    """Return the progress of a run."""
    last = folder / "last.pt"
    if not last.exists():
        return "waiting", None
    try:
        saved = read_checkpoint(last)
    except InputError:
        return "waiting", None
    if identity(saved.model, saved.training) != identity(run.model, run.training):
        raise InputError(f"{folder} holds a run of another configuration. Move it away, or choose another --out.")
    return ("done" if at_its_end(saved.history, run.training) else "begun"), saved


def at_its_end(history: dict[str, list[float]], training: TrainingConfig) -> bool:
    """Return whether a run with this history has all its epochs, or has reached the target accuracy."""
    accuracies = history.get("train_accuracy", [])
    converged = training.until is not None and bool(accuracies) and accuracies[-1] >= training.until
    return len(accuracies) >= training.epochs or converged


def train_order(order: Order) -> list[Outcome]:
    """Train runs to their ends from their current state, on one CPU thread, in a process of its own."""
    torch.set_num_threads(1)
    ended, left = [Outcome("done") for _ in order.runs], []
    for i, run in enumerate(order.runs):
        try:
            status, saved = inspect(order.folder / run.name, run)
        except InputError as error:
            ended[i] = Outcome("failed", str(error))
        else:
            if status != "done":
                left.append((i, saved is not None))
    try:
        _train(order, left)
    except DivergedError as error:
        for member in error.members:
            ended[left[member][0]] = Outcome("diverged", str(error))
    except InputError as error:
        ended = [Outcome("failed", str(error)) if i in dict(left) else outcome for i, outcome in enumerate(ended)]
    except Exception as error:  # full disk, no memory, a bug of ours: record it, and try again
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        failed = Outcome("failed", problem, retry=True)
        ended = [failed if i in dict(left) else outcome for i, outcome in enumerate(ended)]
    return ended


def _train(order: Order, left: list[tuple[int, bool]]) -> None:
    """Train the runs at these positions; the values say whether each has begun."""
    device, runs = find_device(order.device), []
    with ExitStack() as undo:
        for i, begun in left:
            run = order.runs[i]
            folder = order.folder / run.name
            trainer = open_run(folder, run.model, run.training, device, resume=begun, overwrite=not begun)
            undo.callback(trainer.release)
            runs.append(SeedRun(folder, trainer, random_state(device)))
        if len(runs) == 1:
            (one,) = runs
            train_run(one.folder, one.trainer, order.provenance)
        elif runs:
            train_seed_runs(runs, order.provenance)


def epochs_so_far(folder: Path) -> int:
    """Return the finished epochs of a run that may be training, from ``history.csv``."""
    try:
        return read_bytes(folder / "history.csv", LARGEST_JSON).count(b"\n") - 1
    except InputError:
        return 0


def result(
    run: SweepRun, folder: Path, target: float, outcome: Outcome | None = None, records: Path | None = None
) -> RunResult:
    """Return a run's row, from its folder or, if that is not finished, from its record."""
    problem = "" if outcome is None else outcome.problem
    recorded: dict[str, list[float]] | None = None
    saved: Checkpoint | None = None
    try:
        recorded = None if records is None else read_history(records, run)
        status, saved = inspect(folder, run)
        if status == "done" and records is not None:
            _record(records, run, saved, recorded)
    except InputError as error:
        status, problem = "failed", str(error)
    history = {} if saved is None else saved.history
    if recorded is not None and status not in ("done", "failed") and at_its_end(recorded, run.training):
        status, history = "done", recorded
    if outcome is not None and status != "done":
        status = outcome.status
    epochs, asked = len(history.get("epoch", ())), run.training.epochs
    if epochs > asked:  # the file requested more before
        history = {name: values[:asked] for name, values in history.items()}
        problem = problem or f"was trained to epoch {epochs} before; this row is of epoch {asked}"
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
        epochs=min(epochs, asked),
        epochs_to_target=next((n for n, reached in enumerate(train, start=1) if reached >= target), None),
        train_accuracy=train[-1] if train else None,
        holdout_accuracy=holdout[-1] if holdout else None,
        best_holdout_accuracy=max(holdout, default=None),
        seconds=round(sum(history.get("seconds", [])), 3),
        problem=problem,
    )


def _record(
    records: Path, run: SweepRun, saved: Checkpoint | None, recorded: dict[str, list[float]] | None
) -> None:
    """Write the record of a finished run, unless an existing one goes as far."""
    known = 0 if recorded is None else len(recorded["epoch"])
    if saved is not None and known < saved.epoch:
        write_record(records, run, saved)
