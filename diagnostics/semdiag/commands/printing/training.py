"""What ``semdiag train`` says while it runs, and when it is done."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from semdiag.presenting.terminal.minutes import Minutes
from semdiag.presenting.terminal.terminal import counted, say, terminal

if TYPE_CHECKING:
    from semdiag_models.training import Progress, Trainer


def summarise(trainer: "Trainer", several: bool) -> None:
    """Print the result of a run.

    Args:
        trainer: at its end.
        several: whether it is one of several seeds, and to be named by it.
    """
    from semdiag_models.tasks.text import unigram_perplexity

    history, until = trainer.history, trainer.training.until
    stopped = ""
    if until is not None:
        stopped = f", stopped at --until {until:g}" if trainer.converged else f", --until {until:g} not reached"
    seed = f", seed {trainer.training.seed}" if several else ""
    run = f"{trainer.training.task_label}, {trainer.config.attention_label}{seed}"
    arrived = f"after {counted(trainer.epoch, 'epoch')}{stopped}"
    if trainer.training.text is not None:
        row = {name: column[-1] for name, column in history.items()}
        labels = trainer.train_split.labels, trainer.holdout_split.labels
        alone = unigram_perplexity(*labels, trainer.config.classes)
        say(
            f"{run}: {_perplexities(row)} {arrived} (pieces' frequencies alone {alone:.1f}), "
            f"held-out accuracy {row['holdout_accuracy']:.1%}."
        )
        return
    say(
        f"{run}: training accuracy {history['train_accuracy'][-1]:.1%}, held-out "
        f"{history['holdout_accuracy'][-1]:.1%} {arrived} (chance {1 / trainer.config.classes:.0%})."
    )


def _perplexities(row: Mapping[str, float]) -> str:
    from semdiag_models.tasks import perplexity

    return f"perplexity train {perplexity(row['train_loss']):.1f} held-out {perplexity(row['holdout_loss']):.1f}"


class TrainingProgress:
    """A bar on stderr: steps within the runs, time left, latest accuracies; in a log, a line a minute."""

    def __init__(self, trainers: "list[Trainer]", quiet: bool) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.table import Column

        training = trainers[0].training
        steps = -(-training.train_samples // training.batch_size)
        self._several = len(trainers) > 1
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(),
            TimeElapsedColumn(table_column=Column(min_width=7)),  # on 80 columns the bar gives way, not the times
            TextColumn("left"),
            TimeRemainingColumn(table_column=Column(min_width=7)),
            TextColumn("{task.fields[accuracy]}"),
            console=(console := terminal(stderr=True)),
            disable=quiet,
        )
        start = f"training {counted(len(trainers), 'run')} for {counted(training.epochs, 'epoch')}"
        each = f"{start} of {counted(steps, 'step')}"
        self._minutes = Minutes(each, self._state, self._share, quiet or console.is_terminal)
        self._task = self._bar.add_task(
            "",
            total=training.epochs * steps * len(trainers),
            completed=sum(trainer.epoch for trainer in trainers) * steps,
            epoch=min(trainer.epoch for trainer in trainers),
            epochs=training.epochs,
            accuracy="",
        )
        self._before = self._bar.tasks[0].completed

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        self._minutes.begin()
        self._minutes.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._minutes.__exit__(None, None, None)
        if not self._bar.disable:  # before rich 14.3 it would leave an empty line
            self._bar.stop()

    def batch(self, trainer: "Trainer") -> None:
        """Move on by one step of one run."""
        self._bar.advance(self._task)

    def epoch(self, trainer: "Trainer", progress: "Progress") -> None:
        """Show the accuracies of an epoch of one run."""
        row = progress.row
        seed = f"seed {trainer.training.seed} " if self._several else ""
        accuracy = f"accuracy train {row['train_accuracy']:.1%} held-out {row['holdout_accuracy']:.1%}"
        if trainer.training.text is not None:
            accuracy = _perplexities(row)
        self._bar.update(self._task, epoch=int(row["epoch"]), accuracy=seed + accuracy)

    def _state(self) -> str:
        """Return what the bar shows, in words."""
        (task,) = self._bar.tasks
        known = f", {task.fields['accuracy']}" if task.fields["accuracy"] else ""
        return f"training, epoch {task.fields['epoch']} of {task.fields['epochs']}{known}"

    def _share(self) -> float | None:
        """Return the share done of this session's steps; those before a resume took an unknown time."""
        (task,) = self._bar.tasks
        left = task.total - self._before if task.total else 0
        return (task.completed - self._before) / left if left else None
