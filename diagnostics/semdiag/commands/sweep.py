"""``semdiag sweep``: trains the runs of a file."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semdiag.commands.measuring import command_line
from semdiag.commands.sweep_results import RunResult, result, write_results
from semdiag.presenting import options
from semdiag.presenting.terminal import tell
from semdiag_files import InputError, RunLock

if TYPE_CHECKING:
    from semdiag.commands.printing import SweepProgress
    from semdiag_files.workers import Workers
    from semdiag_models.sweep import AttemptOutcome, Order, SweepRun


def sweep(
    config: Annotated[Path, typer.Argument(
        help="TOML file that names the runs. Examples: experiments/ of the repository.", show_default=False,
    )],
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Check the file, and list the runs with the epochs that are left; train nothing.",
    )] = False,
    retries: Annotated[int, typer.Option(
        help="How often to retry a run whose process died or met an error.", hidden=True,
    )] = 2,
    jobs: Annotated[int | None, options.place_option(
        "Processes at the same time, each with one CPU thread.", show_default="cores", rare=True,
    )] = None,
    in_a_step: Annotated[int, options.place_option(
        "On CUDA: how many runs that differ only in their seed to train in the same steps. Small models then "
        "take a fraction of the time each.", "--in-a-step", rare=True,
    )] = 1,
    device: Annotated[str, options.place_option(
        "cpu, cuda, mps or auto.", show_default="cpu; cuda with --gpus-per-run",
    )] = "",
    ray: options.Ray = "",
    gpus_per_run: Annotated[float, options.place_option(
        "With --ray: share of a GPU for each run, like 0.25.", rare=True,
    )] = 0.0,
    out: Annotated[Path | None, options.output_option("Folder of the runs.", show_default="runs/CONFIG")] = None,
    records: Annotated[Path | None, options.output_option(
        "Keep configuration, history and the hash of the weights of every finished run in this folder. A run "
        "with such a record counts as done, even without its own folder.", show_default=False, rare=True,
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
    from semdiag_models.train import find_device

    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs must be at least 1. Got {jobs}.")
    if gpus_per_run < 0 or (gpus_per_run and not ray):
        raise InputError("--gpus-per-run must not be negative, and needs --ray.")
    device = device or ("cuda" if gpus_per_run else "cpu")
    sweep_options = SweepOptions(device, target, retries, in_a_step, records, quiet)
    runs = read_sweep(config)
    if not ray:
        find_device(device)
    folder = out if out is not None else Path("runs") / config.stem
    if dry_run:
        print_plan(runs, folder, records, as_json, quiet)
        return
    rows = _train(runs, folder, sweep_options, lambda groups: _workers(ray, gpus_per_run, jobs, groups, device))
    print_results(rows, folder, target, as_json, quiet)
    if any(row.status in ("failed", "diverged") for row in rows):
        raise typer.Exit(1)


def _workers(
    ray: str, gpus_per_run: float, jobs: int | None, groups: "Sequence[Sequence[SweepRun]]", device: str
) -> "Workers":
    from semdiag_models.sweep import train_order

    if ray:
        from semdiag_files.workers import RayWorkers

        return RayWorkers(ray, gpus_per_run, jobs, train_order)
    from semdiag_files.workers import LocalWorkers
    from semdiag_models.train import find_device, training_memory

    on_cpu = find_device(device).type == "cpu"
    sizes = [sum(training_memory(run.model, run.training, on_cpu) for run in group) for group in groups]
    return LocalWorkers(jobs, train_order, len(groups), max(sizes))


@dataclass(frozen=True)
class SweepOptions:
    """How the runs of a sweep are trained."""

    device: str
    target: float  # training accuracy, in (0, 1]
    retries: int  # of a run whose process died or met an error
    in_a_step: int  # runs that are trained in the same steps
    records: Path | None  # folder
    quiet: bool

    def __post_init__(self) -> None:
        if self.in_a_step < 1:
            raise InputError(f"--in-a-step must be at least 1. Got {self.in_a_step}.")
        if self.retries < 0:
            raise InputError(f"--retries must not be negative. Got {self.retries}.")
        if not 0 < self.target <= 1:
            raise InputError(f"--target is a training accuracy in (0, 1], like 0.95. Got {self.target}.")


class _Rows:
    """The rows of a sweep by run, in files that every finished run rewrites."""

    def __init__(self, runs: "list[SweepRun]", folder: Path, sweep_options: SweepOptions) -> None:
        self._folder = folder
        self._options = sweep_options
        self.provenance = {"command": command_line(), "target": sweep_options.target}
        self.by_run: dict[str, RunResult] = {}
        self.update_all(runs)

    def update(self, run: "SweepRun", outcome: "AttemptOutcome | None" = None) -> RunResult:
        """Read a run's row from its folder or its record."""
        folder = self._folder / run.name
        row = result(run, folder, self._options.target, outcome, self._options.records)
        self.by_run[run.name] = row
        return row

    def update_all(self, runs: "Iterable[SweepRun]") -> None:
        """Read the rows of several runs."""
        for run in runs:
            self.update(run)

    def write(self) -> None:
        """Write the files of results."""
        write_results(self._folder, self.listed(), self.provenance)

    def listed(self) -> list[RunResult]:
        """Return the rows in the order of the runs."""
        return list(self.by_run.values())


def _train(
    runs: "list[SweepRun]",
    folder: Path,
    sweep_options: SweepOptions,
    open_workers: "Callable[[Sequence[Sequence[SweepRun]]], Workers]",
) -> list[RunResult]:
    from semdiag.commands.printing import SweepProgress
    from semdiag_models.sweep import Order, together

    with ExitStack() as undo:
        if folder.is_dir():
            undo.callback(RunLock(folder).release)
        rows = _Rows(runs, folder, sweep_options)
        left = [run for run in runs if rows.by_run[run.name].status in ("begun", "waiting")]
        groups = together(left, sweep_options.in_a_step) if sweep_options.in_a_step > 1 else [(r,) for r in left]
        orders = [Order(group, folder.resolve(), sweep_options.device, rows.provenance) for group in groups]
        if left:
            workers = open_workers(groups)  # before anything is written: the cluster may be unreachable
            undo.callback(workers.close)
        if not folder.is_dir():
            folder.mkdir(parents=True)
            undo.callback(RunLock(folder).release)
        undo.callback(rows.write)
        if not left:
            return rows.listed()
        progress = undo.enter_context(SweepProgress(runs, rows.by_run, folder, sweep_options.quiet))
        try:
            _train_orders(orders, workers, sweep_options.retries, rows, progress)
        except KeyboardInterrupt:
            done = sum(row.status == "done" for row in rows.listed())
            tell(
                f"Stopped; {done} of {len(runs)} runs are done in {folder}. To go on, run the same command again."
            )
            raise typer.Exit(130) from None
    return rows.listed()


def _train_orders(
    orders: "list[Order]", workers: "Workers", retries: int, rows: _Rows, progress: "SweepProgress"
) -> None:
    """Train runs, and write the rows at every end of one."""
    from semdiag_models.sweep import train_all

    try:
        for event in train_all(orders, workers, retries):
            if event is None:
                progress.tick()
                continue
            run, outcome = event
            row = rows.update(run, outcome)
            rows.write()
            progress.ended(run, row)
    finally:  # what is begun after an interrupt, or a cluster's death
        rows.update_all(run for order in orders for run in order.runs if run.name in progress.open)
