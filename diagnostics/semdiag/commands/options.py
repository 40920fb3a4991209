"""The options that the measuring commands share."""

from pathlib import Path
from typing import Annotated

import typer

from semdiag.commands import completion

_MEASURE, _OUTPUT = "What is measured", "Output"

Models = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[MODEL]...",
        help="Checkpoints (.pt), run folders, checkpoints of the paper's released code, hf:DIRECTORY (a Hugging "
        "Face model on disk), or package.module:function (that builds your model, or it and its inputs). "
        "None: every run in ./checkpoints or in $SEMDIAG_CHECKPOINTS.",
        show_default=False,
        autocompletion=completion.models,
    ),
]
Against = Annotated[
    Path | None,
    typer.Option(
        metavar="MODEL",
        help="Compare every model with this one. Default: full models with their counterparts of the same task, "
        "seed, size and snapshot.",
        rich_help_panel=_MEASURE,
        autocompletion=completion.models,
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option(
        help="Token ids (N, L) as .npy, .npz or .pt; for hf: models also texts, one a line (.txt); for models of "
        "text a .txt, of which --samples windows are drawn; for models of your own also a .pt with a dictionary "
        "of arguments. Default: the run's own held-out samples, regenerated from its seed; for the paper's code "
        "fresh samples of the task.",
        rich_help_panel=_MEASURE,
    ),
]
Samples = Annotated[
    int,
    typer.Option(
        help="How many inputs. More than a run held out are refused, and the default is then lowered; of "
        "--inputs the default is all.",
        rich_help_panel=_MEASURE,
    ),
]
BatchSize = Annotated[int, typer.Option(help="Samples at a time.", rich_help_panel=_MEASURE)]
Device = Annotated[
    str,
    typer.Option(
        help="auto (cuda, mps or cpu), cpu, cuda, mps, or another accelerator that torch has here.",
        rich_help_panel=_MEASURE,
        autocompletion=completion.names(("auto", "cpu", "cuda", "mps")),
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32 or float64, of model and scores. auto: float64 for semdiag's and the paper's encoders, so "
        "that numbers are the same on every processor; float32 with any other model among them, or on mps.",
        rich_help_panel=_MEASURE,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Of fresh samples and of what else is drawn: noise (stability, mask-stability), k-sweep's random "
        "control, the queries of --queries, directions (bounds, lipschitz, landscape).",
        rich_help_panel=_MEASURE,
    ),
]
MinKeys = Annotated[
    int,
    typer.Option(
        help="Leave out queries with fewer keys to attend to; the key loads of separation still count them.",
        rich_help_panel=_MEASURE,
    ),
]
Queries = Annotated[
    int | None,
    typer.Option(
        help="Draw that many queries per sample and head of the longest sequence, and of others the same share: "
        "for long sequences. Numbers are estimates with intervals; what rests on every query is refused. "
        "Default: all.",
        rich_help_panel=_MEASURE,
        show_default=False,
    ),
]
MaxQueries = Annotated[
    int,
    typer.Option(
        help="Queries and keys of a model that are kept one by one. Beyond, tables hold exact numbers, means and "
        "extremes, and percentiles of a sketch, within 0.14 % in rank (on Python 3.14, which lacks its library, "
        "of a sample, within an error that is said).",
        rich_help_panel=_MEASURE,
    ),
]
Counterfactual = Annotated[
    str,
    typer.Option(
        "--k",
        help="Within full models: what the quantity would be if each query kept its k largest scores. "
        "One k or several, like 5 or 4,8,16.",
        rich_help_panel=_MEASURE,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="JSON file with mask_type, mask_size, n_heads … for a checkpoint of the paper's code whose file "
        "name does not say it.",
        rich_help_panel=_MEASURE,
    ),
]
Noise = Annotated[
    str,
    typer.Option(
        help="Gaussian noise on the embedded tokens, relative to each token's root mean square. One level or "
        "several, like 0.01 or 0.001,0.01,0.1.",
        rich_help_panel=_MEASURE,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for figures and tables. Default: reports/COMMAND-MODEL.", rich_help_panel=_OUTPUT),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.", rich_help_panel=_OUTPUT)]
PerQuery = Annotated[
    Path | None,
    typer.Option(
        help="Write every query to this .parquet file, and the key loads beside it. With --queries these are the "
        "drawn ones, and of more than --max-queries a random sample.",
        rich_help_panel=_OUTPUT,
    ),
]
Figures = Annotated[str, typer.Option(help="Formats, of png, svg, pdf; or none.", rich_help_panel=_OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no tables.", rich_help_panel=_OUTPUT)]
