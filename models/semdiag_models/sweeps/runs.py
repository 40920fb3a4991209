"""One run of a sweep: its record and progress, and its training in a process of its own."""

import csv
import io
import json
import math
import shlex
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from semdiag_models.checkpoint import Checkpoint, read_checkpoint, weights_sha256
from semdiag_models.config import ModelConfig, TrainingConfig
from semdiag_models.reading import (
    LARGEST_JSON,
    MEBIBYTE,
    InputError,
    csv_cell,
    open_file,
    read_bytes,
    read_json,
    write_text,
)
from semdiag_models.run_folder import SeedRun, open_run, train_run, train_seed_runs
from semdiag_models.sweeps.grid import SweepRun, identity
from semdiag_models.training import (
    HISTORY_COLUMNS,
    DivergedError,
    find_device,
    random_state,
)

RUNS, HISTORIES = "runs.parquet", "histories.parquet"
_LARGEST = 64 * MEBIBYTE


def read_packed(folder: Path, name: str) -> dict[str, Any] | None:
    """Read a record from the tables of a folder."""
    return joined(folder, name) if name in packed_names(folder) else None


def packed_names(folder: Path) -> dict[str, str]:
    """Return the records in a folder's tables, without their histories, by run."""
    return _tables(folder)[0]


def joined(folder: Path, name: str) -> dict[str, Any]:
    """Return a run's record in a folder's tables."""
    return record_in(_tables(folder), name)


_Tables = tuple[dict[str, str], dict[str, dict[str, list[float]]]]


def _tables(folder: Path) -> _Tables:
    """Return the records without histories, and the histories, by run; empty without tables."""
    paths = folder / RUNS, folder / HISTORIES
    if not all(path.exists() for path in paths):
        return {}, {}
    stamps = tuple(path.stat().st_mtime_ns for path in paths)
    return _kept(paths, stamps)


@lru_cache(maxsize=4)
def _kept(paths: tuple[Path, Path], stamps: tuple[int, ...]) -> _Tables:
    return read_tables(*paths)


def read_tables(runs: Path, histories: Path) -> _Tables:
    """Read the tables of records and of histories."""
    import pandas as pd

    tables = []
    for path in (runs, histories):
        with open_file(path, _LARGEST) as file:
            try:
                tables.append(pd.read_parquet(file))
            except Exception as error:  # on damaged files the library raises anything
                raise InputError(f"{path} cannot be read as a table ({type(error).__name__}).") from None
    try:
        heads = {
            str(name): str(record) for name, record in zip(tables[0]["run"], tables[0]["record"], strict=True)
        }
        columns = [name for name in tables[1] if name != "run"]
        _ = tables[1]["epoch"]
        found = {
            str(name): {str(column): own[column].tolist() for column in columns}
            for name, own in tables[1].groupby("run", sort=False)
        }
    except KeyError as error:
        raise InputError(f"{runs.parent} holds no records of runs: a table lacks the column {error}.") from None
    return heads, found


def record_in(tables: _Tables, name: str) -> dict[str, Any]:
    """Return a run's record with its history."""
    heads, histories = tables
    try:
        return {**json.loads(heads[name]), "history": histories[name]}
    except (KeyError, ValueError, TypeError):
        raise InputError(f"The record of {name} is damaged.") from None


SCHEMA = "semdiag.run/1"
_DIGITS = 7  # significant digits in a history: float32 has no more


def write_record(folder: Path, run: SweepRun, saved: Checkpoint) -> None:
    """Write a finished run's record, ``NAME.json``, whole or not at all."""
    content = {
        "schema": SCHEMA,
        "run": run.name,
        "model": saved.model.to_dict(),
        "training": saved.training.to_dict(),
        "epochs": saved.epoch,
        "weights": weights_sha256(saved.state),
        "provenance": {
            name: _without_folders(value) if name == "command" else value
            for name, value in saved.provenance.items()
        },
        "history": {name: [_short(value) for value in values] for name, values in saved.history.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{run.name}.json", json.dumps(content, allow_nan=False) + "\n")


def _without_folders(command: str) -> str:
    """Reduce absolute paths in a command, also after ``--option=``, to their last parts."""
    words = []
    for word in shlex.split(command):
        option, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
        words.append(f"{option}{equals}{Path(value).name if Path(value).is_absolute() else value}")
    return shlex.join(words)


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def read_history(folder: Path, run: SweepRun) -> dict[str, list[float]] | None:
    """Return the history in a run's record: its file, or the tables of a finished study."""
    path = folder / f"{run.name}.json"
    content = read_json(path) if path.exists() else read_packed(folder, run.name)
    if content is None:
        return None
    try:
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r}")
        training = TrainingConfig.from_dict(content["training"])
        model = ModelConfig.from_dict(content["model"])
        history: dict[str, list[float]] = content["history"]
        whole = set(history) == set(HISTORY_COLUMNS) and len({len(column) for column in history.values()}) == 1
        if not whole or not all(_is_number(value) for column in history.values() for value in column):
            raise ValueError("its history is not a list of numbers per quantity")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is no record of a run: {error}. Move it away to train the run again.") from None
    if identity(model, training) != identity(run.model, run.training):
        raise InputError(f"{path} is the record of another configuration. Move it away.")
    return history


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


STATUSES = {
    "done": "at its last epoch, or at the accuracy to stop at",
    "begun": "stopped on the way; the next sweep goes on after its last whole epoch",
    "waiting": "not begun, or what was there could not be read",
    "diverged": "the loss is no longer a number; the last good epoch is kept",
    "failed": "stopped by an error, as often as it was tried",
}


@dataclass(frozen=True)
class RunResult:
    """One row of a sweep's results."""

    run: str  # name of the folder
    status: str  # key of ``STATUSES``
    task: str  # label of the task
    attention: str  # kind of attention, with k and global tokens in columns of their own
    k: int | None
    global_tokens: int
    activation: str
    seed: int
    epochs: int  # number of finished epochs, among those requested
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

    runs: tuple[SweepRun, ...]  # runs to train; several of the same size share their steps
    folder: Path  # absolute folder of the run folders, which have the runs' names
    device: str  # ``cpu``, ``cuda`` or ``mps``
    provenance: dict[str, Any]  # stored in every snapshot


@dataclass(frozen=True)
class Outcome:
    """End of an attempt: a status, and one line with the reason unless it is ``done``."""

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
    """Train the runs at these positions; the values tell whether each has begun."""
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
            _write_finished_record(records, run, saved, recorded)
    except InputError as error:
        status, problem = "failed", str(error)
    history = {} if saved is None else saved.history
    if recorded is not None and status not in ("done", "failed") and at_its_end(recorded, run.training):
        status, history = "done", recorded
    if outcome is not None and status != "done":
        status = outcome.status
    epochs, asked = len(history.get("epoch", ())), run.training.epochs
    if epochs > asked:  # the file requested more epochs before
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


def _write_finished_record(
    records: Path, run: SweepRun, saved: Checkpoint | None, recorded: dict[str, list[float]] | None
) -> None:
    """Write the record of a finished run, unless an existing one has as many epochs."""
    known = 0 if recorded is None else len(recorded["epoch"])
    if saved is not None and known < saved.epoch:
        write_record(records, run, saved)


def epochs_left(folder: Path, run: SweepRun, records: Path | None) -> int:
    """Return the number of epochs that a run has left to train, at most."""
    recorded = None if records is None else read_history(records, run)
    if recorded is not None and at_its_end(recorded, run.training):
        return 0
    try:
        status, saved = inspect(folder, run)
    except InputError:
        return 0
    return 0 if status == "done" else max(0, run.training.epochs - (0 if saved is None else saved.epoch))


RESULTS_SCHEMA = "semdiag.sweep/1"


def results_document(rows: list[RunResult], provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the results as plain values for JSON."""
    return {"schema": RESULTS_SCHEMA, "provenance": provenance, "results": [row.to_dict() for row in rows]}


def write_results(folder: Path, rows: list[RunResult], provenance: dict[str, Any]) -> None:
    """Write ``results.csv`` and ``results.json``, each whole or not at all."""
    table = io.StringIO()
    writer = csv.DictWriter(table, [field.name for field in fields(RunResult)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = row.to_dict()
        writer.writerow({key: csv_cell(cell) if isinstance(cell, str) else cell for key, cell in cells.items()})
    document = json.dumps(results_document(rows, provenance), indent=1, allow_nan=False)
    for name, text in (("results.csv", table.getvalue()), ("results.json", document + "\n")):
        write_text(folder / name, text)
