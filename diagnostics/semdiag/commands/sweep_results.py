"""Rows and records of a sweep's runs, and the files that hold them."""

import json
import math
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semdiag_files import InputError, read_json, write_csv, write_text

if TYPE_CHECKING:
    from semdiag_models import Checkpoint
    from semdiag_models.sweep import AttemptOutcome, SweepRun

SCHEMA = "semdiag.run/1"  # of a record


@dataclass(frozen=True)
class RunResult:
    """One row of a sweep's results."""

    run: str  # name of the folder
    status: str  # done, begun, waiting, diverged or failed: docs/commands/training.md
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


def result(
    run: "SweepRun",
    folder: Path,
    target: float,
    outcome: "AttemptOutcome | None" = None,
    records: Path | None = None,
    keep: bool = True,
) -> RunResult:
    """Return a run's row, from its folder or, if that is not finished, from its record; keep a record of it."""
    status, history, problem = _state(run, folder, records, keep)
    if outcome is not None:
        problem = problem or outcome.problem
        if status != "done":
            status = outcome.status
    epochs = len(history.get("epoch", ()))
    requested = run.training.epochs
    if epochs > requested:  # the file requested more epochs before
        history = {name: values[:requested] for name, values in history.items()}
        problem = problem or f"was trained to epoch {epochs} before; this row is of epoch {requested}"
    train = history.get("train_accuracy", [])
    holdout = history.get("holdout_accuracy", [])
    return RunResult(
        run=run.name,
        status=status,
        task=run.training.task_label,
        attention=run.model.attention,
        k=run.model.k,
        global_tokens=run.model.global_tokens,
        activation=run.model.activation,
        seed=run.training.seed,
        epochs=min(epochs, requested),
        epochs_to_target=next((n for n, accuracy in enumerate(train, start=1) if accuracy >= target), None),
        train_accuracy=train[-1] if train else None,
        holdout_accuracy=holdout[-1] if holdout else None,
        best_holdout_accuracy=max(holdout, default=None),
        seconds=round(sum(history.get("seconds", [])), 3),
        problem=problem,
    )


def _state(
    run: "SweepRun", folder: Path, records: Path | None, keep: bool
) -> tuple[str, dict[str, list[float]], str]:
    """Return status, history and problem of a run, from its folder and its record."""
    from semdiag_models.sweep import inspect
    from semdiag_models.train import ended

    saved: Checkpoint | None = None
    recorded: dict[str, list[float]] = {}
    record = None if records is None else records / f"{run.name}.json"
    try:
        if record is not None and record.exists():
            recorded = read_history(record, read_json(record), run)
        status, saved = inspect(folder, run)
        recorded_epochs = len(recorded.get("epoch", ()))
        if keep and records and saved and status == "done" and saved.epoch > recorded_epochs:
            _write_record(records, run, saved)
    except InputError as error:
        return "failed", {} if saved is None else saved.history, str(error)
    if recorded and status != "done" and ended(recorded, run.training):
        return "done", recorded, ""
    return status, {} if saved is None else saved.history, ""


def read_history(path: Path, content: Any, run: "SweepRun") -> dict[str, list[float]]:
    """Return the history in a run's record, which stands at a path."""
    from semdiag_models import ModelConfig, TrainingConfig
    from semdiag_models.sweep import identity
    from semdiag_models.train import HISTORY_COLUMNS

    try:
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r}")
        training = TrainingConfig.from_dict(content["training"])
        model = ModelConfig.from_dict(content["model"])
        history: dict[str, list[float]] = content["history"]
        complete = set(history) == set(HISTORY_COLUMNS) and len({len(c) for c in history.values()}) == 1
        finite = all(type(v) in (int, float) and math.isfinite(v) for c in history.values() for v in c)
        if not complete or not finite:
            raise ValueError("its history is not a list of numbers per quantity")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is no record of a run: {error}. Move it away to train the run again.") from None
    if identity(model, training) != identity(run.model, run.training):
        raise InputError(f"{path} is the record of another configuration. Move it away.")
    return history


def _write_record(folder: Path, run: "SweepRun", saved: "Checkpoint") -> None:
    """Write a finished run's record, ``NAME.json``; a history has seven digits, as float32 has no more."""
    from semdiag_models import weights_sha256

    facts = {k: _without_folders(v) if k == "command" else v for k, v in saved.provenance.items()}
    short = {k: [v if isinstance(v, int) else float(f"{v:.7g}") for v in c] for k, c in saved.history.items()}
    content = {
        "schema": SCHEMA, "run": run.name, "model": saved.model.to_dict(), "training": saved.training.to_dict(),
        "epochs": saved.epoch, "weights": weights_sha256(saved.state), "provenance": facts, "history": short,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{run.name}.json", json.dumps(content, allow_nan=False) + "\n")


def _without_folders(command: str) -> str:
    """Reduce absolute paths in a command, also after ``--option=``, to their last parts."""
    words = []
    for word in shlex.split(command):
        option, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
        words.append(f"{option}{equals}{Path(value).name if Path(value).is_absolute() else value}")
    return shlex.join(words)


def results_document(rows: list[RunResult], provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the results as plain values for JSON."""
    return {"schema": "semdiag.sweep/1", "provenance": provenance, "results": [vars(row) for row in rows]}


def write_results(folder: Path, rows: list[RunResult], provenance: dict[str, Any]) -> None:
    """Write ``results.csv`` and ``results.json``, each whole or not at all."""
    write_csv(folder / "results.csv", [[f.name for f in fields(RunResult)], *(vars(row).values() for row in rows)])
    document = json.dumps(results_document(rows, provenance), indent=1, allow_nan=False)
    write_text(folder / "results.json", document + "\n")
