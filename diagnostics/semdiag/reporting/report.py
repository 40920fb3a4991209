"""Write a report from findings: a folder with a page, figures, percentile tables and a summary."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pandas as pd
from matplotlib.figure import Figure

from semdiag.capturing.attention_kinds import external
from semdiag.measuring.csv_tables import csv_text
from semdiag.measuring.findings.estimates import estimate_table, sampling_sentences
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import unlearned_sentences
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.save import save_figure
from semdiag.presenting.drawing.style import stacked
from semdiag.presenting.section import Section, Shown
from semdiag.presenting.tables import percentile_csv
from semdiag.questions.heads.answer import outlying_heads
from semdiag.questions.registry import sections as every_section
from semdiag.reporting.capture_words import capture_sentences, diverged_sentences, weights_sentences
from semdiag.reporting.folder import check_folder, replacing
from semdiag.reporting.page import Picture, render_page
from semdiag.reporting.summary import summary
from semdiag_models import InputError
from semdiag_models.plain_text import visible_json

_PIXELS_PER_INCH = 96  # in CSS
_ON_SCREEN = ("png", "svg")
LOOK = "look.html"  # the page of one text, beside the report


class Progress(Protocol):
    """Receives the progress of a report."""

    def announce(self, stage: str, steps: int) -> None:
        """Start a stage with a number of steps."""

    def advance(self, steps: int) -> None:
        """Count finished steps."""


_NAMED_IN_THE_PAGE = ("dispersion", "dispersion_ratio", "separation", "load", "within", "projections")


def write_report(
    findings: Findings,
    folder: Path,
    command: str,
    formats: Sequence[str] = ("png", "svg"),
    keep_queries: bool = False,
    sections: Sequence[str] | None = None,
    progress: Progress | None = None,
    look: str | None = None,
) -> Path:
    """Write the report into a folder; an older report there is replaced only when the new one is complete."""
    if findings.measurements.models.empty:
        raise InputError("There is nothing to report: no model was measured.")
    sections = measured_sections(findings) if sections is None else sections
    unknown = [name for name in sections if name not in every_section()]
    if unknown:
        raise ValueError(f"Sections of a report are {', '.join(every_section())}. Got {unknown[0]!r}.")
    check_folder(folder, keep_queries)
    with replacing(folder) as building:
        _write(findings, building, command, formats, keep_queries, sections, progress, look)
    return folder / "index.html"


def measured_sections(findings: Findings) -> list[str]:
    """Return the sections for which something was measured."""
    names = [name for name, section in every_section().items() if section.applies(findings)]
    first = (
        "k-sweep" if external(findings.measurements.models).all() else None
    )  # the main question about a user's own model
    return sorted(names, key=lambda name: name != first)


def _write(
    findings: Findings,
    folder: Path,
    command: str,
    formats: Sequence[str],
    keep_queries: bool,
    names: Sequence[str],
    progress: Progress | None,
    look: str | None,
) -> None:
    sections = [every_section()[name] for name in names]
    tables = _tables(findings, sections)
    _write_tables(tables, folder / "data")
    if keep_queries:
        findings.measurements.save(folder / "data")
    parts = [(section.name, section.applicable_headings(findings)) for section in sections]
    figures = [shown for _, headings in parts for heading in headings for shown in heading.figures]
    if progress is not None:
        progress.announce("figures", len(figures))
    pictures = {}
    for shown in figures:
        pictures[shown.figure] = _picture(shown, findings, folder, formats)
        if progress is not None:
            progress.advance(1)
    paths = {name: list(picture["files"].values()) for name, picture in pictures.items()}
    content = summary(findings, command, in_short(findings, sections), sections, paths)
    content["cautions"] = [
        *weights_sentences(findings), *unlearned_sentences(findings), *capture_sentences(findings)[1:],
        *diverged_sentences(findings),
    ]  # fmt: skip
    text = visible_json(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    others = sorted(name for name in tables if name not in _NAMED_IN_THE_PAGE)
    non_finite = findings.measurements.non_finite
    if look is not None:
        (folder / LOOK).write_text(look, encoding="utf-8", errors="backslashreplace")
    heads = [
        (f"head {head} of layer {layer}", f"{LOOK}#{layer}.{head}" if look else None, words)
        for layer, head, words in findings(outlying_heads)
    ]
    page = render_page(content, parts, pictures, non_finite, keep_queries, others, heads)
    (folder / "index.html").write_text(page, encoding="utf-8", errors="backslashreplace")


def in_short(findings: Findings, sections: Sequence[Section]) -> list[str]:
    """Return the sentences of the first screen: from every section, on the capture, and warnings."""
    sentences = answers(findings, sections, otherwise=1)
    metrics = [section.name for section in sections if section.name in ("dispersion", "separation")]
    sampled = sampling_sentences(findings, metrics or ("dispersion",))
    return [
        *weights_sentences(findings),
        *unlearned_sentences(findings),
        *sentences,
        *sampled,
        *capture_sentences(findings),
        *diverged_sentences(findings),
    ]


def answers(findings: Findings, sections: Sequence[Section], otherwise: int) -> list[str]:
    """Return the answers of sections in short; where none has one, so many of their other sentences."""
    sentences = [sentence for section in sections for sentence in section.in_short(findings)]
    details = [section.details for section in sections if section.details]
    return sentences or [sentence for words in details for sentence in words(findings)][:otherwise]


def _tables(findings: Findings, sections: Sequence[Section]) -> dict[str, pd.DataFrame]:
    """Return the tables to write as CSV; percentiles of δ are in every report."""
    tables = {"dispersion": percentile_csv(findings, "dispersion")}
    if len(findings.measurements.projections):
        tables["projections"] = findings.measurements.projections
    for section in sections:
        tables |= section.tables(findings, len(sections) == 1)
    estimates = findings(estimate_table), findings.measurements.sweep_estimates, findings.measurements.sketches
    named = zip(("estimates", "sweep_estimates", "sketches"), estimates, strict=True)
    return tables | {name: table for name, table in named if len(table)}


def _write_tables(tables: Mapping[str, pd.DataFrame], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        text = csv_text(table).encode("utf-8", errors="backslashreplace")
        (folder / f"{name}.csv").write_bytes(text)


def _picture(
    shown: Shown,
    findings: Findings,
    folder: Path,
    formats: Sequence[str],
) -> Picture:
    """Draw and save a figure; return its picture, or why there is nothing to show."""
    if not formats:
        return _missing("no figure format was chosen.")
    try:
        figure = shown.draw(findings)
        with stacked():
            narrow = shown.draw(findings) if set(formats) & set(_ON_SCREEN) else None
    except NothingToDrawError as reason:
        return _missing(str(reason))
    files = folder / "figures"
    saved = save_figure(figure, files / shown.figure, formats)
    paths = {path.suffix[1:]: path.relative_to(folder).as_posix() for path in saved}
    telephone = None
    if narrow is not None:
        kind = "svg" if "svg" in formats else "png"
        (file,) = save_figure(narrow, files / f"{shown.figure}-narrow", [kind])
        telephone = file.relative_to(folder).as_posix()
    width, height = (round(inches * _PIXELS_PER_INCH) for inches in figure.get_size_inches())
    return {
        "files": paths, "width": width, "height": height, "missing": None, "narrow": telephone,
        "shows": _shows(figure),
    }  # fmt: skip


def _missing(reason: str) -> Picture:
    return {"files": {}, "width": 0, "height": 0, "missing": reason, "narrow": None, "shows": ""}


def _shows(figure: Figure) -> str:
    """Return the texts of legend and panel titles, each once."""
    legends = [*figure.legends, *(legend for ax in figure.axes if (legend := ax.get_legend()))]
    entries = [text.get_text() for legend in legends for text in legend.get_texts()]
    titles = [" ".join(ax.get_title(loc="left").split()) for ax in figure.axes]
    parts = [", ".join(dict.fromkeys(filter(None, words))) for words in (entries, titles)]
    return "; ".join(filter(None, [parts[0], parts[1] and f"panels: {parts[1]}"]))
