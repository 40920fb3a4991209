"""``semdiag info``."""

from pathlib import Path
from typing import Annotated

import typer

from semdiag.presenting import completion, options
from semdiag.presenting.terminal.terminal import terminal

_SPLITS = ("train", "holdout")
_FACTS = {name: name for name in ("path", "sha256", "source", "snapshot", "task", "seed", "epoch")} | {
    "weights": "weights_sha256"
}


def info(
    model: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint (.pt), the folder of a run, hf:DIRECTORY, or package.module:function.",
            autocompletion=completion.models,
        ),
    ],
    config: options.Config = None,
    head: options.Head = "auto",
    as_json: options.Json = False,
) -> None:
    """Show what is in a checkpoint: architecture, training, accuracy, provenance.

    A hash of the weights is compared with the one recorded in the checkpoint, and with the one in manifest.json
    beside the run's folder, if there is one. Exit code 1 if they differ.

    [bold]semdiag info checkpoints/even-pairs-topk-5-seed-153476998[/]
    """
    from rich.table import Column, Table

    from semdiag.capturing.loading import describe, load_all
    from semdiag.commands.measuring import read_config
    from semdiag_models.tasks import perplexity

    (loaded,) = load_all([model], read_config(config), head)
    last = {name: column[-1] for name, column in loaded.history.items() if column}
    training = loaded.training.to_dict() if loaded.training is not None else {}
    text = training.pop("text", None)
    if text is not None:
        text["model"] = f"SentencePiece, {len(text['model']) * 3 // 4:,} bytes"
        last.update({f"{split}_perplexity": perplexity(last[f"{split}_loss"]) for split in _SPLITS if last})
    wrong = loaded.contradicted_by
    places = " and ".join(wrong or loaded.recorded_weights)
    recorded = (
        f"NOT those recorded in {places}" if wrong else f"as recorded in {places}" if places else "not recorded"
    )
    sections = {
        "checkpoint": {name: getattr(loaded, attribute) for name, attribute in _FACTS.items()}
        | {"verified": recorded},
        "model": describe(loaded),
        "training": training,
        **({"text": text} if text is not None else {}),
        "last epoch": last,
        "provenance": loaded.provenance,
    }
    if as_json:
        import json

        from semdiag.measuring.findings.strict_json import MODEL_FACTS, json_ready, schema

        chosen = {} if loaded.external else loaded.encoder.config.to_dict()
        known = (loaded.path, loaded.sha256, loaded.task, chosen.get("attention"), chosen.get("k"), loaded.epoch)
        content = {"results": [dict(zip(MODEL_FACTS, known, strict=True))], **sections}
        typer.echo(json.dumps(json_ready({"schema": schema("info"), **content}), allow_nan=False))
        raise typer.Exit(bool(wrong))
    console = terminal()
    for title, entries in sections.items():
        table = Table("", Column(overflow="fold"), title=title, title_justify="left", show_header=False)
        for name, value in entries.items():
            said = f"{value:.6g}" if isinstance(value, float) else str(value)
            table.add_row(name, "–" if value is None or said in ("", "unknown") else said)
        console.print(table if entries else f"{title}: not in this file")
    raise typer.Exit(bool(wrong))
