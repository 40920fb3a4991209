"""``semdiag report``."""

import json
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.question import ANSWERS, Shared, command
from semdiag.presenting.terminal.terminal import beside_json, say, tell

_REDRAWING = {"redraw", "keep_queries", "show", "out", "as_json", "figures", "quiet"}  # allowed with --from
_PROBE_SAMPLES = 100  # for questions with a command of their own: enough for a first look
_UNFITTING = ArithmeticError, AttributeError, LookupError, TypeError, ValueError  # raised by damaged measurements


@command(sampling=True)
def report(
    models: options.Models = None,
    k: options.Counterfactual = "5",
    noise: options.Noise = "0.01",
    redraw: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Redraw a report from its folder, if it was made with --keep-queries; no model is needed.",
        ),
    ] = None,
    keep_queries: Annotated[
        bool,
        typer.Option(
            "--keep-queries", help="Keep every query in the report's data/, so that --from can redraw it."
        ),
    ] = False,
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough",
            help="Also measure the loss surface and the empirical Lipschitz estimates. Takes minutes per model.",
            rich_help_panel=options.MEASURE,
        ),
    ] = False,
    minutes: Annotated[
        float,
        typer.Option(
            "--rerun-minutes",
            min=0,
            help="Also run an external model with sparse attention, on as many samples as fit into about "
            "this many minutes. 0: not at all.",
            rich_help_panel=options.MEASURE,
        ),
    ] = 2,
    show: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser.", rich_help_panel=options.OUTPUT)
    ] = False,
    *,
    shared: Shared,
) -> None:
    """Measure everything and write one report: a page with the verdict, figures, tables and caveats.

    The page opens from disk in any browser. Without a MODEL, [bold]semdiag report[/] reports on every run in
    ./checkpoints.
    """
    from semdiag.commands import measuring
    from semdiag.commands.one_text import kept_page, one_text_page
    from semdiag.commands.output_folder import output_folder
    from semdiag.measuring.findings.findings import Findings
    from semdiag.measuring.measurements import Measurements
    from semdiag.measuring.probe import ReportOptions
    from semdiag.measuring.schema import probes
    from semdiag.presenting.option_values import positive_numbers, whole_numbers
    from semdiag.presenting.terminal.console import say_sentences
    from semdiag.presenting.terminal.progress import Stages
    from semdiag.reporting.report import write_report
    from semdiag_models import InputError
    from semdiag_models.reading import read_json

    formats = measuring.figure_formats(shared.values["figures"])
    if redraw is not None:
        _check_redrawing(models, shared.typed)
        whole = (redraw / "data" / "models.parquet").exists()  # a report's folder, not just its data folder
        findings = Findings(Measurements.load(redraw / "data" if whole else redraw))
        look = kept_page(redraw)
    else:
        ks = whole_numbers(k, "--k")
        options = ReportOptions(
            noise=positive_numbers(noise, "--noise"),
            seed=shared.values["seed"],
            k=min((each for each in ks if each > 0), default=None),  # smaller ones are refused with the inputs
            thorough=thorough,
            rerun_seconds=60 * minutes or None,
        )
        plans = (probe.reported(options) for probe in probes().values())
        conditions = shared.conditions(
            keep_queries,
            k=ks,
            k_lowers="k" not in shared.typed,
            plans=tuple(plan for plan in plans if plan is not None),
            probe_samples=_PROBE_SAMPLES,
        )
        pages: list[str | None] = []
        findings = shared.measured(
            models, conditions, then=lambda loaded: pages.append(one_text_page(loaded, conditions))
        )
        (look,) = pages
    folder = output_folder("report", findings.measurements, shared.values["out"])
    try:
        with Stages("drawing", 1, shared.values["quiet"]) as bar:
            command_line = measuring.command_line()
            page = write_report(findings, folder, command_line, formats, keep_queries, progress=bar, look=look)
    except Exception as error:
        if redraw is None and keep_queries and not isinstance(error, InputError):
            saved = Path(tempfile.mkdtemp(prefix=f"{folder.name}-measurements-", dir=folder.parent))
            findings.measurements.save(saved)
            tell(f"semdiag: the report was not drawn. Its measurements are kept: semdiag report --from {saved}")
        if redraw is None or isinstance(error, InputError) or not isinstance(error, _UNFITTING):
            raise
        said = " ".join(str(error).split())[:120]
        raise InputError(
            f"{redraw} cannot be drawn: its files do not fit together ({type(error).__name__}: {said})."
        ) from error
    whole = read_json(folder / "summary.json")
    if shared.values["as_json"]:
        typer.echo(json.dumps(whole))
    if not shared.values["quiet"]:
        with beside_json(shared.values["as_json"]):
            say_sentences(whole["verdict"][:ANSWERS])
            say(f"Report: {page}")
    if show:
        webbrowser.open(page.resolve().as_uri())


def _check_redrawing(models: object, typed: frozenset[str]) -> None:
    """Refuse arguments that cannot be combined with ``--from``."""
    from semdiag_models import InputError

    if models:
        raise InputError("--from draws saved measurements: do not name models with it.")
    if unused := typed - _REDRAWING:
        options = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in unused))
        raise InputError(f"--from draws saved measurements as they are: leave out {options}.")
