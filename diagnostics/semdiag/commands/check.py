"""``semdiag check``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from semdiag.presenting import completion, options
from semdiag.presenting.question import Shared, command
from semdiag.presenting.terminal.terminal import beside_json, say, tell

_JUDGED = "What is judged"


@command(leave_out=("seed", "min_keys", "out", "per_query", "figures"))
def check(
    models: options.Models = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help='What every model must satisfy, like "dispersion.p95 < 10". Repeatable. First a quantity: '
            "dispersion, separation or load with .mean or .p0 … .p100, or accuracy or residual (how far attention "
            "recomputed from the capture deviates). Then <, <=, > or >= and a number. Then, to choose models and "
            "layers, any of layer=0 attention=topk task=even-pairs model=*seed-1*.",
            rich_help_panel=_JUDGED,
            autocompletion=completion.names(completion.RULES),
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="JSON file that an earlier semdiag check --json printed. A number that moved since is a failure.",
            rich_help_panel=_JUDGED,
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            help="With --baseline: how far a number may move, as a share of it.", rich_help_panel=_JUDGED
        ),
    ] = 0.05,
    every_layer: Annotated[
        bool,
        typer.Option(
            "--every-layer",
            help="Fail if δ_h < δ_s does not hold at the median of a single layer. Default: fail if it does not "
            "hold in half of the layers or more.",
            rich_help_panel=_JUDGED,
        ),
    ] = False,
    junit: Annotated[
        Path | None,
        typer.Option(help="Also write the verdicts to this file, as JUnit XML.", rich_help_panel=_JUDGED),
    ] = None,
    exit_zero: Annotated[
        bool,
        typer.Option("--exit-zero", help="Report failures, but exit with code 0.", rich_help_panel=_JUDGED),
    ] = False,
    *,
    shared: Shared,
) -> None:
    """Check that top-k attention has the smaller dispersion: δ_h < δ_s. Made for CI.

    Pairs full and top-k checkpoints of the same task, seed, size, setting and snapshot. In each pair δ_h < δ_s
    must hold at p50, p75, p90 and p95 of the pooled queries, and at the median of more than half of the layers.
    (Untrained models pass, too: a few of many scores have a smaller range to begin with.) In each model attention
    must be captured completely, and no certified mask may change under 1% noise. Your own rules and a baseline
    are checked as well; with either, a model needs no partner. Exit code 0: everything passes; 1: something
    fails; 2: there is nothing to check, or the input is wrong.

    [bold]semdiag check --rule "dispersion.p95 < 10 attention=topk"[/]
    """
    from semdiag.commands.printing.check import conclusion, print_check
    from semdiag.questions.mask_stability.measure.probe import NoisePlan
    from semdiag.reporting.gate.drift import read_baseline
    from semdiag.reporting.gate.junit import junit_xml
    from semdiag.reporting.gate.rules import parse_rule
    from semdiag.reporting.gate.verification import PROBED, Expectations, verify
    from semdiag_models import InputError
    from semdiag_models.writing import write_text

    if junit is not None and junit.is_dir():
        raise InputError(f"{junit} is a folder. Name a file with --junit FILE.")
    if junit is not None and not junit.parent.is_dir():
        raise InputError(f"{junit} cannot be written: there is no folder {junit.parent}.")
    if not 0 <= tolerance < float("inf"):
        raise InputError(f"--tolerance must be a fraction of at least 0, like 0.05. Got {tolerance}.")
    if baseline is None and "tolerance" in shared.typed:
        raise InputError("--tolerance applies to the numbers of a baseline: add --baseline FILE.")
    known = None if baseline is None else read_baseline(baseline)
    expected = Expectations([parse_rule(text) for text in rule or ()], known, tolerance, every_layer)
    paired = not expected.rules and known is None  # which applies to encoders only
    conditions = shared.conditions(plans=(NoisePlan(draws=1),), probe_samples=PROBED, encoders_only=paired)
    result = verify(shared.measured(models, conditions), expected)
    if junit is not None:
        write_text(junit, junit_xml(result))
    if not shared.values["quiet"]:
        with beside_json(shared.values["as_json"]):
            print_check(result)
    if shared.values["as_json"]:
        typer.echo(json.dumps(result.summary(), allow_nan=False))
    for words in result.failures:
        tell(f"semdiag: {words}.")
    if not shared.values["quiet"]:
        with beside_json(shared.values["as_json"]):
            say(conclusion(result))
    if result.failures and not exit_zero:
        raise typer.Exit(1)
