"""``semdiag report``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from semdiag.commands import options

_DRAWS, _PROBE_SAMPLES = 3, 100  # of the sections with a command of their own: enough for a first look


def report(
    models: options.Models = None,
    k: options.Counterfactual = "5",
    inputs: options.Inputs = None,
    samples: options.Samples = 500,
    batch_size: options.BatchSize = 100,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    seed: options.Seed = 0,
    min_keys: options.MinKeys = 1,
    noise: options.Noise = "0.01",
    config: options.Config = None,
    redraw: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Draw the report from measurements saved by --keep-queries; no model is needed."
        ),
    ] = None,
    out: options.Out = None,
    keep_queries: Annotated[
        bool, typer.Option("--keep-queries", help="Keep every query in data/, to redraw the report from.")
    ] = False,
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough",
            help="Also the loss surface and the empirical Lipschitz estimates; minutes per model.",
            rich_help_panel="What is measured",
        ),
    ] = False,
    as_json: options.Json = False,
    figures: options.Figures = "png,svg",
    quiet: options.Quiet = False,
) -> None:
    """Measure everything and write one report: a page with the verdict, figures, tables and caveats.

    Opens from disk in any browser. [bold]semdiag report[/] alone reports on every run in ./checkpoints.
    """
    from semdiag.commands import measuring
    from semdiag.measurement.k_sweep import SweepPlan
    from semdiag.measurement.landscape import LandscapePlan
    from semdiag.measurement.lipschitz import LipschitzPlan
    from semdiag.measurement.mask_stability import NoisePlan
    from semdiag.measurement.measurements import Measurements
    from semdiag.measurement.survey import Conditions
    from semdiag.presentation.report import write_report
    from semdiag_models import InputError

    formats = measuring.figure_formats(figures)
    if redraw is not None:
        if models:
            raise InputError("--from draws saved measurements: name no models with it.")
        if thorough:
            raise InputError("--from draws saved measurements as they are: leave --thorough away.")
        found = Measurements.load(redraw)
    else:
        conditions = Conditions(
            inputs=inputs,
            samples=samples,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            seed=seed,
            min_keys=min_keys,
            k=measuring.whole_numbers(k, "--k"),
            config=measuring.read_config(config),
            noise=measuring.positive_numbers(noise, "--noise"),
            bounds=True,
            masks=NoisePlan(measuring.positive_numbers(noise, "--noise"), draws=_DRAWS, seed=seed),
            sweep=SweepPlan(),
            probe_samples=_PROBE_SAMPLES,
            landscape=LandscapePlan(metrics=("loss", "dispersion")) if thorough else None,
            lipschitz=LipschitzPlan() if thorough else None,
        )
        found = measuring.measured(models, conditions, quiet)
    folder = out if out is not None else measuring.report_name("report", found)
    page = write_report(found, folder, measuring.command_line(), formats, keep_queries)
    if as_json:
        typer.echo(json.dumps(json.loads((folder / "summary.json").read_text(encoding="utf-8"))))
    if not quiet:
        typer.echo(f"Report: {page}", err=True)
