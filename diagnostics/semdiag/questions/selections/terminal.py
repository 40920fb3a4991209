"""What the terminal shows of selections."""

from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.terminal.console import number, number_table, wide_console
from semdiag.presenting.terminal.terminal import counted

_MEANING = {
    "exact": "the only top-k",
    "legal_tie": "a key left out equals the worst chosen",
    "within_rounding": "a key left out is larger, by rounding",
    "wrong": "a key left out is larger",
    "missing": "too few keys",
    "duplicate": "a key twice",
    "padding": "a key of padding or another document",
    "future": "a key after the query",
    "out_of_range": "an index that is no key",
    "not_judged": "no fault in the keys, scores unknown",
}


def print_check(summary: Summary) -> None:
    """Print the counts of a checked selection, its worst row and the verdict."""
    (found,) = summary["results"]
    console = wide_console()
    keys = "" if found["keys"] is None else f" of {found['keys']:,} keys"
    rows = counted(found["rows"], "row").replace(str(found["rows"]), f"{found['rows']:,}")
    console.print(f"\n{found['file']}: {rows}{keys}, k = {found['k']:,}, scores of {found['format']}")
    heads = ["class", "which means", "rows", "worst row", "separation", "in units"]
    table = number_table(heads, names=2, kept=["rows", "worst row"])
    for name, meaning in _MEANING.items():
        many = found["not_judged"] if name == "not_judged" else found["counts"][name]
        if many:
            worst = found["worst_of_class"][name]
            numbers = number(worst["separation"]), number(worst["separation_ulps"])
            table.add_row(name, meaning, f"{many:,}", _place(worst), *numbers)
    console.print(table)
    console.print(_worst(found))
    if found["not_checked"]:
        console.print(f"Not checked: {counted(found['not_checked'], 'row')} of padded queries.")
    console.print(f"{found['faults']:,} of {rows} {'is' if found['faults'] == 1 else 'are'} faulty.")


def _place(row: Summary) -> str:
    """Where a row stands in each dimension."""
    return ",".join(map(str, row["row"]))


def _worst(found: Summary) -> str:
    """The worst row with its numbers."""
    worst = found["worst"]
    begin = f"Worst: row {_place(worst)}, {worst['class']}"
    if worst["worst_chosen"] is None or worst["kth"] is None:
        return f"{begin}."
    scores = f"worst chosen score {number(worst['worst_chosen'], 6)}, k-th score {number(worst['kth'], 6)}"
    gap = f"gap {number(worst['gap'])}, {number(worst['gap_ulps'])} units of the last place of {found['format']}"
    return f"{begin}: {scores}, {gap}."
