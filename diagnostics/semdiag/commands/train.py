"""``semdiag train``."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semdiag.commands import completion
from semdiag.commands.printing.terminal import tell
from semdiag.commands.printing.training import TrainingProgress, summarise
from semdiag.commands.text_training import introduction, text_task

if TYPE_CHECKING:
    from semdiag_models import Trainer
    from semdiag_models.seed_runs import SeedRun
    from semdiag_models.tasks import Classification

_MODEL, _DATA, _TEXT, _OPTIMISATION, _RUN = "Model", "Data", "Text", "Optimisation", "Run"


def train(
    task: Annotated[
        str,
        typer.Argument(
            help="What to learn; see [bold]semdiag list tasks[/].",
            autocompletion=completion.names(completion.TASKS),
        ),
    ],
    attention: Annotated[
        str,
        typer.Option(
            help="See [bold]semdiag list attentions[/].",
            rich_help_panel=_MODEL,
            autocompletion=completion.names(completion.ATTENTIONS),
        ),
    ] = "full",
    k: Annotated[
        int | None,
        typer.Option(
            help="Keys kept per query; not for full. Of lsh those of a bucket, of routing those of a cluster.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    hash_rounds: Annotated[
        int,
        typer.Option(help="Of lsh: buckets of a query, each by hashes of its own.", rich_help_panel=_MODEL),
    ] = 1,
    hash_bits: Annotated[
        int | None,
        typer.Option(
            help="Of lsh: signs of a hash. Default: two to four buckets for every k tokens.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    hashes: Annotated[
        str,
        typer.Option(help="Of lsh: shared, by angles, or asymmetric, by scores.", rich_help_panel=_MODEL),
    ] = "shared",
    clusters: Annotated[
        int | None,
        typer.Option(help="Of routing. Default: one for every k tokens.", rich_help_panel=_MODEL),
    ] = None,
    centroid_decay: Annotated[
        float,
        typer.Option(help="Of routing: what a centroid keeps of its old place in a step.", rich_help_panel=_MODEL),
    ] = 0.999,
    global_tokens: Annotated[
        int,
        typer.Option(
            help="Learnt tokens that attend to all and that all attend to; for banded and block.",
            rich_help_panel=_MODEL,
        ),
    ] = 0,
    blocks: Annotated[int | None, typer.Option(help="Default: the task's recipe.", rich_help_panel=_MODEL)] = None,
    width: Annotated[
        int | None, typer.Option(help="Of the residual stream. Default: recipe.", rich_help_panel=_MODEL)
    ] = None,
    mlp_width: Annotated[int | None, typer.Option(help="Default: recipe.", rich_help_panel=_MODEL)] = None,
    heads: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 1,
    head_width: Annotated[
        int | None,
        typer.Option(
            help="Of each head: the width (as in the paper), or width / heads. Default: recipe.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    norm: Annotated[
        str,
        typer.Option(help="pre (the paper's code) or post (the paper's equations).", rich_help_panel=_MODEL),
    ] = "pre",
    pooling: Annotated[
        str,
        typer.Option(
            help="mean over the tokens, or cls: a learnt token put in front of them.", rich_help_panel=_MODEL
        ),
    ] = "mean",
    activation: Annotated[str, typer.Option(help="relu, gelu or mish.", rich_help_panel=_MODEL)] = "relu",
    dropout: Annotated[float, typer.Option(rich_help_panel=_MODEL)] = 0.01,
    inverse_temperature: Annotated[
        float, typer.Option(help="Factor on the scores.", rich_help_panel=_MODEL)
    ] = 1.0,
    pad_as_token: Annotated[
        bool,
        typer.Option(
            "--pad-as-token",
            help="Attend to PAD, pool it, and pad to a multiple of k, as the paper's runs did.",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    length: Annotated[
        int | None,
        typer.Option(
            "--length",
            "--window",
            help="Tokens per sample. Default: recipe; of a text, the mean pieces per line.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    train_samples: Annotated[
        int | None, typer.Option(help="Default: 5000; of a text, all windows.", rich_help_panel=_DATA)
    ] = None,
    holdout_samples: Annotated[
        int | None, typer.Option(help="Default: 2000; of a text, all windows.", rich_help_panel=_DATA)
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of data, initialisation, dropout and batch order.", rich_help_panel=_DATA)
    ] = 153476998,
    seeds: Annotated[
        str,
        typer.Option(
            help="Several seeds at once, like 1,2,3, in one stacked step: a folder each, as if trained alone.",
            rich_help_panel=_DATA,
        ),
    ] = "",
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 file to learn; for the task text.", rich_help_panel=_TEXT)
    ] = None,
    holdout_text: Annotated[
        Path | None,
        typer.Option(help="Second file to hold out. Default: the last tenth of the lines.", rich_help_panel=_TEXT),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="unigram or bpe, by SentencePiece.", show_default="unigram", rich_help_panel=_TEXT),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Pieces.", show_default="4096", rich_help_panel=_TEXT)
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Default: recipe.", rich_help_panel=_OPTIMISATION)] = None,
    until: Annotated[
        float | None,
        typer.Option(
            help="Stop after an epoch with at least this training accuracy, like 0.999.",
            rich_help_panel=_OPTIMISATION,
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Default: recipe.", rich_help_panel=_OPTIMISATION)] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, adam or adamw.", rich_help_panel=_OPTIMISATION)] = "sgd",
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Default: recipe; 0.001 for adam and adamw.", rich_help_panel=_OPTIMISATION),
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(help="Default: torch's, 0.01 for adamw and 0 for the others.", rich_help_panel=_OPTIMISATION),
    ] = None,
    learning_rate_decay: Annotated[
        float | None, typer.Option(help="Factor per epoch. Default: recipe.", rich_help_panel=_OPTIMISATION)
    ] = None,
    gradient_clip: Annotated[
        float, typer.Option(help="Largest 2-norm of the gradient.", rich_help_panel=_OPTIMISATION)
    ] = 0.5,
    precision: Annotated[
        str,
        typer.Option(
            help="Of the steps: float32, tf32 (CUDA) or bf16 (linear layers; attention stays float32).",
            rich_help_panel=_OPTIMISATION,
        ),
    ] = "float32",
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Steps through torch.compile. On a CPU 1.4 to 7 times slower; CUDA untried.",
            rich_help_panel=_OPTIMISATION,
        ),
    ] = False,
    query_key_scale: Annotated[
        float | None,
        typer.Option(
            help="Factor on W_q and W_k at the initialisation; scores and δ change by its square. Default: 1.",
            rich_help_panel=_OPTIMISATION,
        ),
    ] = None,
    fresh_samples: Annotated[
        bool,
        typer.Option(
            "--fresh-samples",
            help="Every epoch draws training samples of its own, so that the loss cannot fall by memorising.",
            rich_help_panel=_DATA,
        ),
    ] = False,
    snapshots: Annotated[
        str, typer.Option(help="Epochs to keep as files, like 1,5,20.", rich_help_panel=_RUN)
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder. Default: checkpoints/TASK-ATTENTION-seed-SEED. With --seeds: what holds such folders.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after the last saved epoch.", rich_help_panel=_RUN)
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew in a used folder.", rich_help_panel=_RUN)
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.", rich_help_panel=_RUN)] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads; part of what makes a run repeatable.", rich_help_panel=_RUN),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.", rich_help_panel=_RUN)] = False,
) -> None:
    """Train an encoder and keep its checkpoints.

    Without further options: the paper's recipe for the task. Every epoch is saved; Ctrl-C loses at most the
    unfinished one, and the same command with --resume goes on to the same weights.

    [bold]semdiag train even-pairs --attention topk --k 5[/]

    Language modelling, on any text: which piece follows a window of pieces?

    [bold]semdiag train text --text FILE --attention topk --k 5[/]
    """
    import torch

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
        raise InputError("--resume and --overwrite exclude each other.")
    found: Classification
    if task == Text.name:
        found = text_task(text, holdout_text, tokenizer, vocabulary, length, quiet)
    elif (text, holdout_text, tokenizer, vocabulary) == (None,) * 4:
        found = find_task(task)
    else:
        raise InputError("--text and its options belong to one task: semdiag train text --text FILE.")
    chosen = {
        "attention": attention,
        "k": k,
        "hash_rounds": hash_rounds,
        "hash_bits": hash_bits,
        "hashes": hashes,
        "clusters": clusters,
        "centroid_decay": centroid_decay,
        "blocks": blocks,
        "width": width,
        "mlp_width": mlp_width,
        "heads": heads,
        "head_width": head_width,
        "activation": activation,
        "dropout": dropout,
        "inverse_temperature": inverse_temperature,
        "pad_as_token": pad_as_token,
        "global_tokens": global_tokens,
        "norm": norm,
        "pooling": pooling,
        "length": length,
        "epochs": epochs,
        "seed": seed,
        "train_samples": train_samples,
        "holdout_samples": holdout_samples,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "learning_rate_decay": learning_rate_decay,
        "gradient_clip": gradient_clip,
        "snapshots": _whole_numbers(snapshots, "--snapshots takes epochs"),
        "optimizer": optimizer,
        "weight_decay": weight_decay,
        "until": until,
        "precision": precision,
        "compiled": compiled,
        "query_key_scale": query_key_scale,
        "fresh_samples": fresh_samples,
    }
    model, training = configure(found, chosen)
    where = find_device(device)
    if threads is not None:
        if threads < 1:
            raise InputError(f"--threads must be at least 1. Got {threads}.")
        torch.set_num_threads(threads)
    provenance = {"command": shlex.join(["semdiag", *sys.argv[1:]])}
    choices = {"resume": resume, "overwrite": overwrite}
    if seeds:
        parent = out if out is not None else Path("checkpoints")
        numbers = _whole_numbers(seeds, "--seeds takes whole numbers")
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
    tell(f"Next: semdiag dispersion {' '.join(str(folder / 'last.pt') for folder in folders.values())}")


def _saved(folders: "dict[Trainer, Path]") -> str:
    return ", ".join(f"{folder / 'last.pt'} holds epoch {trainer.epoch}" for trainer, folder in folders.items())


def _whole_numbers(text: str, what: str) -> tuple[int, ...]:
    from semdiag_models import InputError

    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"{what} separated by commas, like 1,5,20. Got {text!r}.") from None
