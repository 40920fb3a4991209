"""``semdiag train``."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from semdiag.commands.measuring import command_line
from semdiag.measuring.words import counted
from semdiag.presenting import options
from semdiag.presenting.terminal import Minutes, say, tell, terminal

_MOST_THREADS = 4096

if TYPE_CHECKING:
    from semdiag_models import Text
    from semdiag_models.tasks import Classification
    from semdiag_models.train import Progress, Trainer


class TimedBar(ABC):
    """Progress of a training on a terminal; in a log, a line a minute."""

    def __init__(self, columns: tuple[str, str, str, str], quiet: bool, start: str = "", **task: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.table import Column

        before, after, left, end = columns
        self._quiet = quiet
        self._bar = Progress(
            TextColumn(before, markup=False),
            BarColumn(),
            *([TextColumn(after, markup=False)] if after else []),
            TimeElapsedColumn(table_column=Column(min_width=7)),  # on 80 columns the bar gives way, not the times
            TextColumn(left, markup=False),
            TimeRemainingColumn(table_column=Column(min_width=7)),
            TextColumn(end, markup=False),
            console=(console := terminal(stderr=True)),
            disable=quiet,
        )
        self._minutes = Minutes(start, self._state, self._share, quiet or console.is_terminal)
        self._task = self._bar.add_task("", **task)
        self._completed_before = self._bar.tasks[0].completed

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._minutes.__exit__(None, None, None)
        if not self._bar.disable:  # before rich 14.3 it would leave an empty line
            self._bar.stop()

    @abstractmethod
    def _state(self) -> str:
        """Return what the bar shows, in words."""

    def _share(self) -> float | None:
        """Return the share done of this session's work; what was done before took an unknown time."""
        (task,) = self._bar.tasks
        left = (task.total or 0) - self._completed_before
        return (task.completed - self._completed_before) / left if left else None


def summarise(trainer: "Trainer", several: bool) -> None:
    """Print the result of a run."""
    from semdiag_models.text import unigram_perplexity

    history = trainer.history
    until = trainer.training.until
    stopped = ""
    if until is not None:
        reached = history["train_accuracy"][-1] >= until
        stopped = f", stopped at --until {until:g}" if reached else f", --until {until:g} not reached"
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
    from semdiag_models.text import perplexity

    return f"perplexity train {perplexity(row['train_loss']):.1f} held-out {perplexity(row['holdout_loss']):.1f}"


class TrainingProgress(TimedBar):
    """A bar on stderr: steps within the runs, time left, latest accuracies; in a log, a line a minute."""

    def __init__(self, trainers: "list[Trainer]", quiet: bool) -> None:
        training = trainers[0].training
        steps = -(-training.train_samples // training.batch_size)
        self._several = len(trainers) > 1
        start = f"training {counted(len(trainers), 'run')} for {counted(training.epochs, 'epoch')}"
        super().__init__(
            ("epoch {task.fields[epoch]}/{task.fields[epochs]}", "", "left", "{task.fields[accuracy]}"), quiet,
            f"{start} of {counted(steps, 'step')}", total=training.epochs * steps * len(trainers),
            completed=sum(trainer.epoch for trainer in trainers) * steps,
            epoch=min(trainer.epoch for trainer in trainers), epochs=training.epochs, accuracy="",
        )  # fmt: skip

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
        state = f"training, epoch {task.fields['epoch']} of {task.fields['epochs']}"
        accuracy = task.fields["accuracy"]
        return f"{state}, {accuracy}" if accuracy else state


def text_task(
    file: Path | None,
    holdout: Path | None,
    pieces: str | None,
    vocabulary: int | None,
    window: int | None,
    quiet: bool,
) -> "Text":
    """Read the text and learn its pieces, which takes about a second per megabyte."""
    from semdiag_files import InputError
    from semdiag_models import Text, open_text

    if file is None:
        raise InputError("The task text needs a file to learn from: semdiag train text --text FILE.")
    if window is not None and window < 1:
        raise InputError(f"--window must be at least 1. Got {window}.")
    console = terminal(stderr=True)
    learning = "learning the pieces of the text"
    with (
        console.status(learning.capitalize()) if console.is_terminal and not quiet else nullcontext(),
        Minutes(learning, lambda: learning, lambda: None, quiet or console.is_terminal),
    ):
        source = open_text(file, holdout, pieces or "unigram", 4096 if vocabulary is None else vocabulary)
    return Text(source, window)


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command an option for every field of the configurations that says what it means."""
    from semdiag_models.config import options as configured  # quick: it needs no torch

    first, *more, _ = inspect.signature(command).parameters.values()
    ordered = [first]
    for field in configured():
        declared = field.metadata
        kind = getattr(field.type, "__name__", str(field.type)).removesuffix(" | None")
        shown = declared.get("shown", field.default if field.default not in (None, (), False) else "")
        completed = options.ATTENTIONS if field.name == "attention" else tuple(declared["choices"])
        option = typer.Option(
            *declared.get("flags", f"--{field.name.replace('_', '-')}").split(), help=declared["help"],
            metavar=declared.get("metavar"), show_default=str(shown) if shown != "" else False,
            rich_help_panel=declared["panel"], hidden=not declared.get("common"),
            autocompletion=options.names(completed) if completed else None,
        )  # fmt: skip
        values: Any = (
            str if "metavar" in declared else {"bool": bool, "int": int, "float": float, "str": str}[kind]
        )
        annotation: Any = Annotated[bool if kind == "bool" else values | None, option]
        default = False if kind == "bool" else None
        ordered.append(first.replace(name=field.name, default=default, annotation=annotation))
    return options.with_parameters(lambda **values: command(**values), [*ordered, *more], command.__doc__)


_data, _text, _run = (
    partial(options.command_option, panel=panel) for panel in ("Data", "Text", "Run")
)  # of the help


@_options
def train(
    task: Annotated[str, typer.Argument(
        help="Task to learn; see [bold]semdiag list tasks[/].", autocompletion=options.names(options.TASKS),
    )],
    seeds: Annotated[str, _data(
        "Train several seeds, like 1,2,3, each in a folder of its own: on CUDA together, elsewhere one after the "
        "other.", metavar="SEED,SEED", rare=True,
    )] = "",
    text: Annotated[Path | None, _text("For the task text: the UTF-8 file to learn.", rare=True)] = None,
    holdout_text: Annotated[Path | None, _text(
        "File of held-out text. Default: the last tenth of the lines of --text.", rare=True,
    )] = None,
    pieces: Annotated[str | None, _text(
        "How SentencePiece cuts the text into pieces: unigram or bpe.", show_default="unigram",
    )] = None,
    tokenizer: Annotated[str | None, typer.Option(hidden=True)] = None,
    vocabulary: Annotated[int | None, _text("Number of different pieces.", show_default="4096", rare=True)] = None,
    out: Annotated[Path | None, _run(
        "Folder of the run. Default: checkpoints/TASK-ATTENTION-seed-SEED. With --seeds: the folder that holds "
        "such folders.",
    )] = None,
    resume: Annotated[bool, _run("Continue after the last saved epoch.", "--resume")] = False,
    overwrite: Annotated[bool, _run(
        "Start anew in a folder that holds a run already.", "--overwrite", rare=True,
    )] = False,
    device: Annotated[str, _run(
        "cpu, cuda, mps, or another accelerator that torch finds. auto takes cuda, else mps, else cpu.",
    )] = "auto",
    threads: Annotated[int | None, _run(
        "CPU threads. The same number is needed to repeat a run exactly.", rare=True,
    )] = None,
    quiet: Annotated[bool, _run("Show no progress bar.", "--quiet", rare=True)] = False,
    **chosen: Any,
) -> None:  # fmt: skip
    """Train an encoder and keep its checkpoints.

    Without further options it follows the paper's recipe for the task; "recipe" below means a default that depends
    on the task. Every epoch is saved, so Ctrl-C loses at most the unfinished one. The same command with --resume
    then continues, and ends with the same weights.

    [bold]semdiag train even-pairs --attention topk --k 5[/]

    The task text is language modelling on any text: which piece (token) follows a window of pieces?

    [bold]semdiag train text --text FILE --attention topk --k 5[/]
    """
    import torch

    from semdiag_files import InputError
    from semdiag_models import Text, configure, find_task, open_run, open_seed_runs, run_name
    from semdiag_models.train import find_device

    if resume and overwrite:
        raise InputError("--resume and --overwrite cannot be used together.")
    if seeds and chosen["seed"] is not None:
        raise InputError("--seeds names every seed: leave out --seed.")
    if tokenizer is not None:
        raise InputError("--tokenizer of semdiag train is now --pieces: unigram or bpe.")
    least_length, longest = options.length_range(chosen["length"])
    classification: Classification
    if task == Text.name:
        classification = text_task(text, holdout_text, pieces, vocabulary, longest, quiet)
    elif (text, holdout_text, pieces, vocabulary) == (None,) * 4:
        classification = find_task(task)
    else:
        raise InputError("--text and its options apply only to the task text: semdiag train text --text FILE.")
    frozen = options.listed_names(chosen["frozen"] or "")
    chosen |= {"length": longest, "least_length": least_length, "frozen": frozen}
    chosen["snapshots"] = options.listed_numbers(chosen["snapshots"] or "", "--snapshots takes epochs", "1,5,20")
    model, training = configure(classification, chosen)
    where = find_device(device)
    if threads is not None:
        if not 1 <= threads <= _MOST_THREADS:
            raise InputError(f"--threads must lie between 1 and {_MOST_THREADS:,}. Got {threads:,}.")
        torch.set_num_threads(threads)
    provenance = {"command": command_line()}
    choices = {"resume": resume, "overwrite": overwrite}
    if seeds:
        parent = out if out is not None else Path("checkpoints")
        numbers = options.listed_numbers(seeds, "--seeds takes whole numbers", "1,5,20")
        _train(open_seed_runs(parent, model, training, numbers, where, **choices), True, provenance, quiet)
        return
    folder = out if out is not None else Path("checkpoints") / run_name(model, training)
    trainer = open_run(folder, model, training, where, **choices)
    _train({trainer: folder}, False, provenance, quiet)


def _train(folders: "dict[Trainer, Path]", several: bool, provenance: dict[str, Any], quiet: bool) -> None:
    from semdiag_files import InputError
    from semdiag_models import DivergedError, train_seed_runs

    first, *_ = folders
    if not quiet and (text := first.training.text) is not None:
        tell(
            f"{text.file}: windows of {first.training.length} pieces, {first.training.train_samples:,} to train "
            f"on, {first.training.holdout_samples:,} of {text.holdout_file or 'the last tenth of the lines'} held "
            "out."
        )
    with TrainingProgress(list(folders), quiet) as bar:
        try:
            train_seed_runs(folders, provenance, bar.epoch, bar.batch)
        except KeyboardInterrupt:
            tell(f"Stopped; {_saved(folders)}. To go on, add --resume.")
            raise typer.Exit(130) from None
        except DivergedError as error:
            raise InputError(f"{error} {_saved(folders)}.") from None
    for trainer in folders:
        summarise(trainer, several)
    say(f"Next: semdiag dispersion {' '.join(str(folder / 'last.pt') for folder in folders.values())}")


def _saved(folders: "dict[Trainer, Path]") -> str:
    return ", ".join(f"{folder / 'last.pt'} holds epoch {trainer.epoch}" for trainer, folder in folders.items())
