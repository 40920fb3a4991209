"""``semdiag check``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from semdiag.commands import completion, options
from semdiag.commands.printing.terminal import tell
from semdiag.commands.shared import Shared, with_options

_JUDGED = "What is judged"


@with_options(leave_out=("seed", "min_keys", "out", "per_query", "figures"))
def check(
    models: options.Models = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help='What every model must satisfy, like "dispersion.p95 < 10". Repeatable. dispersion, separation '
            "or load with .mean, .p0 … .p100, or accuracy or residual; <, <=, >, >=; then any of layer=0 "
            "attention=topk task=even-pairs model=*seed-1*.",
            rich_help_panel=_JUDGED,
            autocompletion=completion.names(completion.RULES),
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="What an earlier semdiag check --json printed: numbers that moved since are a failure.",
            rich_help_panel=_JUDGED,
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Share by which a number of the baseline may move.", rich_help_panel=_JUDGED)
    ] = 0.05,
    every_layer: Annotated[
        bool,
        typer.Option(
            "--every-layer",
            help="One layer without δ_h < δ_s at its median is a failure; by default half of them are.",
            rich_help_panel=_JUDGED,
        ),
    ] = False,
    junit: Annotated[
        Path | None,
        typer.Option(help="Also write the verdicts to this file, as JUnit XML.", rich_help_panel=_JUDGED),
    ] = None,
    exit_zero: Annotated[
        bool,
        typer.Option("--exit-zero", help="Say what fails, but leave with exit code 0.", rich_help_panel=_JUDGED),
    ] = False,
    *,
    shared: Shared,
) -> None:
    """Check that top-k attention has the smaller dispersion: δ_h < δ_s. Made for CI.

    Pairs full and top-k checkpoints of the same task, seed, size, setting and snapshot. δ_h < δ_s must hold pooled
    at p50, p75, p90 and p95, and at the median of more than half of the layers; untrained models pass, too: few of
    many scores have a small range to begin with. Capture must be complete, and no certified mask
    may change under 1 % noise. Further rules and a baseline are judged besides; with either, unpaired models are
    fine. Exit code 0: everything passes; 1: something fails; 2: nothing to check, or the input is wrong.

    [bold]semdiag check --rule "dispersion.p95 < 10 attention=topk"[/]
    """
    from semdiag.commands.printing.check import conclusion, print_check
    from semdiag.findings.gate.drift import read_baseline
    from semdiag.findings.gate.junit import junit_xml
    from semdiag.findings.gate.rules import parse_rule
    from semdiag.findings.gate.verification import PROBED, Expectations, verify
    from semdiag.measurement.probes.noise.masks import NoisePlan
    from semdiag_models import InputError
    from semdiag_models.writing import write_text

    if junit is not None and junit.is_dir():
        raise InputError(f"{junit} is a folder. Name a file with --junit FILE.")
    if junit is not None and not junit.parent.is_dir():
        raise InputError(f"{junit} cannot be written: there is no folder {junit.parent}.")
    if not 0 <= tolerance < float("inf"):
        raise InputError(f"--tolerance is a share like 0.05, not negative. Got {tolerance}.")
    if baseline is None and "tolerance" in shared.typed:
        raise InputError("--tolerance is about numbers of a baseline: add --baseline FILE.")
    known = None if baseline is None else read_baseline(baseline)
    expected = Expectations([parse_rule(text) for text in rule or ()], known, tolerance, every_layer)
    paired = not expected.rules and known is None  # which is asked of encoders alone
    conditions = shared.conditions(plans=(NoisePlan(draws=1),), probe_samples=PROBED, encoders_only=paired)
    result = verify(shared.measured(models, conditions), expected)
    if junit is not None:
        write_text(junit, junit_xml(result))
    if not shared.values["quiet"]:
        print_check(result)
    if shared.values["as_json"]:
        typer.echo(json.dumps(result.summary(), allow_nan=False))
    for words in result.failures:
        tell(f"semdiag: {words}.")
    if not shared.values["quiet"]:
        tell(conclusion(result))
    if result.failures and not exit_zero:
        raise typer.Exit(1)
