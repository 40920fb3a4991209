"""What ``semdiag train`` prints while it runs, and at the end."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from semdiag.commands.printing.timed_bar import TimedBar
from semdiag.measuring.counted import counted
from semdiag.presenting.terminal.terminal import say

if TYPE_CHECKING:
    from semdiag_models.training import Progress, Trainer


def summarise(trainer: "Trainer", several: bool) -> None:
    """Print the result of a run."""
    from semdiag_models.tasks.text import unigram_perplexity

    history, until = trainer.history, trainer.training.until
    stopped = ""
    if until is not None:
        stopped = f", stopped at --until {until:g}" if trainer.converged else f", --until {until:g} not reached"
    seed = f", seed {trainer.training.seed}" if several else ""
    run = f"{trainer.training.task_label}, {trainer.config.attention_label}{seed}"
    trained = f"after {counted(trainer.epoch, 'epoch')}{stopped}"
    if trainer.training.text is not None:
        row = {name: column[-1] for name, column in history.items()}
        labels = trainer.train_split.labels, trainer.holdout_split.labels
        alone = unigram_perplexity(*labels, trainer.config.classes)
        say(
            f"{run}: {_perplexities(row)} {trained} (pieces' frequencies alone {alone:.1f}), "
            f"held-out accuracy {row['holdout_accuracy']:.1%}."
        )
        return
    say(
        f"{run}: training accuracy {history['train_accuracy'][-1]:.1%}, held-out "
        f"{history['holdout_accuracy'][-1]:.1%} {trained} (chance {1 / trainer.config.classes:.0%})."
    )


def _perplexities(row: Mapping[str, float]) -> str:
    from semdiag_models.tasks import perplexity

    return f"perplexity train {perplexity(row['train_loss']):.1f} held-out {perplexity(row['holdout_loss']):.1f}"


class TrainingProgress(TimedBar):
    """A bar on stderr: steps within the runs, time left, latest accuracies; in a log, a line a minute."""

    def __init__(self, trainers: "list[Trainer]", quiet: bool) -> None:
        training = trainers[0].training
        steps = -(-training.train_samples // training.batch_size)
        self._several = len(trainers) > 1
        start = f"training {counted(len(trainers), 'run')} for {counted(training.epochs, 'epoch')}"
        super().__init__(
            ("epoch {task.fields[epoch]}/{task.fields[epochs]}", "", "left", "{task.fields[accuracy]}"),
            quiet,
            f"{start} of {counted(steps, 'step')}",
            total=training.epochs * steps * len(trainers),
            completed=sum(trainer.epoch for trainer in trainers) * steps,
            epoch=min(trainer.epoch for trainer in trainers),
            epochs=training.epochs,
            accuracy="",
        )

    def __enter__(self) -> Self:
        super().__enter__()
        self._minutes.begin()
        self._minutes.__enter__()
        return self

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
        (task,) = self._bar.tasks
        known = f", {task.fields['accuracy']}" if task.fields["accuracy"] else ""
        return f"training, epoch {task.fields['epoch']} of {task.fields['epochs']}{known}"
