"""The report: a folder with a page, figures, percentile tables and a summary, drawn from measurements alone."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from semdiag.capturing.attention_kinds import external
from semdiag.findings.dispersion import counterfactual_ks
from semdiag.measurement.measurements import Measurements
from semdiag.presentation.drawing.panels import NothingToDrawError
from semdiag.presentation.drawing.save import save_figure
from semdiag.presentation.figures import FIGURES
from semdiag.presentation.report.page import Picture, render_page
from semdiag.presentation.report.questions import QUESTIONS, SECTIONS
from semdiag.presentation.report.tables import SCHEMA, percentile_table, summary, within_table, write_tables
from semdiag.presentation.report.verdict import details, pair_verdicts, sentences
from semdiag.presentation.sections.bounds.tables import theory_findings, theory_tables
from semdiag.presentation.sections.convergence.tables import convergence_tables
from semdiag.presentation.sections.dispersion.dispersion_ratio import dispersion_ratio, layer_ratios
from semdiag.presentation.sections.lipschitz.tables import probe_tables
from semdiag.presentation.sections.mask_stability.tables import mask_tables
from semdiag.presentation.sections.within.questions import EXTERNAL_QUESTIONS
from semdiag_models import InputError

_PIXELS_PER_INCH = 96  # of CSS


def write_report(
    measurements: Measurements,
    folder: Path,
    command: str,
    formats: Sequence[str] = ("png", "svg"),
    keep_queries: bool = False,
    sections: Sequence[str] | None = None,
) -> Path:
    """Write the report into a folder; an older report there is replaced only when the new one is complete.

    Args:
        measurements: of one or several models.
        folder: made if absent.
        command: that was typed, to be shown.
        formats: of the figures: png, svg, pdf; none for a report without figures.
        keep_queries: whether to add the measurements themselves, so that everything can be redrawn.
        sections: which parts, of :data:`~semdiag.presentation.report.questions.SECTIONS`; by default all for which
            something was measured.

    Returns:
        The page ``folder/index.html``.

    Raises:
        ValueError: if a section is unknown.
        InputError: if the folder holds something else than a report, cannot be written, there is no model, or
            a format is unknown.
    """
    if measurements.models.empty:
        raise InputError("There is nothing to report: no model was measured.")
    sections = measured_sections(measurements) if sections is None else sections
    unknown = [name for name in sections if name not in SECTIONS]
    if unknown:
        raise ValueError(f"Sections of a report are {', '.join(SECTIONS)}. Got {unknown[0]!r}.")
    given, folder = folder, Path(os.path.abspath(folder))
    _check_replaceable(folder, keep_queries)
    building = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        try:
            building.mkdir(parents=True)
            _write(measurements, building, command, formats, keep_queries, sections)
            _swap(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise InputError(f"The report cannot be written to {folder}: {error.strerror or error}.") from None
    return given / "index.html"


def measured_sections(measurements: Measurements) -> list[str]:
    """The parts of a report for which something was measured.

    Args:
        measurements: of one or several models.

    Returns:
        All of :data:`~semdiag.presentation.report.questions.SECTIONS` but ``within`` without counterfactual k,
        ``stability`` without secants, ``bounds`` without constants and slopes, ``mask-stability`` without noise,
        ``k-sweep`` without a sweep, ``lipschitz`` without gradients, ``landscape`` without planes,
        ``convergence`` without runs, ``along`` and ``predictors`` without snapshots, and ``lengths`` without other
        lengths; of models of others alone neither ``separation`` nor ``learning``.
    """
    missing = set()
    if not counterfactual_ks(measurements.queries):
        missing.add("within")
    if external(measurements.models).all():
        missing |= {"separation", "learning"}
    if measurements.secants.empty:
        missing.add("stability")
    if measurements.constants.empty and measurements.parameters.empty:
        missing.add("bounds")
    if measurements.noise_effects.empty and measurements.masks.empty:
        missing.add("mask-stability")
    if measurements.sweep.empty:
        missing.add("k-sweep")
    if measurements.loss_gradients.empty:
        missing.add("lipschitz")
    if measurements.landscape.empty:
        missing.add("landscape")
    for section, table in (
        ("convergence", "runs"),
        *((name, name) for name in ("along", "predictors", "lengths")),
    ):
        if getattr(measurements, table).empty:
            missing.add(section)
    return [name for name in SECTIONS if name not in missing]


def _check_replaceable(folder: Path, keep_queries: bool) -> None:
    """Refuse to replace anything but an earlier report, and to lose measurements kept there."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file. Name a folder for the report with --out DIR.")
    try:
        if not any(folder.iterdir()):
            return
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise InputError(f"{folder} is not empty and not a semdiag report. Name another folder with --out DIR.")
    if (folder / "data" / "queries.parquet").exists() and not keep_queries:
        raise InputError(
            f"{folder} holds the queries of an earlier report, which would be lost. "
            "Add --keep-queries, or name another folder with --out DIR."
        )


def _swap(building: Path, folder: Path) -> None:
    """Put the finished folder in the place of an older one; on failure the older one goes back."""
    old = building.with_suffix(".old")
    if folder.exists():
        folder.rename(old)
    try:
        building.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write(
    measurements: Measurements,
    folder: Path,
    command: str,
    formats: Sequence[str],
    keep_queries: bool,
    sections: Sequence[str],
) -> None:
    compared = "dispersion" in sections and not external(measurements.models).all()
    ratios = layer_ratios(measurements) if compared else None
    findings = theory_findings(measurements, sections)
    theory = theory_tables(measurements, findings) | mask_tables(measurements, sections)
    theory |= probe_tables(measurements, sections) | convergence_tables(measurements, sections)
    write_tables(_tables(measurements, sections, ratios) | theory, folder / "data")
    if keep_queries:
        measurements.save(folder / "data")
    verdicts = pair_verdicts(measurements)
    asked = EXTERNAL_QUESTIONS if external(measurements.models).all() else QUESTIONS
    questions = [question for question in asked if question.section in sections]
    drawers: dict[str, Callable[[Measurements], Figure]] = {
        **FIGURES,
        "dispersion_ratio": partial(dispersion_ratio, ratios=ratios),
    }
    pictures = {
        shown.figure: _picture(drawers[shown.figure], measurements, folder, shown.figure, formats)
        for question in questions
        for shown in question.figures
    }
    paths = {name: list(picture["files"].values()) for name, picture in pictures.items()}
    said = sentences(measurements, verdicts, sections, findings)
    whole = summary(measurements, command, said, verdicts, sections, paths, findings)
    whole["details"] = details(measurements, sections, findings)
    text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    page = render_page(whole, questions, pictures, measurements.non_finite, keep_queries, sorted(theory))
    (folder / "index.html").write_text(page, encoding="utf-8")


def _tables(
    measurements: Measurements, sections: Sequence[str], ratios: pd.DataFrame | None
) -> dict[str, pd.DataFrame]:
    tables = {"dispersion": percentile_table(measurements, "dispersion")}
    if ratios is not None:
        tables["dispersion_ratio"] = ratios
    if "separation" in sections:
        tables |= {name: percentile_table(measurements, name) for name in ("separation", "load")}
    if len(measurements.projections):
        tables["projections"] = measurements.projections
    if "within" in sections:
        tables["within"] = within_table(measurements)
    return tables


def _picture(
    draw: Callable[[Measurements], Figure],
    measurements: Measurements,
    folder: Path,
    name: str,
    formats: Sequence[str],
) -> Picture:
    """Draw and save a figure; say what the page needs to know of it, or why there is nothing to show."""
    if not formats:
        return {"files": {}, "width": 0, "height": 0, "missing": "figures were not asked for."}
    try:
        figure = draw(measurements)
    except NothingToDrawError as reason:
        return {"files": {}, "width": 0, "height": 0, "missing": str(reason)}
    saved = save_figure(figure, folder / "figures" / name, formats)
    paths = {path.suffix[1:]: path.relative_to(folder).as_posix() for path in saved}
    width, height = (round(inches * _PIXELS_PER_INCH) for inches in figure.get_size_inches())
    return {"files": paths, "width": width, "height": height, "missing": None}
