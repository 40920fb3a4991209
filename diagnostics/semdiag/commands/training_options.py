"""The options of ``semdiag train``; their defaults stand in its signature."""

from pathlib import Path
from typing import Annotated

import typer

from semdiag.presenting import options

_MODEL, _DATA, _TEXT, _OPTIMISATION, _RUN = "Model", "Data", "Text", "Optimisation", "Run"

Task = Annotated[
    str,
    typer.Argument(
        help="Task to learn; see [bold]semdiag list tasks[/].",
        autocompletion=options.names(options.TASKS),
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        help="Kind of attention; see [bold]semdiag list attentions[/].",
        rich_help_panel=_MODEL,
        autocompletion=options.names(options.ATTENTIONS),
    ),
]
K = Annotated[
    int | None,
    typer.Option(
        help="Keys that each query keeps; not for full. For lsh the keys of a bucket, for routing of a cluster.",
        rich_help_panel=_MODEL,
    ),
]
HashRounds = Annotated[
    int,
    typer.Option(
        help="For lsh: how many buckets a query is in, each by different hashes.", rich_help_panel=_MODEL
    ),
]
HashBits = Annotated[
    int | None,
    typer.Option(
        help="For lsh: sign bits of a hash. Default: enough for two to four buckets per k tokens.",
        rich_help_panel=_MODEL,
    ),
]
Hashes = Annotated[
    str,
    typer.Option(
        help="For lsh: shared (buckets by angles) or asymmetric (buckets by scores).", rich_help_panel=_MODEL
    ),
]
Clusters = Annotated[
    int | None,
    typer.Option(help="For routing: number of clusters. Default: one for every k tokens.", rich_help_panel=_MODEL),
]
CentroidDecay = Annotated[
    float,
    typer.Option(
        help="For routing: share of its old position that a centroid keeps at each step.", rich_help_panel=_MODEL
    ),
]
ScoreGradient = Annotated[
    str,
    typer.Option(
        help="For topk: exact, or straight-through (the scores learn as if every key were kept).",
        rich_help_panel=_MODEL,
    ),
]
GlobalTokens = Annotated[
    int,
    typer.Option(
        help="For banded and block: number of learnt tokens that attend to everything and to which everything "
        "attends.",
        rich_help_panel=_MODEL,
    ),
]
Blocks = Annotated[
    int | None, typer.Option(help="Number of transformer blocks. Default: recipe.", rich_help_panel=_MODEL)
]
Width = Annotated[
    int | None, typer.Option(help="Width of the residual stream. Default: recipe.", rich_help_panel=_MODEL)
]
MlpWidth = Annotated[
    int | None,
    typer.Option(help="Width of the hidden layer of the MLPs. Default: recipe.", rich_help_panel=_MODEL),
]
Heads = Annotated[int, typer.Option(help="Attention heads per block.", rich_help_panel=_MODEL)]
HeadWidth = Annotated[
    int | None,
    typer.Option(
        help="Width of each head: the model's width (as in the paper), or width / heads. Default: recipe.",
        rich_help_panel=_MODEL,
    ),
]
Norm = Annotated[
    str,
    typer.Option(
        help="Where to normalise: pre (as in the paper's code) or post (as in its equations).",
        rich_help_panel=_MODEL,
    ),
]
Pooling = Annotated[
    str,
    typer.Option(
        help="What is classified: the mean of the tokens, or cls, a learnt token in front of them.",
        rich_help_panel=_MODEL,
    ),
]
Activation = Annotated[
    str, typer.Option(help="Activation of the MLPs: relu, gelu or mish.", rich_help_panel=_MODEL)
]
Dropout = Annotated[float, typer.Option(help="Dropout probability.", rich_help_panel=_MODEL)]
InverseTemperature = Annotated[float, typer.Option(help="Factor on the attention scores.", rich_help_panel=_MODEL)]
PadAsToken = Annotated[
    bool,
    typer.Option(
        "--pad-as-token",
        help="Treat padding as a token, as the paper's runs did: attend to it, pool it, and pad to a multiple of "
        "k.",
        rich_help_panel=_MODEL,
    ),
]
Length = Annotated[
    str | None,
    typer.Option(
        "--length",
        "--window",
        metavar="N or LOW:HIGH",
        help="Tokens per sample; 5:20 draws each sample's own length, and pads. Default: recipe; for a text, the "
        "mean number of pieces per line.",
        rich_help_panel=_DATA,
    ),
]
TrainSamples = Annotated[
    int | None,
    typer.Option(help="Samples to train on. Default: 5000; for a text, all windows.", rich_help_panel=_DATA),
]
HoldoutSamples = Annotated[
    int | None,
    typer.Option(help="Samples to hold out. Default: 2000; for a text, all windows.", rich_help_panel=_DATA),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Seed of data, initialisation, dropout and batch order.",
        show_default="153476998",
        rich_help_panel=_DATA,
    ),
]
Seeds = Annotated[
    str,
    typer.Option(
        metavar="SEED,SEED",
        help="Train several seeds together, like 1,2,3. Each gets its own folder and ends as if trained alone.",
        rich_help_panel=_DATA,
    ),
]
Text = Annotated[
    Path | None, typer.Option(help="For the task text: the UTF-8 file to learn.", rich_help_panel=_TEXT)
]
HoldoutText = Annotated[
    Path | None,
    typer.Option(
        help="File of held-out text. Default: the last tenth of the lines of --text.", rich_help_panel=_TEXT
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="How SentencePiece cuts the text into pieces: unigram or bpe.",
        show_default="unigram",
        rich_help_panel=_TEXT,
    ),
]
Vocabulary = Annotated[
    int | None, typer.Option(help="Number of different pieces.", show_default="4096", rich_help_panel=_TEXT)
]
Epochs = Annotated[
    int | None, typer.Option(help="Epochs to train. Default: recipe.", rich_help_panel=_OPTIMISATION)
]
Until = Annotated[
    float | None,
    typer.Option(
        help="Stop after the first epoch with at least this training accuracy, like 0.999.",
        rich_help_panel=_OPTIMISATION,
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(help="Samples per step. Default: recipe.", rich_help_panel=_OPTIMISATION)
]
Optimizer = Annotated[str, typer.Option(help="sgd, adam or adamw.", rich_help_panel=_OPTIMISATION)]
LearningRate = Annotated[
    float | None,
    typer.Option(
        help="Learning rate at the start. Default: recipe; 0.001 for adam and adamw.",
        rich_help_panel=_OPTIMISATION,
    ),
]
WeightDecay = Annotated[
    float | None,
    typer.Option(
        help="Weight decay. Default: torch's, 0.01 for adamw and 0 for the others.", rich_help_panel=_OPTIMISATION
    ),
]
LearningRateDecay = Annotated[
    float | None,
    typer.Option(
        help="Factor on the learning rate after each epoch. Default: recipe.", rich_help_panel=_OPTIMISATION
    ),
]
GradientClip = Annotated[float, typer.Option(help="Clip gradients to this 2-norm.", rich_help_panel=_OPTIMISATION)]
Precision = Annotated[
    str,
    typer.Option(
        help="Precision of training steps: float32, tf32 (CUDA only) or bf16 (linear layers only; attention stays "
        "float32).",
        rich_help_panel=_OPTIMISATION,
    ),
]
Compiled = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the steps with torch.compile: 2 to 6 times as fast on CUDA. Refused on a CPU.",
        rich_help_panel=_OPTIMISATION,
    ),
]
QueryKeyScale = Annotated[
    float | None,
    typer.Option(
        help="Factor on W_q and W_k at the initialisation. Scores and δ change by its square. Default: 1.",
        rich_help_panel=_OPTIMISATION,
    ),
]
Frozen = Annotated[
    str,
    typer.Option(
        help="What stays as it was initialised: qk (W_q and W_k, with their biases). Default: nothing.",
        rich_help_panel=_OPTIMISATION,
    ),
]
FreshSamples = Annotated[
    bool,
    typer.Option(
        "--fresh-samples",
        help="Draw new training samples for every epoch, so that the loss cannot fall by memorising them.",
        rich_help_panel=_DATA,
    ),
]
Snapshots = Annotated[
    str,
    typer.Option(
        metavar="EPOCH,EPOCH",
        help="Epochs whose checkpoints are kept as files of their own, like 1,5,20.",
        rich_help_panel=_RUN,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the run. Default: checkpoints/TASK-ATTENTION-seed-SEED. With --seeds: the folder that "
        "holds such folders.",
        rich_help_panel=_RUN,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue after the last saved epoch.", rich_help_panel=_RUN)
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Start anew in a folder that holds a run already.", rich_help_panel=_RUN),
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda, mps, or another accelerator that torch finds. auto takes cuda, else mps, else cpu.",
        rich_help_panel=_RUN,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads. The same number is needed to repeat a run exactly.", rich_help_panel=_RUN),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress bar.", rich_help_panel=_RUN)]
