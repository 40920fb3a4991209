"""The table of choices that a number format changes, forecast and measured."""

from collections.abc import Iterable, Sequence

from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.terminal.console import NumberTable, interval, number_table

_HEADS = ("rows", "forecast", "forecast 95%", "measured", "measured 95%", "first changes")


def changed_table(what: str, heads: Sequence[str], rows: Iterable[tuple[Sequence[str], Summary]]) -> NumberTable:
    """Return the table.

    Args:
        what: changes.
        heads: of the columns in front, the first of which is a name.
        rows: their cells, and what :func:`~semdiag.measuring.findings.changed_shares.changed_shares` found.
    """
    title = f"{what} that change where the model runs in the format throughout:"
    table = number_table((*heads, *_HEADS), names=1, title=title, least=("measured 95%",))
    for names, row in rows:
        shares = [cell for name in ("forecast", "measured") for cell in _with_interval(row, name)]
        table.add_row(*names, f"{row['queries']:,}", *shares, f"{row['first']:,}")
    return table


def _with_interval(row: Summary, name: str) -> list[str]:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return [f"{100 * row[name]:.3g}%", "–" if low is None else interval(100 * low, 100 * high)]
