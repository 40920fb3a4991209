"""Write a report from findings: a folder with a page, figures, percentile tables and a summary."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
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
from semdiag.measuring.findings.findings import Findings, json_ready, schema, seed_sentence
from semdiag.measuring.measure import Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.table import csv_text
from semdiag.measuring.training_runs import epochs_to
from semdiag.presenting.answer import (
    Answer,
    Claim,
    Glance,
    Heading,
    numbered_claims,
    percentile_csv,
    sentences_of,
    verdict_table,
)
from semdiag.presenting.drawing.panels import NothingToDrawError, attention_label
from semdiag.presenting.drawing.style import Drawing, save_figure, stacked
from semdiag.presenting.progress import Stages
from semdiag.questions.dispersion.answer import dispersion_results, pair_comparisons
from semdiag.questions.k_sweep.changes import failure_claims
from semdiag.questions.k_sweep.measure import SWEEP_ESTIMATES
from semdiag.questions.k_sweep.rerun import RERUN_FAILED, RERUN_TABLE
from semdiag.questions.look.measure import fitting_k, see_loaded
from semdiag.questions.look.page import is_page_of, render_look
from semdiag.questions.registry import figures, reported
from semdiag.questions.separation.answer import separation_results
from semdiag.reporting.folder import ReportFolder, reserved
from semdiag.reporting.page import (
    BEFORE_ALL,
    Overview,
    Picture,
    captured_sentence,
    caution_claims,
    inline_picture,
    render_page,
)
from semdiag_files import InputError, open_file, unknown_name, visible_json


def model_rows(findings: Findings, sections: Sequence[str]) -> Any:
    """Return one row per model: its facts and what was measured."""
    measurements = findings.measurements
    answers = {pair.gate.pair.counterpart: pair.answer for pair in findings(pair_comparisons)}
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
        "glances": {name: _tile(answer.glance) for name, answer in answers.items() if answer.glance},
        "pairs": json_ready([comparison.to_dict() for comparison in findings(pair_comparisons)]),
        "results": model_rows(findings, [*answers]), "figures": figures,
    }  # fmt: skip
    judged = {
        name: verdict_table(answer.findings) for name, answer in answers.items() if answer.findings is not None
    }
    if judged:
        content["findings"] = json_ready({name: table.to_dict("records") for name, table in judged.items()})
    details = {name: answer.details for name, answer in answers.items() if answer.details is not None}
    content["details"] = {name: sentences_of(claims) for name, claims in details.items()}
    content["claims"] = {
        name: [json_ready(vars(claim)) for claim in _claims(answer)] for name, answer in answers.items()
    }
    return content


def _tile(glance: Glance) -> dict[str, Any]:
    return {
        "answer": glance.answer.value,
        "number": glance.number,
        "words": glance.words,
        "claim": glance.of_paper,
        "claim_id": glance.claim_id,
    }


def _claims(answer: Answer) -> list[Claim]:
    return [claim for claim in (*answer.headline, *(answer.details or ())) if isinstance(claim, Claim)]


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
    if external(findings.measurements.models).all() or len(findings.measurements[RERUN_TABLE]):
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
    tables = _tables(findings, answers)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        (folder / "data" / f"{name}.csv").write_bytes(csv_text(table).encode("utf-8", errors="backslashreplace"))
    if keep_queries:
        findings.measurements.save(folder / "data")
    parts = _parts(findings, [*answers])
    figures = [figure for _, headings in parts for heading in headings for figure in heading.figures]
    pictures = _pictures(figures, findings, folder, formats, progress)
    overview = _overview(findings, answers)
    paths = {name: list(picture.files.values()) for name, picture in pictures.items()}
    content = report_content(findings, command, summary_sentences(findings, answers), answers, paths)
    content["cautions"] = sentences_of(overview.cautions)
    texts = {"summary.json": visible_json(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))}
    if look is not None:
        texts[LOOK] = look
    texts["index.html"] = render_page(
        findings,
        content,
        answers,
        overview,
        parts,
        pictures,
        keep_queries,
        theory=sorted(name for name in tables if name not in _NAMED_IN_THE_PAGE),
        look=LOOK if look else None,
    )
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    return content


def _parts(findings: Findings, names: Sequence[str]) -> list[tuple[str, list[Heading]]]:
    """Return the headings of questions, each figure where it stands first."""
    all_external = bool(external(findings.measurements.models).all())
    placed: set[str] = set()
    parts = []
    for name in names:
        headings = []
        for heading in reported()[name].headings_for(all_external):
            figures = {figure.name: figure for figure in heading.figures if figure.name not in placed}
            headings.append(replace(heading, figures=tuple(figures.values())))
            placed |= figures.keys()
        parts.append((name, headings))
    return parts


def _pictures(
    figures: Sequence[Drawing],
    findings: Findings,
    folder: Path,
    formats: Sequence[str],
    progress: Stages | None,
) -> dict[str, Picture]:
    if progress is not None:
        progress.announce("figures", len(figures))
    pictures = {}
    for figure in figures:
        pictures[figure.name] = _picture(figure, findings, folder, formats)
        if progress is not None:
            progress.advance(1)
    return pictures


def _overview(findings: Findings, answers: Mapping[str, Answer]) -> Overview:
    """Return the claims that belong to no section, and the one that leads the page."""
    question, lead = next(_summary_claims(findings, answers))
    failures = [] if "k-sweep" in answers else failure_claims(findings)
    return Overview(lead, question, caution_claims(findings), [*failures, *_remark_claims(findings, answers)])


def _summary_claims(findings: Findings, answers: Mapping[str, Answer]) -> Iterator[tuple[str, Claim]]:
    """Yield the claims of the first screen, each with its question, which is empty for those on the report."""
    failures = "k-sweep" if "k-sweep" in answers else ""
    yield from ((failures, claim) for claim in failure_claims(findings))
    cautions = caution_claims(findings)
    yield from (("", claim) for claim in cautions if claim.id.startswith(BEFORE_ALL))
    yield from _answer_claims(answers)
    yield from (("", claim) for claim in _remark_claims(findings, answers))
    yield from (("", claim) for claim in cautions if not claim.id.startswith((*BEFORE_ALL, "short-texts")))


def _answer_claims(answers: Mapping[str, Answer]) -> Iterator[tuple[str, Claim]]:
    """Yield the headlines of all questions; without any, the first of their details."""
    headlines = [(name, claim) for name, answer in answers.items() for claim in answer.headline]
    details = [(name, claim) for name, answer in answers.items() for claim in _claims(answer)]
    for name, claim in headlines or details[:1]:
        if claim.id != RERUN_FAILED:
            yield name, claim


def _remark_claims(findings: Findings, answers: Mapping[str, Answer]) -> list[Claim]:
    """Return what was drawn and captured."""
    metrics = [name for name in answers if name in ("dispersion", "separation")]
    sampling = sampling_sentences(findings, metrics or ("dispersion",))
    captured = Claim("captured", captured_sentence(findings))
    seeds = [seed_sentence(findings.measurements.models)]
    return [*numbered_claims("sampling", sampling), captured, *numbered_claims("seeds", filter(None, seeds))]


def summary_sentences(findings: Findings, answers: Mapping[str, Answer]) -> list[str]:
    """Return the sentences of the first screen: from every question, on the capture, and warnings."""
    return [claim.sentence for _, claim in _summary_claims(findings, answers)]


def _tables(findings: Findings, answers: Mapping[str, Answer]) -> dict[str, pd.DataFrame]:
    """Return the tables to write as CSV; percentiles of δ are in every report."""
    tables = {"dispersion": percentile_csv(findings, "dispersion")}
    if answers.keys() & {"dispersion", "separation"} and len(within := findings(within_table)):
        tables["within"] = all_by_name(within)
    for answer in answers.values():
        tables |= {**answer.tables, **(answer.tables_alone if len(answers) == 1 else {})}
    estimates = {
        "estimates": findings(estimate_table),
        "sweep_estimates": findings.measurements[SWEEP_ESTIMATES],
        "sketches": findings.measurements.sketches,
    }
    return tables | {name: table for name, table in estimates.items() if len(table)}


def _picture(drawing: Drawing, findings: Findings, folder: Path, formats: Sequence[str]) -> Picture:
    if not formats:
        return Picture(missing="no figure format was chosen.")
    try:
        figure = drawing(findings)
        with stacked():
            narrow = drawing(findings) if set(formats) & set(_ON_SCREEN) else None
    except NothingToDrawError as reason:
        return Picture(missing=str(reason))
    note = " ".join(figure.get_supxlabel().split()).rstrip(".")  # it stands in the caption
    if note:
        note = f"{note[0].upper()}{note[1:]}."
    paths = _saved(figure, drawing.name, folder, formats)
    narrow_path = None
    if narrow is not None:
        narrow_format = "svg" if "svg" in formats else "png"
        narrow_path = _saved(narrow, f"{drawing.name}-narrow", folder, [narrow_format])[narrow_format]
    tooltips = getattr(figure, "tooltips", {})
    vectors = [path for path in (paths.get("svg"), narrow_path) if path and path.endswith(".svg")]
    width, height = (round(inches * _PIXELS_PER_INCH) for inches in figure.get_size_inches())
    return Picture(
        paths,
        width,
        height,
        narrow=narrow_path,
        shows=_legend_and_titles(figure),
        note=note,
        finding=getattr(figure, "finding", ""),
        inline=[
            inline_picture((folder / path).read_text(encoding="utf-8"), tooltips) for path in vectors if tooltips
        ],
    )


def _saved(figure: Figure, name: str, folder: Path, formats: Sequence[str]) -> dict[str, str]:
    """Save a figure without its note, and return its paths in the folder by format."""
    figure.supxlabel("")
    saved = save_figure(figure, folder / "figures" / name, formats)
    return {path.suffix[1:]: path.relative_to(folder).as_posix() for path in saved}


def _legend_and_titles(figure: Figure) -> str:
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
    return Summary(report_content(findings, "", summary_sentences(findings, answers), answers, {}))


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
        one_text = see_loaded(loaded[0], one)
    except InputError:  # it can be measured, but does not fit a page
        return None
    return render_look(
        one_text,
        fitting_k(one_text, None),
        f"semdiag look {loaded[0].path} --inputs {inputs} --max-length {longest}",
    )


def kept_page(report: Path) -> str | None:
    """Return the one-text page beside a report that is drawn again; None if there is none."""
    page = report / LOOK
    if not page.is_file() or page.stat().st_size > _LARGEST_LOOK:
        return None
    with open_file(page) as file:
        text = file.read(_LARGEST_LOOK).decode("utf-8", "replace")
    return text if is_page_of(None, text[:4096]) else None
