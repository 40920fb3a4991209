"""What ``semdiag sweep`` prints before, while and after it runs."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer

from semdiag.commands.measuring import command_line
from semdiag.commands.printing.timed_bar import TimedBar
from semdiag.measuring.counted import counted
from semdiag.presenting.columns import NEVER, Column, count, percent, text, two_decimals
from semdiag.presenting.terminal.minutes import minutes
from semdiag.presenting.terminal.terminal import say, tell

if TYPE_CHECKING:
    from semdiag_models.sweeps.estimates import Estimate
    from semdiag_models.sweeps.grid import SweepRun
    from semdiag_models.sweeps.runs import RunResult

_ROWS = 100  # printed; the files hold all
_ESTIMATES = (
    Column("task", form=text), Column("attention", form=text), Column("runs", drop=2), Column("left"),
    Column("epochs_left"), Column("s/epoch", form=two_decimals), Column("hours", form=two_decimals),
)  # fmt: skip
_RESULTS = (
    Column("run", form=text), Column("status", form=text), Column("epochs"),
    Column("epochs_to_target", "to {}", drop=NEVER), Column("train_accuracy", "train", percent),
    Column("holdout_accuracy", "held-out", percent, drop=NEVER),
    Column("best_holdout_accuracy", "best", percent, drop=1), Column("seconds", form=count, drop=2),
)  # fmt: skip


def print_estimates(
    runs: "list[SweepRun]", estimates: "list[Estimate]", jobs: int, as_json: bool, quiet: bool
) -> None:
    """Print runs and hours by task and attention, and all runs in JSON."""
    groups: dict[tuple[str, str], list[tuple[SweepRun, Estimate]]] = {}
    for run, left in zip(runs, estimates, strict=True):
        groups.setdefault((run.training.task_label, run.model.attention_label), []).append((run, left))
    hours = sum(left.hours for left in estimates)
    if not quiet:
        from semdiag.presenting.terminal.console import NumberTable, wide_console

        rows = []
        for (task, attention), members in groups.items():
            left_over = [left for _, left in members if left.epochs]
            epochs, total = sum(left.epochs for left in left_over), sum(left.hours for _, left in members)
            rows.append(
                {
                    "task": task, "attention": attention, "runs": len(members), "left": len(left_over),
                    "epochs_left": epochs, "s/epoch": total * 3600 / epochs if epochs else None, "hours": total,
                }
            )  # fmt: skip
        wide_console().print(NumberTable(_ESTIMATES, rows, "Runs"))
        if any(left.epochs for left in estimates):
            say("Measured: a few steps, timed just now on one thread.")
        bound = "at most " if any(run.training.until is not None for run in runs) else ""
        unfinished = sum(e.epochs > 0 for e in estimates)
        in_all = counted(sum(e.epochs for e in estimates), "epoch")
        say(f"{counted(len(runs), 'run')}, {unfinished} left, {bound}{in_all}.")
        alone, together = (minutes(3600 * hours / many) for many in (1, jobs))
        say(f"{bound}{alone} on one core, {together} with {jobs} at once.")
    if as_json:
        _echo_json(
            {
                "schema": "semdiag.sweep-estimate/1",
                "provenance": {"command": command_line()},
                "hours": hours,
                "jobs": jobs,
                "results": [
                    {
                        "run": run.name,
                        "task": run.training.task_label,
                        "attention": run.model.attention,
                        "k": run.model.k,
                        "seed": run.training.seed,
                        "epochs": e.epochs,
                        "epoch_seconds": e.epoch_seconds,
                    }
                    for run, e in zip(runs, estimates, strict=True)
                ],
            }
        )


def _echo_json(content: dict[str, Any]) -> None:
    import json

    typer.echo(json.dumps(content, indent=1, allow_nan=False))


def print_results(rows: "list[RunResult]", folder: Path, target: float, as_json: bool, quiet: bool) -> None:
    """Print the table of results; of very many runs only those that are not done."""
    from semdiag_models.sweeps.results import results_document

    if as_json:
        _echo_json(results_document(rows, {"command": command_line(), "target": target}))
    if quiet:
        return
    from semdiag.presenting.terminal.console import NumberTable, wide_console

    shown = [asdict(row) for row in rows if len(rows) <= _ROWS or row.status != "done"]
    if shown:
        wide_console().print(NumberTable(_RESULTS, shown, "Results", unit=f"{target:.0%}"))
    for row in rows:
        if row.problem:
            tell(f"{row.run}: {row.problem}")
    counts = Counter(row.status for row in rows)
    summary = ", ".join(f"{number} {status}" for status, number in counts.items())
    say(f"{counted(len(rows), 'run')}: {summary}. Table: {folder / 'results.csv'}")


class SweepProgress(TimedBar):
    """A bar on stderr: epochs of all runs together, time left, and a line for every run that ends."""

    def __init__(self, runs: "list[SweepRun]", rows: "dict[str, RunResult]", folder: Path, quiet: bool) -> None:
        self._folder, self._count, self._failed = folder, len(runs), 0
        self.open = {
            run.name: run.training.epochs for run in runs if rows[run.name].status in ("begun", "waiting")
        }
        self._closed = sum(run.training.epochs for run in runs if run.name not in self.open)
        runs_ended, epochs = "runs {task.fields[ended]}/{task.fields[count]}", "epochs {task.percentage:>3.0f}%"
        super().__init__(
            (runs_ended, epochs, "left at most", "{task.fields[failed]}"),
            quiet,
            total=sum(run.training.epochs for run in runs),
            ended=self._ended,
            count=self._count,
            failed="",
        )

    @property
    def _ended(self) -> int:
        return self._count - len(self.open)

    def __enter__(self) -> Self:
        if not self._quiet:
            tell(f"{counted(self._count, 'run')} in {self._folder}, {self._ended} of them done.")
        super().__enter__()
        self.tick()
        self._completed_before = self._bar.tasks[0].completed
        return self

    def tick(self) -> None:
        """Update the bar from the running runs."""
        from semdiag_models.sweeps.runs import epochs_so_far

        so_far = sum(epochs_so_far(self._folder / name) for name in self.open)
        self._bar.update(self._task, completed=self._closed + so_far)
        self._minutes.tick()  # called about once a second, so no thread needs to watch the clock

    def _state(self) -> str:
        (task,) = self._bar.tasks
        failed = f", {task.fields['failed']}" if task.fields["failed"] else ""
        ended = f"{task.fields['ended']} of {counted(self._count, 'run')} ended{failed}"
        return f"{ended}, {task.percentage:.0f}% of epochs"

    def ended(self, run: "SweepRun", row: "RunResult") -> None:
        """Count a run that has ended, and say how."""
        self._closed += self.open.pop(run.name)
        self._failed += row.status != "done"
        self._bar.update(self._task, ended=self._ended, failed=f"{self._failed} failed" if self._failed else "")
        reached = "" if row.train_accuracy is None else f", training accuracy {percent(row.train_accuracy)}"
        line = f"{row.status} {row.run} after {counted(row.epochs, 'epoch')}{reached} {row.problem}".rstrip()
        if not self._quiet:
            self._bar.console.print(line, soft_wrap=True)
