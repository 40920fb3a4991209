"""The options of ``semdiag train``; their defaults stand in its signature."""

from pathlib import Path
from typing import Annotated

import typer

from semdiag.commands import completion

_MODEL, _DATA, _TEXT, _OPTIMISATION, _RUN = "Model", "Data", "Text", "Optimisation", "Run"

Task = Annotated[
    str,
    typer.Argument(
        help="What to learn; see [bold]semdiag list tasks[/].",
        autocompletion=completion.names(completion.TASKS),
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        help="See [bold]semdiag list attentions[/].",
        rich_help_panel=_MODEL,
        autocompletion=completion.names(completion.ATTENTIONS),
    ),
]
K = Annotated[
    int | None,
    typer.Option(
        help="Keys kept per query; not for full. Of lsh those of a bucket, of routing those of a cluster.",
        rich_help_panel=_MODEL,
    ),
]
HashRounds = Annotated[
    int,
    typer.Option(help="Of lsh: buckets of a query, each by hashes of its own.", rich_help_panel=_MODEL),
]
HashBits = Annotated[
    int | None,
    typer.Option(
        help="Of lsh: signs of a hash. Default: two to four buckets for every k tokens.",
        rich_help_panel=_MODEL,
    ),
]
Hashes = Annotated[
    str,
    typer.Option(help="Of lsh: shared, by angles, or asymmetric, by scores.", rich_help_panel=_MODEL),
]
Clusters = Annotated[
    int | None,
    typer.Option(help="Of routing. Default: one for every k tokens.", rich_help_panel=_MODEL),
]
CentroidDecay = Annotated[
    float,
    typer.Option(help="Of routing: what a centroid keeps of its old place in a step.", rich_help_panel=_MODEL),
]
GlobalTokens = Annotated[
    int,
    typer.Option(
        help="Learnt tokens that attend to all and that all attend to; for banded and block.",
        rich_help_panel=_MODEL,
    ),
]
Blocks = Annotated[int | None, typer.Option(help="Default: the task's recipe.", rich_help_panel=_MODEL)]
Width = Annotated[
    int | None, typer.Option(help="Of the residual stream. Default: recipe.", rich_help_panel=_MODEL)
]
MlpWidth = Annotated[int | None, typer.Option(help="Default: recipe.", rich_help_panel=_MODEL)]
Heads = Annotated[int, typer.Option(rich_help_panel=_MODEL)]
HeadWidth = Annotated[
    int | None,
    typer.Option(
        help="Of each head: the width (as in the paper), or width / heads. Default: recipe.",
        rich_help_panel=_MODEL,
    ),
]
Norm = Annotated[
    str,
    typer.Option(help="pre (the paper's code) or post (the paper's equations).", rich_help_panel=_MODEL),
]
Pooling = Annotated[
    str,
    typer.Option(
        help="mean over the tokens, or cls: a learnt token put in front of them.", rich_help_panel=_MODEL
    ),
]
Activation = Annotated[str, typer.Option(help="relu, gelu or mish.", rich_help_panel=_MODEL)]
Dropout = Annotated[float, typer.Option(rich_help_panel=_MODEL)]
InverseTemperature = Annotated[float, typer.Option(help="Factor on the scores.", rich_help_panel=_MODEL)]
PadAsToken = Annotated[
    bool,
    typer.Option(
        "--pad-as-token",
        help="Attend to PAD, pool it, and pad to a multiple of k, as the paper's runs did.",
        rich_help_panel=_MODEL,
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        "--length",
        "--window",
        help="Tokens per sample. Default: recipe; of a text, the mean pieces per line.",
        rich_help_panel=_DATA,
    ),
]
TrainSamples = Annotated[
    int | None, typer.Option(help="Default: 5000; of a text, all windows.", rich_help_panel=_DATA)
]
HoldoutSamples = Annotated[
    int | None, typer.Option(help="Default: 2000; of a text, all windows.", rich_help_panel=_DATA)
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Of data, initialisation, dropout and batch order.", show_default="153476998", rich_help_panel=_DATA
    ),
]
Seeds = Annotated[
    str,
    typer.Option(
        help="Several seeds at once, like 1,2,3, in one stacked step: a folder each, as if trained alone.",
        rich_help_panel=_DATA,
    ),
]
Text = Annotated[Path | None, typer.Option(help="UTF-8 file to learn; for the task text.", rich_help_panel=_TEXT)]
HoldoutText = Annotated[
    Path | None,
    typer.Option(help="Second file to hold out. Default: the last tenth of the lines.", rich_help_panel=_TEXT),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="unigram or bpe, by SentencePiece.", show_default="unigram", rich_help_panel=_TEXT),
]
Vocabulary = Annotated[int | None, typer.Option(help="Pieces.", show_default="4096", rich_help_panel=_TEXT)]
Epochs = Annotated[int | None, typer.Option(help="Default: recipe.", rich_help_panel=_OPTIMISATION)]
Until = Annotated[
    float | None,
    typer.Option(
        help="Stop after an epoch with at least this training accuracy, like 0.999.",
        rich_help_panel=_OPTIMISATION,
    ),
]
BatchSize = Annotated[int | None, typer.Option(help="Default: recipe.", rich_help_panel=_OPTIMISATION)]
Optimizer = Annotated[str, typer.Option(help="sgd, adam or adamw.", rich_help_panel=_OPTIMISATION)]
LearningRate = Annotated[
    float | None,
    typer.Option(help="Default: recipe; 0.001 for adam and adamw.", rich_help_panel=_OPTIMISATION),
]
WeightDecay = Annotated[
    float | None,
    typer.Option(help="Default: torch's, 0.01 for adamw and 0 for the others.", rich_help_panel=_OPTIMISATION),
]
LearningRateDecay = Annotated[
    float | None, typer.Option(help="Factor per epoch. Default: recipe.", rich_help_panel=_OPTIMISATION)
]
GradientClip = Annotated[
    float, typer.Option(help="Largest 2-norm of the gradient.", rich_help_panel=_OPTIMISATION)
]
Precision = Annotated[
    str,
    typer.Option(
        help="Of the steps: float32, tf32 (CUDA) or bf16 (linear layers; attention stays float32).",
        rich_help_panel=_OPTIMISATION,
    ),
]
Compiled = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Steps through torch.compile. On a CPU 1.4 to 7 times slower; CUDA untried.",
        rich_help_panel=_OPTIMISATION,
    ),
]
QueryKeyScale = Annotated[
    float | None,
    typer.Option(
        help="Factor on W_q and W_k at the initialisation; scores and δ change by its square. Default: 1.",
        rich_help_panel=_OPTIMISATION,
    ),
]
FreshSamples = Annotated[
    bool,
    typer.Option(
        "--fresh-samples",
        help="Every epoch draws training samples of its own, so that the loss cannot fall by memorising.",
        rich_help_panel=_DATA,
    ),
]
Snapshots = Annotated[str, typer.Option(help="Epochs to keep as files, like 1,5,20.", rich_help_panel=_RUN)]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder. Default: checkpoints/TASK-ATTENTION-seed-SEED. With --seeds: what holds such folders.",
        rich_help_panel=_RUN,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on after the last saved epoch.", rich_help_panel=_RUN)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start anew in a used folder.", rich_help_panel=_RUN)]
Device = Annotated[
    str,
    typer.Option(
        help="auto (cuda, mps or cpu), cpu, cuda, mps, or another accelerator that torch has here.",
        rich_help_panel=_RUN,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads; part of what makes a run repeatable.", rich_help_panel=_RUN),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.", rich_help_panel=_RUN)]
