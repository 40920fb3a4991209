"""The table of masks in number formats on the terminal."""

from rich.console import Console

from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.terminal.changed_shares import changed_table
from semdiag.presenting.terminal.console import interval, number, number_table
from semdiag.questions.mask_precision.words import certified_words, not_covered_words

_COLUMNS = (
    "format", "layer", "rows", "certified", "changed", "changed 95%", "tied", "changed or tied",
    "weight lost p50", "mean",
)  # fmt: skip


def print_precision(screen: Console, found: list[Summary]) -> None:
    """Print what became of one model's masks, a row for each format and layer, and what was certified.

    Args:
        screen: where to.
        found: what ``--json`` says of the model's number formats.
    """
    table = number_table(_COLUMNS, names=1, least=("changed 95%", "mean"), kept=("certified", "changed", "tied"))
    for of_format in found:
        for row in [*of_format["layers"], of_format["all"]]:
            table.add_row(of_format["format"], str(row["layer"]), f"{_covered(row):,}", *_cells(row))
    screen.print(table)
    for of_format in found:
        row, uncovered = of_format["all"], not_covered_words(of_format["all"])
        said = [certified_words(row)] * bool(_covered(row)) + [uncovered] * bool(uncovered)
        screen.print(f"{of_format['format']}: {' '.join(said)}")
    rows = [
        ((of_format["format"], str(row["layer"])), row)
        for of_format in found
        if "propagated" in of_format
        for row in [*of_format["propagated"]["layers"], of_format["propagated"]["all"]]
    ]
    if rows:
        screen.print(changed_table("Masks", ("format", "layer"), rows))


def _covered(row: Summary) -> int:
    return int(row["queries"] - row["not_covered"])


def _cells(row: Summary) -> list[str]:
    if not _covered(row):
        return ["not covered"]
    low, high = row["changed_low"], row["changed_high"]
    return [
        f"{row['certified']:.1%}",
        f"{row['changed']:.2%}",
        "–" if low is None else interval(100 * low, 100 * high),
        f"{row['tied']:.2%}",
        f"{row['changed_or_tied']:.2%}",
        *("–" if row[name] is None else number(row[name]) for name in ("lost_p50", "lost_mean")),
    ]
