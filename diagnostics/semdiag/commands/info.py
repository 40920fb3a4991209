"""``semdiag info``."""

from pathlib import Path
from typing import Annotated

import typer

from semdiag.commands import options

_SPLITS = ("train", "holdout")


def info(
    model: Annotated[
        Path,
        typer.Argument(help="A checkpoint, a run's folder, hf:DIRECTORY, or package.module:function."),
    ],
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Show what is in a checkpoint: architecture, training, accuracy, provenance.

    [bold]semdiag info checkpoints/even-pairs-topk-5-seed-153476998[/]
    """
    import json

    from rich.console import Console
    from rich.table import Column, Table

    from semdiag.capturing.loading import describe, load
    from semdiag.commands.measuring import read_config
    from semdiag.findings.strict_json import json_ready
    from semdiag_models.tasks import perplexity

    loaded = load(model, read_config(config))
    last = {name: column[-1] for name, column in loaded.history.items() if column}
    training = loaded.training.to_dict() if loaded.training is not None else {}
    text = training.pop("text", None)
    if text is not None:
        text["model"] = f"SentencePiece, {len(text['model']) * 3 // 4:,} bytes"
        last.update({f"{split}_perplexity": perplexity(last[f"{split}_loss"]) for split in _SPLITS if last})
    sections = {
        "checkpoint": {
            name: getattr(loaded, name)
            for name in ("path", "sha256", "source", "snapshot", "task", "seed", "epoch")
        },
        "model": describe(loaded),
        "training": training,
        **({"text": text} if text is not None else {}),
        "last epoch": last,
        "provenance": loaded.provenance,
    }
    if as_json:
        typer.echo(json.dumps(json_ready({"schema": "semdiag.info/1", **sections}), allow_nan=False))
        return
    console = Console(markup=False)  # what a file says is shown as it is
    for title, entries in sections.items():
        table = Table("", Column(overflow="fold"), title=title, title_justify="left", show_header=False)
        for name, value in entries.items():
            table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
        console.print(table if entries else f"{title}: not in this file")
