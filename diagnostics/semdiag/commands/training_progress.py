"""What ``semdiag train`` says while it runs, and when it is done."""

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from semdiag_models.training import Progress, Trainer


def tell(line: str) -> None:
    """Print a line on stderr."""
    typer.echo(line, err=True)


def summarise(trainer: "Trainer", several: bool) -> None:
    """Print where a run has arrived.

    Args:
        trainer: at its end.
        several: whether it is one of several seeds, and to be named by it.
    """
    from semdiag_models import find_task

    history, until = trainer.history, trainer.training.until
    task = find_task(trainer.training.task)
    stopped = ""
    if until is not None:
        stopped = f", stopped at --until {until:g}" if trainer.converged else f", --until {until:g} not reached"
    seed = f", seed {trainer.training.seed}" if several else ""
    tell(
        f"{task.name}, {trainer.config.attention_label}{seed}: "
        f"training accuracy {history['train_accuracy'][-1]:.1%}, held-out {history['holdout_accuracy'][-1]:.1%} "
        f"after {trainer.epoch} epochs{stopped} (chance {task.chance:.0%})."
    )


class TrainingProgress:
    """A bar on stderr: steps within the runs, time left, latest accuracies."""

    def __init__(self, trainers: "list[Trainer]", quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        training = trainers[0].training
        steps = -(-training.train_samples // training.batch_size)
        self._several = len(trainers) > 1
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[accuracy]}"),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._task = self._bar.add_task(
            "",
            total=training.epochs * steps * len(trainers),
            completed=sum(trainer.epoch for trainer in trainers) * steps,
            epoch=min(trainer.epoch for trainer in trainers),
            epochs=training.epochs,
            accuracy="",
        )

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def batch(self, trainer: "Trainer") -> None:
        """Move on by one step of one run."""
        self._bar.advance(self._task)

    def epoch(self, trainer: "Trainer", progress: "Progress") -> None:
        """Show the accuracies of an epoch of one run."""
        row = progress.row
        seed = f"seed {trainer.training.seed} " if self._several else ""
        accuracy = f"{seed}accuracy train {row['train_accuracy']:.1%} held-out {row['holdout_accuracy']:.1%}"
        self._bar.update(self._task, epoch=int(row["epoch"]), accuracy=accuracy)
