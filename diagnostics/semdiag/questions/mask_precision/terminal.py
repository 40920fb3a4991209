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
from semdiag.presenting.terminal.console import NumberTable
from semdiag.questions.mask_precision.words import certified_words, not_covered_words

_COLUMNS = (
    Column("format", form=text), Column("layer", form=plain),
    Column("queries not_covered", "rows", lambda queries, not_covered: count(queries - not_covered)),
    Column("certified", form=lambda share: "not covered" if share is None else percent(share), drop=NEVER),
    Column("changed", form=fine_percent, drop=NEVER),
    Column("changed_low changed_high", "changed 95%", percent_interval, drop=1),
    Column("tied", form=fine_percent, drop=NEVER), Column("changed_or_tied", form=fine_percent),
    Column("lost_p50", "weight lost p50"), Column("lost_mean", "mean", drop=2),
)  # fmt: skip


def print_precision(screen: Console, formats: list[Summary]) -> None:
    """Print how one model's masks change, a row for each format and layer, and what was certified."""
    rows = [{"format": one["format"], **row} for one in formats for row in [*one["layers"], one["all"]]]
    screen.print(NumberTable(_COLUMNS, rows))
    for one in formats:
        row, uncovered = one["all"], not_covered_words(one["all"])
        words = [certified_words(row)] * (row["queries"] > row["not_covered"]) + [uncovered] * bool(uncovered)
        screen.print(f"{one['format']}: {' '.join(words)}")
