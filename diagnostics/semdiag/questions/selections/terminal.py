"""What the terminal shows of selections: of one file, of two, of a model."""

from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.terminal.changed_shares import changed_table
from semdiag.presenting.terminal.console import NumberTable, number, number_table, wide_console
from semdiag.presenting.terminal.terminal import counted
from semdiag.questions.selections.words import comparison_sentences, own_sentences

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


def print_comparison(summary: Summary) -> None:
    """Print how far two selections agree, by layer, and what their differences are."""
    (found,) = summary["results"]
    console = wide_console()
    console.print(f"\n{found['file']} and {found['against']}: {_size(found)}, scores of {found['format']}")
    heads = ["layer", "rows", "overlap", "differ", "differ first", "numeric", "bug", "unexplained", "weight lost"]
    unknown = ["unexplained"] if found["classes"]["unexplained"] else ["numeric", "bug"]
    left_out = {"numeric", "bug", "unexplained"} - set(unknown)
    left_out |= set() if found["lost"]["of"] else {"weight lost"}
    shown = [head for head in heads if head not in left_out]
    table = number_table(shown, kept=["layer", "overlap", *unknown])
    for row in found["layers"]:
        cells = {
            "layer": str(row["layer"]),
            "overlap": f"{row['overlap']:.4f}",
            "weight lost": number(row["lost"]),
        }
        cells |= {"rows": f"{row['rows']:,}", "differ": f"{row['changed']:,}", "differ first": f"{row['first']:,}"}
        cells |= {name: f"{row[name]:,}" for name in ("numeric", "bug", "unexplained")}
        table.add_row(*(cells[head] for head in shown))
    console.print(table)
    for sentence in comparison_sentences(found):
        console.print(sentence)


def print_own(summary: Summary) -> None:
    """Print a model's own selections: those of experts, and those of keys."""
    (found,) = summary["results"]
    console = wide_console()
    rows = found["selections"]
    console.print(f"\n{found['model']}: {counted(len(rows), 'selection')}, certified for {found['format']}")
    experts = [row for row in rows if row["kind"] == "experts"]
    if experts:
        console.print(_experts(experts))
    others = [row for row in rows if row["kind"] != "experts"]
    if others:
        console.print(_keys(others))
    if any(row["rows"] for row in found["dense"]):
        console.print(_dense(found["dense"]))
    changes = found.get("propagated")
    if changes and changes["all"]:
        changed = [((row["module"],), row) for row in changes["selections"]] + [(("all",), changes["all"])]
        console.print(changed_table("Choices", ("choices of",), changed))
    for sentence in own_sentences(found):
        console.print(sentence)


_ROUNDING = 1e-9  # of sums of weights in float64
_MARGINS = ["margin", "p5", "certified"]


def _margins(row: Summary) -> tuple[str, str, str]:
    """Median and 5th percentile of the margin, and the certified share."""
    return number(row["margin_median"]), number(row["margin_p5"]), _share(row["certified_share"])


def _experts(rows: list[Summary]) -> NumberTable:
    """The table of routers."""
    heads = ["experts of", "chosen", "groups", "rows", *_MARGINS, "largest load", "smallest", "even", "unused"]
    heads = [head for head in heads if head != "groups" or any(row["groups"] for row in rows)]
    table = number_table(heads, names=1, least=["even", "rows"], kept=[*_MARGINS])
    for row in rows:
        load, groups = row["load"], row["groups"]
        cells = dict(zip(_MARGINS, _margins(row), strict=True))
        cells |= {"experts of": row["module"], "chosen": f"{row['k']} of {row['choices']}"}
        cells |= {"groups": f"{groups['chosen']} of {groups['of']}" if groups else "–", "rows": f"{row['rows']:,}"}
        for head, name in (("largest load", "largest"), ("smallest", "smallest"), ("even", "even")):
            cells[head] = _share(load and load[name])
        cells["unused"] = str(load["unused"]) if load else "–"
        table.add_row(*(cells[head] for head in heads))
    return table


def _keys(rows: list[Summary]) -> NumberTable:
    """The table of indexers."""
    heads = ["keys of", "chosen", "rows", "deciding", *_MARGINS, "ties", "first key kept", "future", "padding"]
    table = number_table(heads, names=1, least=["ties", "rows"], kept=[*_MARGINS, "future", "padding"])
    for row in rows:
        table.add_row(
            row["module"], f"{row['k']} of {row['choices']}{' blocks' * (row['kind'] == 'blocks')}",
            f"{row['rows']:,}", f"{row['deciding']:,}",
            *_margins(row), f"{row['ties']:,}", _share(row["first_kept_share"]), number(row["future"]),
            number(row["padding"]),
        )  # fmt: skip
    return table


def _dense(layers: list[Summary]) -> NumberTable:
    """The table of attention behind indexers."""
    rows = [row for row in layers if row["rows"]]
    heads = [
        "attention of",
        "keys chosen by",
        "rows",
        "recalled",
        "p5",
        "at random",
        "best",
        "largest hit",
        "lost",
    ]
    borrowed = any(not row["chosen_by"].startswith(row["attention"]) for row in rows)
    partly = any(abs(row["lost"] + row["recalled"] - 1) > _ROUNDING for row in rows)
    left_out = {*["keys chosen by"] * (not borrowed), *["lost"] * (not partly)}
    heads = [head for head in heads if head not in left_out]
    table = number_table(heads, names=1 + borrowed, least=["p5", "rows"], kept=["recalled", "at random"])
    for row in rows:
        cells = {"attention of": row["attention"], "keys chosen by": row["chosen_by"], "rows": f"{row['rows']:,}"}
        numbers = ("recalled", "recalled_p5", "at_random", "best", "largest_hit", "lost")
        cells |= {name.replace("_", " ").replace("recalled p5", "p5"): _share(row[name]) for name in numbers}
        table.add_row(*(cells[head] for head in heads))
    return table


def _share(value: float | None) -> str:
    """A share in percent."""
    return "–" if value is None else f"{100 * value:.3g}%"


def _size(found: Summary) -> str:
    """What was compared."""
    layers = counted(found["layers"][-1]["layer"] + 1, "layer")
    heads = "" if found["heads"] == 1 else f" × {found['heads']:,} heads"
    return f"{found['tokens']:,} tokens × {layers}{heads}, k = {found['k']:,}"


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
