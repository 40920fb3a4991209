"""``semdiag sweep``: trains the runs of a file, and keeps a row and, where asked, a record of each."""

import json
import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semdiag.commands.measuring import command_line
from semdiag.presenting import options
from semdiag.presenting.terminal import beside_json, tell
from semdiag_models.reading import InputError, RunLock, read_json, refuse, write_csv, write_text

if TYPE_CHECKING:
    from semdiag_models import Checkpoint
    from semdiag_models.sweep import Outcome, SweepRun
    from semdiag_models.workers import Workers

SCHEMA = "semdiag.run/1"  # of a record


def sweep(
    config: Annotated[Path, typer.Argument(
        help="TOML file that names the runs. Examples: experiments/ of the repository.", show_default=False,
    )],
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Check the file, and list the runs with the epochs that are left; train nothing.",
    )] = False,
    retries: Annotated[int, typer.Option(help="How often to retry a run whose process died or met an error.")] = 2,
    jobs: Annotated[int | None, options.place_option(
        "Processes at the same time, each with one CPU thread.", show_default="cores",
    )] = None,
    in_a_step: Annotated[int, options.place_option(
        "On CUDA: how many runs that differ only in their seed to train in the same steps. Small models then "
        "take a fraction of the time each.", "--in-a-step",
    )] = 1,
    device: Annotated[str, options.place_option(
        "cpu, cuda, mps or auto.", show_default="cpu; cuda with --gpus-per-run",
    )] = "",
    ray: options.Ray = "",
    gpus_per_run: Annotated[float, options.place_option(
        "With --ray: share of a GPU for each run, like 0.25.",
    )] = 0.0,
    out: Annotated[Path | None, options.output_option("Folder of the runs.", show_default="runs/CONFIG")] = None,
    records: Annotated[Path | None, options.output_option(
        "Keep a small file for every finished run in this folder: configuration, history and the hash of the "
        "weights. A run with such a record counts as done, even if its own folder is gone.", show_default=False,
    )] = None,
    target: Annotated[float, options.output_option(
        "Training accuracy to reach: results count the epochs up to it.",
    )] = 0.95,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    r"""Train a grid of runs: task × attention × seed × any option of semdiag train.

    The keys of the TOML file are the options of semdiag train, with underscores. Keys at the top hold for every
    run. Lists in the grid multiply the runs. Keys that belong together stand in braces:

        until = 0.999

        \[grid]
        task = ["even-pairs", "parity"]
        attention = ["full", { attention = "topk", k = [5, 9] }]
        seed = [1, 2, 3]

    To continue a sweep, run the same command again. Finished runs (recognised by a hash of their configuration)
    are skipped, interrupted ones continue after their last epoch, failed ones are tried again. More:
    docs/commands/training.md.

    [bold]semdiag sweep experiments/study.toml --dry-run[/]
    """
    from semdiag.commands.printing import print_plan, print_results
    from semdiag_models.sweep import read_sweep
    from semdiag_models.training import find_device

    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs must be at least 1. Got {jobs}.")
    if in_a_step < 1:
        raise InputError(f"--in-a-step must be at least 1. Got {in_a_step}.")
    if retries < 0:
        raise InputError(f"--retries must not be negative. Got {retries}.")
    if not 0 < target <= 1:
        raise InputError(f"--target is a training accuracy in (0, 1], like 0.95. Got {target}.")
    if gpus_per_run < 0 or (gpus_per_run and not ray):
        raise InputError("--gpus-per-run must not be negative, and needs --ray.")
    runs = read_sweep(config)
    where = device or ("cuda" if gpus_per_run else "cpu")
    if not ray:
        find_device(where)
    folder = out if out is not None else Path("runs") / config.stem
    if dry_run:
        with beside_json(as_json):
            print_plan(runs, folder, records, as_json, quiet)
        return
    ways = _Ways(where, target, retries, in_a_step, records, quiet)
    rows = _train(runs, folder, ways, lambda left: _workers(ray, gpus_per_run, jobs, left, where))
    with beside_json(as_json):
        print_results(rows, folder, target, as_json, quiet)
    if any(row.status in ("failed", "diverged") for row in rows):
        raise typer.Exit(1)


def _workers(
    ray: str, gpus_per_run: float, jobs: int | None, groups: "Sequence[Sequence[SweepRun]]", device: str
) -> "Workers":
    from semdiag_models.sweep import train_order

    if ray:
        from semdiag_models.workers import RayWorkers

        return RayWorkers(ray, gpus_per_run, jobs, train_order)
    from semdiag_models.training import find_device, training_memory
    from semdiag_models.workers import LocalWorkers

    on_cpu = find_device(device).type == "cpu"
    sizes = [sum(training_memory(run.model, run.training, on_cpu) for run in group) for group in groups]
    return LocalWorkers(jobs, train_order, len(groups), max(sizes))


@dataclass(frozen=True)
class _Ways:
    device: str
    target: float
    retries: int
    in_a_step: int
    records: Path | None
    quiet: bool


def _train(
    runs: "list[SweepRun]", folder: Path, ways: _Ways, workers: "Callable[[Sequence[Sequence[SweepRun]]], Workers]"
) -> list["RunResult"]:
    from semdiag.commands.printing import SweepProgress
    from semdiag_models.sweep import Order, together, train_all

    provenance = {"command": command_line(), "target": ways.target}

    def row_of(run: "SweepRun", outcome: "Outcome | None" = None) -> "RunResult":
        return result(run, folder / run.name, ways.target, outcome, ways.records)

    with ExitStack() as undo:
        if folder.is_dir():
            undo.callback(RunLock(folder).release)
        rows = {run.name: row_of(run) for run in runs}
        left = [run for run in runs if rows[run.name].status in ("begun", "waiting")]
        groups = together(left, ways.in_a_step) if ways.in_a_step > 1 else [(run,) for run in left]
        orders = [Order(group, folder.resolve(), ways.device, provenance) for group in groups]
        if left:
            crew = workers(groups)  # before anything is written: the cluster may be unreachable
            undo.callback(crew.close)
        if not folder.is_dir():
            folder.mkdir(parents=True)
            undo.callback(RunLock(folder).release)
        undo.callback(lambda: write_results(folder, list(rows.values()), provenance))
        if not left:
            return list(rows.values())
        progress = undo.enter_context(SweepProgress(runs, rows, folder, ways.quiet))
        try:
            for event in train_all(orders, crew, ways.retries):
                if event is None:
                    progress.tick()
                    continue
                run, outcome = event
                rows[run.name] = row_of(run, outcome)
                write_results(folder, list(rows.values()), provenance)
                progress.ended(run, rows[run.name])
        except KeyboardInterrupt:
            rows.update({run.name: row_of(run) for run in left if run.name in progress.open})
            done = sum(row.status == "done" for row in rows.values())
            tell(
                f"Stopped; {done} of {len(runs)} runs are done in {folder}. To go on, run the same command again."
            )
            raise typer.Exit(130) from None
    return list(rows.values())


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
    run: "SweepRun", folder: Path, target: float, outcome: "Outcome | None" = None, records: Path | None = None,
    keep: bool = True,
) -> RunResult:  # fmt: skip
    """Return a run's row, from its folder or, if that is not finished, from its record; keep a record of it."""
    from semdiag_models.sweep import inspect
    from semdiag_models.training import ended

    problem, recorded, saved = "" if outcome is None else outcome.problem, None, None
    try:
        if records is not None and (path := records / f"{run.name}.json").exists():
            recorded = read_history(path, read_json(path), run)
        status, saved = inspect(folder, run)
        known = len((recorded or {}).get("epoch", ()))
        if keep and records and saved and status == "done" and saved.epoch > known:
            _write_record(records, run, saved)
    except InputError as error:
        status, problem = "failed", str(error)
    history = {} if saved is None else saved.history
    if recorded is not None and status not in ("done", "failed") and ended(recorded, run.training):
        status, history = "done", recorded
    if outcome is not None and status != "done":
        status = outcome.status
    epochs, asked = len(history.get("epoch", ())), run.training.epochs
    if epochs > asked:  # the file requested more epochs before
        history = {name: values[:asked] for name, values in history.items()}
        problem = problem or f"was trained to epoch {epochs} before; this row is of epoch {asked}"
    train, holdout = history.get("train_accuracy", []), history.get("holdout_accuracy", [])
    return RunResult(
        run.name, status, run.training.task_label, run.model.attention, run.model.k, run.model.global_tokens,
        run.model.activation, run.training.seed, min(epochs, asked),
        next((n for n, reached in enumerate(train, start=1) if reached >= target), None),
        train[-1] if train else None, holdout[-1] if holdout else None, max(holdout, default=None),
        round(sum(history.get("seconds", [])), 3), problem,
    )  # fmt: skip


def read_history(path: Path, content: Any, run: "SweepRun") -> dict[str, list[float]]:
    """Return the history in a run's record, which stands at a path."""
    from semdiag_models import ModelConfig, TrainingConfig
    from semdiag_models.sweep import identity
    from semdiag_models.training import HISTORY_COLUMNS

    try:
        refuse(content["schema"] != SCHEMA, f"its schema is {content['schema']!r}")
        training, model = TrainingConfig.from_dict(content["training"]), ModelConfig.from_dict(content["model"])
        history: dict[str, list[float]] = content["history"]
        whole = set(history) == set(HISTORY_COLUMNS) and len({len(column) for column in history.values()}) == 1
        finite = all(type(v) in (int, float) and math.isfinite(v) for c in history.values() for v in c)
        refuse(not whole or not finite, "its history is not a list of numbers per quantity")
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
