"""Write a report from findings: a folder with a page, figures, percentile tables and a summary."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from semdiag.capturing.attention_call import external
from semdiag.capturing.inputs import SUFFIXES
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.findings.estimates import all_by_name, estimate_table, sampling_sentences, within_table
from semdiag.measuring.findings.findings import Findings, json_ready, schema, unlearned_sentences
from semdiag.measuring.measure import Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.table import csv_text
from semdiag.measuring.training_runs import epochs_to
from semdiag.presenting.answer import Answer, Heading, first_sentences, percentile_csv, verdict_table
from semdiag.presenting.drawing.panels import NothingToDrawError, attention_label
from semdiag.presenting.drawing.style import Drawing, save_figure, stacked
from semdiag.presenting.progress import Stages
from semdiag.questions.dispersion.answer import dispersion_results, pair_comparisons
from semdiag.questions.k_sweep.changes import failure_sentences
from semdiag.questions.k_sweep.measure import SWEEP_ESTIMATES
from semdiag.questions.look.measure import fitting_k, see_loaded
from semdiag.questions.look.page import is_page_of, render_look
from semdiag.questions.registry import figures, reported
from semdiag.questions.separation.answer import separation_results
from semdiag.reporting.folder import ReportFolder, reserved
from semdiag.reporting.page import (
    Picture,
    capture_sentences,
    diverged_sentences,
    inline_picture,
    render_page,
    short_text_sentences,
    weights_sentences,
)
from semdiag_files import InputError, open_file, unknown_name, visible_json


def model_rows(findings: Findings, sections: Sequence[str]) -> Any:
    """Return one row per model: its facts and what was measured."""
    measurements = findings.measurements
    answers = {pair.gate.pair.other: pair.answer for pair in findings(pair_comparisons)}
    parts = {"dispersion": findings(dispersion_results)}
    if "separation" in sections:
        parts["separation"] = findings(separation_results)
    rows = []
    for model in measurements.models.to_dict("records"):
        history = measurements.history[measurements.history["model"] == model["model"]]
        k = None if pd.isna(model["k"]) else int(model["k"])
        row = {
            **model,
            "attention_label": attention_label(model["attention"], k, model["global_tokens"]),
            "epochs_to_95": epochs_to(history.sort_values("epoch")),
            "smaller": answers.get(model["model"]),
        }
        layers = measurements.calls[measurements.calls["model"] == model["model"]].drop(columns="model")
        row["capture"] = {**parts["dispersion"][model["model"]]["capture"], "layers": layers.to_dict("records")}
        for name, results in parts.items():
            row[name] = {key: value for key, value in results[model["model"]].items() if key != "capture"}
        rows.append(row)
    return json_ready(rows)


def report_content(
    findings: Findings,
    command: str,
    verdict: list[str],
    answers: Mapping[str, Answer],
    figures: dict[str, list[str]],
) -> dict[str, Any]:
    """Return a report as plain values, from the answers to its questions."""
    content: dict[str, Any] = {
        "schema": schema("report"), "command": command,
        "provenance": json_ready(findings.measurements.provenance), "verdict": verdict,
        "glances": {
            name: {**vars(answer.glance), "answer": answer.glance.answer.value}
            for name, answer in answers.items() if answer.glance
        },
        "pairs": json_ready([comparison.to_dict() for comparison in findings(pair_comparisons)]),
        "results": model_rows(findings, [*answers]), "figures": figures,
    }  # fmt: skip
    judged = {name: verdict_table(answer.claims) for name, answer in answers.items() if answer.claims is not None}
    if judged:
        content["findings"] = json_ready({name: table.to_dict("records") for name, table in judged.items()})
    details = {name: answer.details for name, answer in answers.items() if answer.details is not None}
    content["details"] = {name: [each for each in of if isinstance(each, str)] for name, of in details.items()}
    return content


_PIXELS_PER_INCH = 96  # in CSS
_ON_SCREEN = ("png", "svg")
LOOK = "look.html"  # the page of one text, beside the report
_NAMED_IN_THE_PAGE = ("dispersion", "separation", "load")


def write_report(
    findings: Findings,
    folder: Path | ReportFolder,
    command: str,
    formats: Sequence[str] = ("png", "svg"),
    keep_queries: bool = False,
    sections: Sequence[str] | None = None,
    progress: Stages | None = None,
    look: str | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Write the report into a folder, reserved or not, and return its page and its content as plain values."""
    if findings.measurements.models.empty:
        raise InputError("There is nothing to report: no model was measured.")
    names = measured_questions(findings) if sections is None else sections
    unknown = [name for name in names if name not in reported()]
    if unknown:
        raise ValueError(f"Sections of a report are {', '.join(reported())}. Got {unknown[0]!r}.")
    with ExitStack() as stack:
        report = (
            folder if isinstance(folder, ReportFolder) else stack.enter_context(reserved(folder, keep_queries))
        )
        answers = {name: reported()[name].answered(findings) for name in names}
        building = stack.enter_context(report.replacing())
        content = _write(findings, building, command, formats, keep_queries, answers, progress, look)
    return report.path / "index.html", content


def measured_questions(findings: Findings) -> list[str]:
    """Return the questions to which the measurements give an answer, as a report has them."""
    applying = {name: question for name, question in reported().items() if question.applies(findings)}
    if external(findings.measurements.models).all():
        return sorted(applying, key=lambda name: applying[name].leads or math.inf)
    return list(applying)


def _write(
    findings: Findings,
    folder: Path,
    command: str,
    formats: Sequence[str],
    keep_queries: bool,
    answers: Mapping[str, Answer],
    progress: Stages | None,
    look: str | None,
) -> dict[str, Any]:
    measurements = findings.measurements
    tables = _tables(findings, answers)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        (folder / "data" / f"{name}.csv").write_bytes(csv_text(table).encode("utf-8", errors="backslashreplace"))
    if keep_queries:
        measurements.save(folder / "data")
    elsewhere = bool(external(measurements.models).all())
    figures: dict[str, Drawing] = {}  # each where it stands first
    parts: list[tuple[str, list[Heading]]] = []
    for name in answers:
        parts.append((name, []))
        for heading in reported()[name].headings_for(elsewhere):
            new = {figure.name: figure for figure in heading.figures if figure.name not in figures}
            parts[-1][1].append(replace(heading, figures=tuple(new.values())))
            figures |= new
    if progress is not None:
        progress.announce("figures", len(figures))
    pictures = {}
    for figure in figures.values():
        pictures[figure.name] = _picture(figure, findings, folder, formats)
        if progress is not None:
            progress.advance(1)
    paths = {name: list(picture.files.values()) for name, picture in pictures.items()}
    content = report_content(findings, command, in_short(findings, answers), answers, paths)
    content["cautions"] = [
        *weights_sentences(findings), *unlearned_sentences(findings), *capture_sentences(findings)[1:],
        *diverged_sentences(findings), *short_text_sentences(findings),
    ]  # fmt: skip
    written = {"summary.json": visible_json(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))}
    written |= {LOOK: look} if look is not None else {}
    others = sorted(name for name in tables if name not in _NAMED_IN_THE_PAGE)
    page = LOOK if look else None
    written["index.html"] = render_page(findings, content, answers, parts, pictures, keep_queries, others, page)
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    return content


def in_short(findings: Findings, answers: Mapping[str, Answer]) -> list[str]:
    """Return the sentences of the first screen: from every question, on the capture, and warnings."""
    metrics = [name for name in answers if name in ("dispersion", "separation")]
    failures = failure_sentences(findings)
    return [
        *failures,
        *weights_sentences(findings),
        *unlearned_sentences(findings),
        *(each for each in first_sentences([*answers.values()], otherwise=1) if each not in failures),
        *sampling_sentences(findings, metrics or ("dispersion",)),
        *capture_sentences(findings),
        *diverged_sentences(findings),
    ]


def _tables(findings: Findings, answers: Mapping[str, Answer]) -> dict[str, pd.DataFrame]:
    """Return the tables to write as CSV; percentiles of δ are in every report."""
    tables = {"dispersion": percentile_csv(findings, "dispersion")}
    if answers.keys() & {"dispersion", "separation"} and len(within := findings(within_table)):
        tables["within"] = all_by_name(within)
    for answer in answers.values():
        tables |= {**answer.tables, **(answer.tables_alone if len(answers) == 1 else {})}
    estimates = findings(estimate_table), findings.measurements[SWEEP_ESTIMATES], findings.measurements.sketches
    named = zip(("estimates", "sweep_estimates", "sketches"), estimates, strict=True)
    return tables | {name: table for name, table in named if len(table)}


def _picture(drawing: Drawing, findings: Findings, folder: Path, formats: Sequence[str]) -> Picture:
    if not formats:
        return Picture(missing="no figure format was chosen.")
    try:
        figure = drawing(findings)
        with stacked():
            narrow = drawing(findings) if set(formats) & set(_ON_SCREEN) else None
    except NothingToDrawError as reason:
        return Picture(missing=str(reason))
    files = folder / "figures"
    note = " ".join(figure.get_supxlabel().split()).rstrip(".")  # it stands in the caption
    note = note and f"{note[0].upper()}{note[1:]}."
    for drawn in (figure, narrow):
        if drawn is not None:
            drawn.supxlabel("")
    saved = save_figure(figure, files / drawing.name, formats)
    paths = {path.suffix[1:]: path.relative_to(folder).as_posix() for path in saved}
    telephone = None
    if narrow is not None:
        kind = "svg" if "svg" in formats else "png"
        (file,) = save_figure(narrow, files / f"{drawing.name}-narrow", [kind])
        telephone = file.relative_to(folder).as_posix()
    said = getattr(figure, "said", {})
    living = [
        inline_picture((folder / name).read_text(encoding="utf-8"), said)
        for name in (paths.get("svg"), telephone) if said and name and name.endswith(".svg")
    ]  # fmt: skip
    width, height = (round(inches * _PIXELS_PER_INCH) for inches in figure.get_size_inches())
    finding = getattr(figure, "finding", "")
    return Picture(paths, width, height, None, telephone, _shows(figure), note, finding, living)


def _shows(figure: Figure) -> str:
    """Return the texts of legend and panel titles, each once."""
    legends = [*figure.legends, *(legend for ax in figure.axes if (legend := ax.get_legend()))]
    entries = [text.get_text() for legend in legends for text in legend.get_texts()]
    titles = [" ".join(ax.get_title(loc="left").split()) for ax in figure.axes]
    parts = [", ".join(dict.fromkeys(filter(None, words))) for words in (entries, titles)]
    return "; ".join(filter(None, [parts[0], parts[1] and f"panels: {parts[1]}"]))


class Summary(dict[str, Any]):
    """The summary of a report as plain values, displayed as its verdict in sentences."""

    def __repr__(self) -> str:
        return "\n".join(self["verdict"])


def summary(found: Measurements | Findings) -> Summary:
    """Return the results: the verdict in words, a row per model, the verdicts on claims.

    Args:
        found: Measurements from :func:`semdiag.measure` or a probe.

    Returns:
        A dictionary as in a report's ``summary.json``, ready for JSON: ``verdict``, ``glances``, ``results``, ….

    Example:
        >>> import torch
        >>> from semdiag import measure
        >>> from semdiag_models import Encoder, ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
        >>> summary(measure(encoder, torch.tensor([[0, 1, 1, 0]])))["glances"]["dispersion"]["answer"]
        'inconclusive'
    """
    findings = _findings(found)
    answers = {name: reported()[name].answered(findings) for name in measured_questions(findings)}
    return Summary(report_content(findings, "", in_short(findings, answers), answers, {}))


def report(found: Measurements | Findings, folder: Path | str, keep_queries: bool = False) -> Path:
    """Write the report: a page with the verdict, figures, tables and caveats.

    Args:
        found: Measurements from :func:`semdiag.measure` or a probe.
        folder: created if missing; an older report there is replaced.
        keep_queries: whether to keep every query in ``data/``, to redraw the report from.

    Returns:
        The page ``folder/index.html``.

    Raises:
        InputError: if the folder contains anything but a report, or cannot be written.
    """
    command = f"semdiag.report(found, {str(folder)!r})"
    page, _ = write_report(_findings(found), Path(folder), command, keep_queries=keep_queries)
    return page


def plot(found: Measurements | Findings, figure: str) -> Figure:
    """Draw one figure of a report.

    Args:
        found: Measurements from :func:`semdiag.measure` or a probe.
        figure: its name, like ``dispersion_by_layer``, which its file in a report also has.

    Returns:
        The figure; a notebook shows it, ``.savefig`` writes it.

    Raises:
        InputError: if no figure has this name; the message lists all.
        NothingToDrawError: if what it shows was not measured; the message says what is missing.
    """
    if figure not in figures():
        raise unknown_name("figure", figure, figures())
    return figures()[figure](_findings(found))


def _findings(measured: Measurements | Findings) -> Findings:
    return measured if isinstance(measured, Findings) else Findings(measured)


_LOOK_TOKENS = 48  # shown at most: about 2 MB for 270 heads
_LARGEST_LOOK = 2**25  # bytes of a page that is copied to the new report


def one_text_page(loaded: Sequence[LoadedModel], conditions: Conditions) -> str | None:
    """Run a language model on the first of its texts, and return the page that shows every head on it."""
    inputs = conditions.inputs
    if [model.source for model in loaded] != ["hugging face"] or inputs is None or inputs.suffix not in SUFFIXES:
        return None
    longest = min(conditions.texts.max_length or _LOOK_TOKENS, _LOOK_TOKENS)
    one = replace(
        conditions, samples=1, first=1, batch_size=1, k=(), plans=(),
        texts=replace(conditions.texts, max_length=longest),
    )  # fmt: skip
    try:
        seen = see_loaded(loaded[0], one)
    except InputError:  # it can be measured, but does not fit a page
        return None
    return render_look(
        seen, fitting_k(seen, None), f"semdiag look {loaded[0].path} --inputs {inputs} --max-length {longest}"
    )


def kept_page(report: Path) -> str | None:
    """Return the one-text page beside a report that is drawn again; None if there is none."""
    page = report / LOOK
    if not page.is_file() or page.stat().st_size > _LARGEST_LOOK:
        return None
    with open_file(page) as file:
        text = file.read(_LARGEST_LOOK).decode("utf-8", "replace")
    return text if is_page_of(None, text[:4096]) else None
