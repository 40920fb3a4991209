"""The tables of masks in number formats on the terminal."""

from rich.console import Console

from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.columns import (
    NEVER,
    Column,
    count,
    fine_percent,
    percent,
    percent_interval,
    plain,
    text,
)
from semdiag.presenting.terminal.changed_shares import changed_table
from semdiag.presenting.terminal.console import NumberTable
from semdiag.questions.mask_precision.words import certified_words, not_covered_words

_COLUMNS = (
    Column("format", form=text), Column("layer", form=plain), Column("covered", "rows", count),
    Column("certified", form=lambda value: "not covered" if value is None else percent(value), drop=NEVER),
    Column("changed", form=fine_percent, drop=NEVER),
    Column("changed_low changed_high", "changed 95%", percent_interval, drop=1),
    Column("tied", form=fine_percent, drop=NEVER), Column("changed_or_tied", form=fine_percent),
    Column("lost_p50", "weight lost p50"), Column("lost_mean", "mean", drop=2),
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
        screen.print(changed_table("Masks", _COLUMNS[:2], passed_on))


def _rows(kind: str, found: Summary | None) -> list[Summary]:
    return [{"format": kind, **row} for row in [*found["layers"], found["all"]]] if found else []
