"""``semdiag monitor``."""

from pathlib import Path
from typing import Annotated

import typer

from semdiag.commands.measuring import FORMATS
from semdiag.presenting.terminal.terminal import say


def monitor(
    file: Annotated[
        Path, typer.Argument(help="A monitor's .csv or .parquet: that of its layers, or of its heads beside it.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Draw the whole run, layers against steps, to this .png, .svg or .pdf."),
    ] = None,
) -> None:
    """Show a training as a monitor saw it: the extremes of its heads and the alarms; with --out a figure.

    In Python: with semdiag.Monitor(model, path="attention.csv", alarm={"max_logit": 50}): …

    [bold]semdiag monitor attention.csv --out run.png[/]
    """
    from semdiag.measuring.calls.monitor_alarms import extremes_of
    from semdiag.measuring.calls.monitor_log import read_heads
    from semdiag.presenting.drawing.monitored_run import monitored_run
    from semdiag_models import InputError

    heads = read_heads(file)
    if out is not None:
        if out.suffix[1:] not in FORMATS:
            raise InputError(f"--out takes a .png, .svg or .pdf. Got {out}.")
        if heads.empty:
            raise InputError(f"{file} has no rows: no step was looked at, and there is nothing to draw.")
        try:
            monitored_run(heads).savefig(out, dpi=150)
        except OSError as error:
            raise InputError(f"{out} cannot be written: {error.strerror or error}.") from None
    for line in extremes_of(heads):
        say(line)
    if out is not None:
        say(f"Figure: {out}")
