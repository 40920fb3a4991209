"""The page of a report: the template filled with numbers and words."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any, TypedDict

import pandas as pd
from jinja2 import Environment, StrictUndefined

from semdiag.capturing.attention_kinds import EXTERNAL_SOURCES
from semdiag.presentation.section import Question


class Picture(TypedDict):
    """What the page must know of a figure: files by format, size in CSS pixels, or why it is missing."""

    files: dict[str, str]
    width: int
    height: int
    missing: str | None


def render_page(
    whole: dict[str, Any],
    parts: Sequence[tuple[str, Sequence[Question]]],
    pictures: dict[str, Picture],
    non_finite: pd.DataFrame,
    keep_queries: bool,
    theory: Sequence[str] = (),
) -> str:
    """Fill the template; every value is escaped.

    Args:
        whole: the report's summary.
        parts: name and questions of each section, in order.
        pictures: by figure.
        non_finite: the table of measurements with this name.
        keep_queries: whether the measurements themselves are beside the page.
        theory: names of the tables of the theory beside the page.

    Returns:
        The page.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = _number
    environment.filters["percent"] = _percent
    source = files("semdiag.presentation.report").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    rows = whole["results"]
    others = [row["source"] in EXTERNAL_SOURCES for row in rows]
    named = {
        f"{row['attention_label']} ({row['model'] if other else row['task'] or 'task unknown'})"
        for row, other in zip(rows, others, strict=True)
    }
    return environment.from_string(source).render(
        report=whole,
        parts=parts,
        pictures=pictures,
        models=", ".join(sorted(named)),
        external=all(others),
        sections={name for name, _ in parts},
        non_finite=non_finite.to_dict("records"),
        keep_queries=keep_queries,
        theory=theory,
    )


def _number(value: float | None) -> str:
    """Three digits, an en dash where there is no number."""
    return "–" if value is None else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
