"""``semdiag train``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from semdiag.commands import training_options as options
from semdiag.commands.measuring import command_line
from semdiag.commands.printing.training import TrainingProgress, summarise
from semdiag.commands.text_training import introduction, text_task
from semdiag.presenting.terminal.terminal import say, tell

if TYPE_CHECKING:
    from semdiag_models import Trainer
    from semdiag_models.seed_runs import SeedRun
    from semdiag_models.tasks import Classification


def train(
    task: options.Task,
    attention: options.Attention = "full",
    k: options.K = None,
    hash_rounds: options.HashRounds = 1,
    hash_bits: options.HashBits = None,
    hashes: options.Hashes = "shared",
    clusters: options.Clusters = None,
    centroid_decay: options.CentroidDecay = 0.999,
    score_gradient: options.ScoreGradient = "exact",
    global_tokens: options.GlobalTokens = 0,
    blocks: options.Blocks = None,
    width: options.Width = None,
    mlp_width: options.MlpWidth = None,
    heads: options.Heads = 1,
    head_width: options.HeadWidth = None,
    norm: options.Norm = "pre",
    pooling: options.Pooling = "mean",
    activation: options.Activation = "relu",
    dropout: options.Dropout = 0.01,
    inverse_temperature: options.InverseTemperature = 1.0,
    pad_as_token: options.PadAsToken = False,
    length: options.Length = None,
    train_samples: options.TrainSamples = None,
    holdout_samples: options.HoldoutSamples = None,
    seed: options.Seed = None,
    seeds: options.Seeds = "",
    text: options.Text = None,
    holdout_text: options.HoldoutText = None,
    tokenizer: options.Tokenizer = None,
    vocabulary: options.Vocabulary = None,
    epochs: options.Epochs = None,
    until: options.Until = None,
    batch_size: options.BatchSize = None,
    optimizer: options.Optimizer = "sgd",
    learning_rate: options.LearningRate = None,
    weight_decay: options.WeightDecay = None,
    learning_rate_decay: options.LearningRateDecay = None,
    gradient_clip: options.GradientClip = 0.5,
    precision: options.Precision = "float32",
    compiled: options.Compiled = False,
    query_key_scale: options.QueryKeyScale = None,
    frozen: options.Frozen = "",
    fresh_samples: options.FreshSamples = False,
    snapshots: options.Snapshots = "",
    out: options.Out = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
    quiet: options.Quiet = False,
) -> None:
    """Train an encoder and keep its checkpoints.

    Without further options it follows the paper's recipe for the task; "recipe" below means a default that depends
    on the task. Every epoch is saved, so Ctrl-C loses at most the unfinished one. The same command with --resume
    then continues, and ends with the same weights.

    [bold]semdiag train even-pairs --attention topk --k 5[/]

    The task text is language modelling on any text: which piece (token) follows a window of pieces?

    [bold]semdiag train text --text FILE --attention topk --k 5[/]
    """
    chosen = dict(locals())  # options have the names of the configurations' fields
    import torch

    from semdiag.presenting.option_values import length_range, listed_numbers, names
    from semdiag_models import (
        InputError,
        Text,
        configure,
        find_task,
        open_run,
        open_seed_runs,
        run_name,
    )
    from semdiag_models.device import find_device

    if resume and overwrite:
        raise InputError("--resume and --overwrite cannot be used together.")
    if seeds and seed is not None:
        raise InputError("--seeds names every seed: leave out --seed.")
    least_length, longest = length_range(length)
    classification: Classification
    if task == Text.name:
        classification = text_task(text, holdout_text, tokenizer, vocabulary, longest, quiet)
    elif (text, holdout_text, tokenizer, vocabulary) == (None,) * 4:
        classification = find_task(task)
    else:
        raise InputError("--text and its options apply only to the task text: semdiag train text --text FILE.")
    chosen |= {"length": longest, "least_length": least_length, "frozen": names(frozen)}
    chosen["snapshots"] = listed_numbers(snapshots, "--snapshots takes epochs", "1,5,20")
    model, training = configure(classification, chosen)
    where = find_device(device)
    if threads is not None:
        if threads < 1:
            raise InputError(f"--threads must be at least 1. Got {threads}.")
        torch.set_num_threads(threads)
    provenance = {"command": command_line()}
    choices = {"resume": resume, "overwrite": overwrite}
    if seeds:
        parent = out if out is not None else Path("checkpoints")
        numbers = listed_numbers(seeds, "--seeds takes whole numbers", "1,5,20")
        runs = open_seed_runs(parent, model, training, numbers, where, **choices)
        _train({run.trainer: run.folder for run in runs}, runs, provenance, quiet)
        return
    folder = out if out is not None else Path("checkpoints") / run_name(model, training)
    trainer = open_run(folder, model, training, where, **choices)
    _train({trainer: folder}, None, provenance, quiet)


def _train(
    folders: "dict[Trainer, Path]", seeds: "list[SeedRun] | None", provenance: dict[str, Any], quiet: bool
) -> None:
    from semdiag_models import DivergedError, InputError, train_run, train_seed_runs

    first, *_ = folders
    if not quiet and (line := introduction(first.training)):
        tell(line)
    with TrainingProgress(list(folders), quiet) as bar:
        try:
            if seeds is not None:
                train_seed_runs(seeds, provenance, bar.epoch, bar.batch)
            else:
                train_run(
                    folders[first],
                    first,
                    provenance,
                    lambda progress: bar.epoch(first, progress),
                    lambda: bar.batch(first),
                )
        except KeyboardInterrupt:
            tell(f"Stopped; {_saved(folders)}. To go on, add --resume.")
            raise typer.Exit(130) from None
        except DivergedError as error:
            raise InputError(f"{error} {_saved(folders)}.") from None
    for trainer in folders:
        summarise(trainer, several=seeds is not None)
    say(f"Next: semdiag dispersion {' '.join(str(folder / 'last.pt') for folder in folders.values())}")


def _saved(folders: "dict[Trainer, Path]") -> str:
    return ", ".join(f"{folder / 'last.pt'} holds epoch {trainer.epoch}" for trainer, folder in folders.items())
