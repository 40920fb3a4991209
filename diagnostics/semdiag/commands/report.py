"""``semdiag report``."""

import json
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from semdiag.presenting import options
from semdiag.presenting.terminal.terminal import tell
from semdiag.commands.shared import Shared, with_options

_REDRAWING = {"redraw", "keep_queries", "show", "out", "as_json", "figures", "quiet"}  # what goes with --from
_DRAWS, _PROBE_SAMPLES = 3, 100  # of the sections with a command of their own: enough for a first look
_UNFITTING = ArithmeticError, AttributeError, LookupError, TypeError, ValueError  # of damaged measurements


@with_options(sampling=True)
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
            rich_help_panel="What is measured",
        ),
    ] = False,
    show: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser.", rich_help_panel="Output")
    ] = False,
    *,
    shared: Shared,
) -> None:
    """Measure everything and write one report: a page with the verdict, figures, tables and caveats.

    The page opens from disk in any browser. Without a MODEL, [bold]semdiag report[/] reports on every run in
    ./checkpoints.
    """
    from semdiag.commands import measuring
    from semdiag.commands.output_folder import output_folder
    from semdiag.presenting.terminal.progress import Stages
    from semdiag.measuring.findings.findings import Findings
    from semdiag.measuring.measurements import Measurements
    from semdiag.questions.bounds.measure.probe import BoundsPlan
    from semdiag.questions.k_sweep.measure.probe import KSweepPlan
    from semdiag.questions.landscape.measure import LandscapePlan
    from semdiag.questions.lipschitz.measure.probe import LipschitzPlan
    from semdiag.questions.mask_stability.measure.probe import SUPPOSED_K, NoisePlan
    from semdiag.questions.stability.measure.probe import SecantsPlan
    from semdiag.reporting.report import write_report
    from semdiag_models import InputError
    from semdiag_models.reading import read_json

    formats = measuring.figure_formats(shared.values["figures"])
    if redraw is not None:
        if models:
            raise InputError("--from draws saved measurements: do not name models with it.")
        if vain := shared.typed - _REDRAWING:
            said = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in vain))
            raise InputError(f"--from draws saved measurements as they are: leave out {said}.")
        whole = (redraw / "data" / "models.parquet").exists()  # a report's folder, not that of its data alone
        findings = Findings(Measurements.load(redraw / "data" if whole else redraw))
    else:
        levels, ks = measuring.positive_numbers(noise, "--noise"), measuring.whole_numbers(k, "--k")
        supposed = min((each for each in ks if each > 0), default=SUPPOSED_K)  # others are refused with the inputs
        plans: tuple[Any, ...] = (
            SecantsPlan(levels),
            BoundsPlan(),
            NoisePlan(levels, draws=_DRAWS, k=supposed, seed=shared.values["seed"]),
            KSweepPlan(),
        )
        plans += (LandscapePlan(metrics=("loss", "dispersion")), LipschitzPlan()) if thorough else ()
        conditions = shared.conditions(
            keep_queries,
            k=ks,
            k_lowers="k" not in shared.typed,
            plans=plans,
            probe_samples=_PROBE_SAMPLES,
        )
        findings = shared.measured(models, conditions)
    folder = output_folder("report", findings.measurements, shared.values["out"])
    try:
        with Stages("drawing", 1, shared.values["quiet"]) as bar:
            page = write_report(findings, folder, measuring.command_line(), formats, keep_queries, progress=bar)
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
    if shared.values["as_json"]:
        typer.echo(json.dumps(read_json(folder / "summary.json")))
    if not shared.values["quiet"]:
        tell(f"Report: {page}")
    if show:
        webbrowser.open(page.resolve().as_uri())
