"""``semdiag selections``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from semdiag.presenting.question import Shared, command

_ASKED = "What is asked"
_OF_MODELS = (
    "inputs", "samples", "batch_size", "device", "dtype", "seed", "min_keys", "config", "head", "out", "per_query",
    "figures",
)  # fmt: skip


@command(leave_out=_OF_MODELS)
def selections(
    file: Annotated[
        Path,
        typer.Argument(
            help="A .npz, .safetensors or .parquet file with indices (rows × k, -1 for none) and, where they are "
            "known, scores (rows × n), lengths, starts and documents.",
            show_default=False,
        ),
    ],
    format: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The precision in which the engine computed its scores: float32, bfloat16, float16, "
            "float8_e4m3fn, float8_e5m2, float64. It says what rounding explains.",
            rich_help_panel=_ASKED,
        ),
    ] = "float32",
    causal: Annotated[
        bool,
        typer.Option(
            "--causal",
            help="Keys after the query may not be chosen. The last dimension before the keys is the query's, and "
            "queries are the last tokens.",
            rich_help_panel=_ASKED,
        ),
    ] = False,
    keys: Annotated[
        int | None,
        typer.Option(
            help="How many keys there are, if the file has no scores.", rich_help_panel=_ASKED, show_default=False
        ),
    ] = None,
    *,
    shared: Shared,
) -> None:
    """Check whether a selection is the top-k of its scores.

    Selections are what sparse-attention indexers, routers of experts and top-k kernels return. Each row is exact,
    a legal tie, within rounding, or faulty: wrong, missing, duplicate, padding, future, out of range. Exit code 1:
    a row is faulty, 0: none is, 2: the input is wrong, so that a kernel's test can call it. In Python:
    semdiag.check_selection.

    [bold]semdiag selections indexer.npz --format bfloat16 --causal[/]
    """
    from semdiag.questions.selections.answer.check import check_summary
    from semdiag.questions.selections.measure.check import check_selection
    from semdiag.questions.selections.measure.files import read_selection
    from semdiag.questions.selections.terminal import print_check
    from semdiag_models import InputError

    read = read_selection(file)
    rules: dict[str, Any] = {"starts": read.starts, "documents": read.documents, "keys": keys}
    try:
        found = check_selection(read.scores, read.indices, read.lengths, causal, format, **rules)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    summary = check_summary(found, str(file), _provenance(format=found.format, causal=causal))
    _deliver(summary, shared, print_check)
    raise typer.Exit(int(found.faults > 0))


def _provenance(**options: Any) -> dict[str, Any]:
    """Versions, the command and its options."""
    import sys
    from importlib.metadata import version

    import torch

    versions = {"semdiag": version("semdiag"), "torch": str(torch.__version__)}
    return {**versions, **options, "command": ["semdiag", *sys.argv[1:]]}


def _deliver(summary: dict[str, Any], shared: Shared, show: Any) -> None:
    """Print the summary as one JSON object, and as tables."""
    import json

    if shared.values["as_json"]:
        typer.echo(json.dumps(summary, allow_nan=False))
    if not shared.values["quiet"]:
        show(summary)
