"""Render the page of a report from its template."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, TypedDict

import pandas as pd
from markupsafe import Markup

from semdiag.capturing.attention_kinds import EXTERNAL_SOURCES
from semdiag.presenting.page_style import page_environment, page_style
from semdiag.presenting.section import Heading
from semdiag.questions.registry import sections
from semdiag.reporting.page_tables import ENCODERS, EXTERNAL, LAYERS, MEASURED


class Picture(TypedDict):
    """A figure on the page: files by format, size in CSS pixels, or why it is missing."""

    files: dict[str, str]
    width: int
    height: int
    missing: str | None
    narrow: str | None
    shows: str


def render_page(
    content: dict[str, Any],
    parts: Sequence[tuple[str, Sequence[Heading]]],
    pictures: dict[str, Picture],
    non_finite: pd.DataFrame,
    keep_queries: bool,
    theory: Sequence[str] = (),
    outliers: Sequence[tuple[str, str | None, str]] = (),
) -> str:
    """Fill the template; every value is escaped, and control characters are made visible."""
    source = files("semdiag.reporting").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    rows = content["results"]
    glances = content["glances"]
    places = [(name, heading) for name, headings in parts for heading in headings]
    best = next((s for _, heading in places for s in heading.figures if not pictures[s.figure]["missing"]), None)
    tiles = [(_glanced(name, headings), glances[name]) for name, headings in parts if headings and name in glances]
    others = [row["source"] in EXTERNAL_SOURCES for row in rows]
    named = {
        f"{row['attention_label']} ({row['model'] if other else row['task'] or 'task unknown'})"
        for row, other in zip(rows, others, strict=True)
    }
    return (
        page_environment()
        .from_string(source)
        .render(
            page_style=Markup(page_style()),
            report=content,
            parts=parts,
            pictures=pictures,
            missing={name for name, picture in pictures.items() if picture["missing"]},
            models=", ".join(sorted(named)),
            title=_title(rows),
            tiles=[tile for tile in tiles if not tile[1]["claim"]],
            claims=[tile for tile in tiles if tile[1]["claim"]],
            about=_about(content),
            made_with=_settings(
                {name: value for name, value in content["provenance"].items() if name != "command"}
            ),
            lead=content["verdict"][0],
            eyebrow=_eyebrow(parts),
            best=best,
            external=all(others),
            tables={
                "encoders": ENCODERS,
                "external": EXTERNAL,
                "measured": [column for column in MEASURED if column.name != "seed" or not all(others)],
                "layers": LAYERS,
            },
            sections={name for name, _ in parts},
            non_finite=non_finite.to_dict("records"),
            keep_queries=keep_queries,
            theory=theory,
            outliers=outliers,
        )
    )


def _glanced(name: str, headings: Sequence[Heading]) -> Heading:
    """Return the heading that a section's answer at a glance is about."""
    anchor = sections()[name].glanced
    return next((heading for heading in headings if heading.anchor == anchor), headings[0])


def _title(rows: Sequence[dict[str, Any]]) -> str:
    """Return the title of the browser's tab: the one model, or the number of models."""
    return str(rows[0]["model"])[-60:] if len(rows) == 1 else f"{len(rows)} models"


def _eyebrow(parts: Sequence[tuple[str, Sequence[Heading]]]) -> str:
    """Return the question above the page's answer: for runs how fast they learn, else the first section's."""
    names = [name for name, _ in parts]
    if "convergence" in names:
        return "How fast does it learn?"
    first = next((headings[0].title for _, headings in parts if headings), "")
    return first if names[:1] != ["dispersion"] else "How focused is the attention?"


def _about(content: dict[str, Any]) -> str:
    """Return one line on what was measured, on which inputs, when and with which version."""
    rows = content["results"]
    model = str(rows[0]["model"]) if len(rows) == 1 else f"{len(rows)} models"
    counts = sorted({int(row["samples"]) for row in rows})
    samples = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    inputs = dict.fromkeys(str(row["inputs"]) for row in rows)
    of = f": {next(iter(inputs))}" if len(inputs) == 1 else ""
    provenance = content["provenance"]
    samples += f" sample{'s' * (counts != [1])}"
    version = provenance.get("semdiag")
    parts = (model, samples + of, provenance.get("date"), version and f"semdiag {version}")
    return " · ".join(part for part in parts if part)


def _settings(named: Mapping[str, Any]) -> str:
    """Return settings in words, like ``seed 0, noise 0.01, mask noise (levels 0.01, draws 3)``."""

    def said(value: Any) -> str:
        if isinstance(value, Mapping):
            return f"({_settings(value)})"
        if isinstance(value, list | tuple):
            return " ".join(map(said, value))
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value}"

    return ", ".join(f"{name.replace('_', ' ')} {said(value)}" for name, value in named.items())
