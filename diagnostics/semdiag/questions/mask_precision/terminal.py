"""The tables of masks in number formats on the terminal."""

from rich.console import Console

from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.columns import (
    STAYS,
    Column,
    count,
    fine_percent,
    percent,
    percent_interval,
    plain,
    rough_percent,
    text,
)
from semdiag.presenting.terminal.console import NumberTable
from semdiag.questions.mask_precision.words import certified_words, not_covered_words

_COLUMNS = (
    Column("format", said=text), Column("layer", said=plain), Column("covered", "rows", count),
    Column("certified", said=lambda value: "not covered" if value is None else percent(value), goes=STAYS),
    Column("changed", said=fine_percent, goes=STAYS),
    Column("changed_low changed_high", "changed 95%", percent_interval, goes=1),
    Column("tied", said=fine_percent, goes=STAYS), Column("changed_or_tied", said=fine_percent),
    Column("lost_p50", "weight lost p50"), Column("lost_mean", "mean", goes=2),
)  # fmt: skip
_PROPAGATED = (
    Column("format", said=text), Column("layer", said=plain), Column("queries", "rows", count),
    Column("forecast", said=rough_percent),
    Column("forecast_low forecast_high", "forecast 95%", percent_interval),
    Column("measured", said=rough_percent),
    Column("measured_low measured_high", "measured 95%", percent_interval, goes=1),
    Column("first", "first changes", count),
)  # fmt: skip


def print_precision(screen: Console, found: list[Summary]) -> None:
    """Print what became of one model's masks, a row for each format and layer, and what was certified.

    Args:
        screen: where to.
        found: what ``--json`` says of the model's number formats.
    """
    rows = [row for kind in found for row in _rows(kind["format"], kind)]
    screen.print(NumberTable(_COLUMNS, [{**row, "covered": row["queries"] - row["not_covered"]} for row in rows]))
    for kind in found:
        row, uncovered = kind["all"], not_covered_words(kind["all"])
        said = [certified_words(row)] * (row["queries"] > row["not_covered"]) + [uncovered] * bool(uncovered)
        screen.print(f"{kind['format']}: {' '.join(said)}")
    passed_on = [row for kind in found for row in _rows(kind["format"], kind.get("propagated"))]
    if passed_on:
        title = "Masks that change where the model runs in the format throughout:"
        screen.print(NumberTable(_PROPAGATED, passed_on, title))


def _rows(kind: str, found: Summary | None) -> list[Summary]:
    return [{"format": kind, **row} for row in [*found["layers"], found["all"]]] if found else []
