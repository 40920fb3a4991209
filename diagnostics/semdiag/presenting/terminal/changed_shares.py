"""The table of choices that a number format changes, forecast and measured."""

from collections.abc import Iterable

from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.columns import Column, count, percent_interval, rough_percent
from semdiag.presenting.terminal.console import NumberTable

_COLUMNS = (
    Column("queries", "rows", count),
    Column("forecast", form=rough_percent),
    Column("forecast_low forecast_high", "forecast 95%", percent_interval),
    Column("measured", form=rough_percent),
    Column("measured_low measured_high", "measured 95%", percent_interval, drop=1),
    Column("first", "first changes", count),
)


def changed_table(what: str, names: Iterable[Column], rows: Iterable[Summary]) -> NumberTable:
    """Return the table.

    Args:
        what: changes.
        names: columns in front.
        rows: as :func:`~semdiag.measuring.findings.changed_shares.changed_shares` finds them.
    """
    title = f"{what} that change where the model runs in the format throughout:"
    return NumberTable((*names, *_COLUMNS), rows, title)
