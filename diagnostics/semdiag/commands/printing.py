"""What training, sweeping and checking print."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Self

from semdiag.commands.measuring import command_line
from semdiag.commands.sweep_results import RunResult, result, results_document
from semdiag.commands.train import TimedBar
from semdiag.measuring.words import count, counted, number, percent, plain, text
from semdiag.presenting.tables import NEVER, Column, NumberTable, wide_console
from semdiag.presenting.terminal import print_json, say, tell
from semdiag.questions.dispersion.answer import GATED, SHOWN, GateResult
from semdiag.reporting.gate import Verification

if TYPE_CHECKING:
    from semdiag_models.sweep import SweepRun

_ROWS = 100  # printed; the files hold all
_PLAN = (
    Column("task", form=text), Column("attention", form=text), Column("runs", drop=2), Column("left"),
    Column("epochs_left"),
)  # fmt: skip
_RESULTS = (
    Column("run", form=text), Column("status", form=text), Column("epochs"),
    Column("epochs_to_target", "to {}", drop=NEVER), Column("train_accuracy", "train", percent),
    Column("holdout_accuracy", "held-out", percent, drop=NEVER),
    Column("best_holdout_accuracy", "best", percent, drop=1), Column("seconds", form=count, drop=2),
)  # fmt: skip


def print_plan(runs: "list[SweepRun]", folder: Path, records: Path | None, as_json: bool, quiet: bool) -> None:
    """Print runs and the epochs that are left by task and attention, and all runs in JSON."""
    results_before = [result(run, folder / run.name, 1.0, None, records, keep=False) for run in runs]
    left = [
        0 if row.status in ("done", "failed") else run.training.epochs - row.epochs
        for run, row in zip(runs, results_before, strict=True)
    ]
    alike: dict[tuple[str, str], list[int]] = {}
    for run, epochs in zip(runs, left, strict=True):
        alike.setdefault((run.training.task_label, run.model.attention_label), []).append(epochs)
    rows = [
        {
            "task": task,
            "attention": kind,
            "runs": len(epochs_left),
            "left": sum(map(bool, epochs_left)),
            "epochs_left": sum(epochs_left),
        }
        for (task, kind), epochs_left in alike.items()
    ]
    if not quiet:
        bound = "at most " if any(run.training.until is not None for run in runs) else ""
        unfinished = sum(epochs > 0 for epochs in left)
        say(f"{counted(len(runs), 'run')}, {unfinished} left, {bound}{counted(sum(left), 'epoch')}.")
        wide_console().print(NumberTable(_PLAN, rows, "Runs"))
    if as_json:
        results = [
            {
                "run": run.name, "task": run.training.task_label, "attention": run.model.attention,
                "k": run.model.k, "seed": run.training.seed, "epochs": epochs,
            }
            for run, epochs in zip(runs, left, strict=True)
        ]  # fmt: skip
        provenance = {"command": command_line()}
        print_json({"schema": "semdiag.sweep-plan/1", "provenance": provenance, "results": results}, indent=1)


def print_results(rows: list[RunResult], folder: Path, target: float, as_json: bool, quiet: bool) -> None:
    """Print the table of results; of very many runs only those that are not done."""
    if as_json:
        print_json(results_document(rows, {"command": command_line(), "target": target}), indent=1)
    if quiet:
        return
    counts = Counter(row.status for row in rows)
    summary = ", ".join(f"{number} {status}" for status, number in counts.items())
    say(f"{counted(len(rows), 'run')}: {summary}. Table: {folder / 'results.csv'}")
    shown = [asdict(row) for row in rows if len(rows) <= _ROWS or row.status != "done"]
    if shown:
        wide_console().print(NumberTable(_RESULTS, shown, "Results", unit=f"{target:.0%}"))
    for row in rows:
        if row.problem:
            tell(f"{row.run}: {row.problem}")


class SweepProgress(TimedBar):
    """A bar on stderr: epochs of all runs together, time left, and a line for every run that ends."""

    def __init__(self, runs: "list[SweepRun]", rows: "dict[str, RunResult]", folder: Path, quiet: bool) -> None:
        self._folder = folder
        self._count = len(runs)
        self._failed = 0
        self.open = {
            run.name: run.training.epochs for run in runs if rows[run.name].status in ("begun", "waiting")
        }
        self._closed = sum(run.training.epochs for run in runs if run.name not in self.open)
        runs_ended = "runs {task.fields[ended]}/{task.fields[count]}"
        epochs = "epochs {task.percentage:>3.0f}%"
        super().__init__(
            (runs_ended, epochs, "left at most", "{task.fields[failed]}"), quiet,
            total=sum(run.training.epochs for run in runs), ended=self._ended, count=self._count, failed="",
        )  # fmt: skip

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
        from semdiag_models.sweep import epochs_so_far

        so_far = sum(epochs_so_far(self._folder / name) for name in self.open)
        self._bar.update(self._task, completed=self._closed + so_far)
        self._minutes.tick()  # called about once a second, so no thread needs to watch the clock

    def _state(self) -> str:
        (task,) = self._bar.tasks
        failed = f", {task.fields['failed']}" if task.fields["failed"] else ""
        ended = f"{task.fields['ended']} of {counted(self._count, 'run')} ended{failed}"
        return f"{ended}, {task.percentage:.0f}% of epochs"

    def ended(self, run: "SweepRun", row: RunResult) -> None:
        """Count a run that has ended, and say how."""
        self._closed += self.open.pop(run.name)
        self._failed += row.status != "done"
        self._bar.update(self._task, ended=self._ended, failed=f"{self._failed} failed" if self._failed else "")
        reached = "" if row.train_accuracy is None else f", training accuracy {percent(row.train_accuracy)}"
        line = f"{row.status} {row.run} after {counted(row.epochs, 'epoch')}{reached} {row.problem}".rstrip()
        if not self._quiet:
            self._bar.console.print(line, soft_wrap=True)


_COLORS = {"holds": "green", "FAILS": "red", "inconclusive": "yellow"}


def print_check(result: Verification) -> None:
    """Print pairs, layers, invariants, rules, and what was not compared with the baseline."""
    console = wide_console()
    for pair, gate in zip(result.pairs, result.layers, strict=True):
        console.print(_pair(pair))
        console.print(_layers(gate))
    for invariant in result.invariants:
        word = "holds" if invariant.passed else "FAILS"
        console.print(f"{word}: {invariant.words}", style=_COLORS[word])
    for rule in result.rules:
        word = "holds" if rule.passed else "FAILS" if rule.known else "inconclusive"
        value = number(rule.value, 4) if rule.known else "undefined"
        console.print(f"{word}: {rule.rule.text} — {value}, {rule.model}", style=_COLORS[word])
    for model in result.compared.new if result.compared else ():
        console.print(f"not compared: {model} is not in the baseline")


def conclusion(result: Verification) -> str:
    """Return in a line how much passes."""
    passing = sum(pair.passed and gate.passed for pair, gate in zip(result.pairs, result.layers, strict=True))
    parts = []
    if result.pairs:
        verb = "passes" if len(result.pairs) == 1 else "pass"
        parts.append(f"{passing} of {counted(len(result.pairs), 'pair')} {verb}")
    parts.append(f"{sum(i.passed for i in result.invariants)} of {len(result.invariants)} invariants hold")
    if result.rules:
        parts.append(f"{sum(r.passed for r in result.rules)} of {len(result.rules)} rules hold")
    if result.compared:
        unmatched = sum(change.quantity == "model" for change in result.drifts)
        numbers = len(result.drifts) - unmatched
        changes = [f"{counted(numbers, 'number')} left the baseline"] if numbers else []
        changes += [f"{counted(unmatched, 'model')} of the baseline not matched"] if unmatched else []
        parts.append(f"{result.compared.compared} of {counted(result.compared.models, 'model')} compared")
        parts[-1] += f", {' and '.join(changes) or 'nothing has drifted'}"
    return f"{'; '.join(parts)}."


def _pair(result: GateResult) -> NumberTable:
    named = {"δ_s, full": result.full, "δ_h, top-k": result.topk}
    rows = [{"nats": name} | {p: number(values[p], 4) for p in SHOWN} for name, values in named.items()]
    rows.append({"nats": "δ_h < δ_s"} | {p: _verdict(result, p) for p in SHOWN})
    return NumberTable(
        [Column("nats", form=text), *(Column(p, form=plain) for p in SHOWN)], rows, result.pair.label
    )


def _verdict(result: GateResult, percentile: str) -> str:
    if percentile not in GATED:
        return "–"
    if percentile in result.unknown:
        return "inconclusive"
    return "FAILS" if percentile in result.failed else "holds"


def _layers(gate: GateResult) -> str:
    if not gate.failed:
        return f"δ_h < δ_s at the median of each of the {len(gate.full)} layers"
    judged = [n for n in gate.failed if n not in gate.unknown]
    parts = [f"layer {n} ({number(gate.topk[n])} against {number(gate.full[n])})" for n in judged]
    sentences = [f"does not hold at the median of {', '.join(parts)}"] if parts else []
    unjudged = ", ".join(f"layer {n}" for n in gate.unknown)
    sentences += [f"cannot be judged at the median of {unjudged}"] if unjudged else []
    allowed = "which fails" if not gate.passed else "which is allowed in fewer than half of the layers"
    return f"δ_h < δ_s {' and '.join(sentences)}, {allowed}"
