"""Tables of ``semdiag selections``: of one file, of two, of a model."""

from collections.abc import Sequence

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.columns import NEVER, Column, count, four_decimals, number, plain, rough_percent, text
from semdiag.presenting.terminal.console import NumberTable, say_sentences, wide_console
from semdiag.questions.selections.words import comparison_sentences, ignored_sentences, own_sentences

_MEANING = {
    "exact": "the only top-k",
    "legal_tie": "a key left out equals the worst chosen",
    "within_rounding": "a key left out is larger, by rounding",
    "within_error": "a key left out is larger, within the error of the scores",
    "wrong": "a key left out is larger",
    "missing": "too few keys",
    "duplicate": "a key twice",
    "padding": "a key of padding or another document",
    "future": "a key after the query",
    "out_of_range": "an index that is no key",
    "not_judged": "no fault in the keys, scores unknown",
}


def _place(row: Sequence[int]) -> str:
    """Return the indices of a row, one for each dimension."""
    return ",".join(map(str, row))


def _of(chosen: int, choices: int) -> str:
    return f"{chosen} of {choices}"


_CLASSES = (
    Column("class", form=text), Column("means", "which means", text), Column("rows", form=count, drop=NEVER),
    Column("worst.row", "worst row", _place, drop=NEVER), Column("worst.separation", "separation"),
    Column("worst.separation_ulps", "in units"),
)  # fmt: skip
_LAYERS = (
    Column("layer", form=plain, drop=NEVER), Column("rows", form=count),
    Column("overlap", form=four_decimals, drop=NEVER), Column("changed", "differ", count),
    Column("first", "differ first", count),
    *(Column(name, form=count, drop=NEVER) for name in ("numeric", "bug", "unexplained")),
    Column("lost", "weight lost"),
)  # fmt: skip
_MARGINS = (
    Column("margin_median", "margin", drop=NEVER),
    Column("margin_p5", "p5", drop=NEVER),
    Column("certified_share", "certified", rough_percent, drop=NEVER),
)
_EXPERTS = (
    Column("module", "experts of", text), Column("k choices", "chosen", _of),
    Column("groups", form=lambda groups: _of(groups["chosen"], groups["of"]) if groups else "–"),
    Column("rows", form=count, drop=2), *_MARGINS, Column("load.largest", "largest load", rough_percent),
    Column("load.smallest", "smallest", rough_percent), Column("load.even", "even", rough_percent, drop=1),
    Column("load.unused", "unused", plain),
)  # fmt: skip
_KEYS = (
    Column("module", "keys of", text),
    Column("k choices kind", "chosen", lambda k, of, kind: _of(k, of) + " blocks" * (kind == "blocks")),
    Column("rows", form=count, drop=2), Column("deciding", form=count), *_MARGINS,
    Column("ties", form=count, drop=1), Column("first_kept_share", "first key kept", rough_percent),
    Column("future", drop=NEVER), Column("padding", drop=NEVER),
)  # fmt: skip


def print_check(summary: Summary) -> None:
    """Print the counts of a checked selection, its worst row and the verdict."""
    (result,) = summary["results"]
    console = wide_console()
    keys = "" if result["keys"] is None else f" of {result['keys']:,} keys"
    rows = counted(result["rows"], "row").replace(str(result["rows"]), f"{result['rows']:,}")
    say_sentences([f"{result['faults']:,} of {rows} {'is' if result['faults'] == 1 else 'are'} faulty."])
    console.print(f"\n{result['file']}: {rows}{keys}, k = {result['k']:,}, scores of {result['format']}")
    counts = {**result["counts"], "not_judged": result["not_judged"]}
    classes = [
        {"class": name, "means": meaning, "rows": counts[name], "worst": result["worst_of_class"][name]}
        for name, meaning in _MEANING.items()
        if counts[name]
    ]
    console.print(NumberTable(_CLASSES, classes))
    console.print(_worst(result))
    if result["not_checked"]:
        console.print(f"Not checked: {counted(result['not_checked'], 'row')} of padded queries.")
    if result["counts"]["out_of_range"]:
        console.print("Indices that are no key may be slots of a paged cache: give positions in the sequence.")
    for sentence in ignored_sentences(result):
        console.print(sentence)


def print_comparison(summary: Summary) -> None:
    """Print how far two selections agree, by layer, and what their differences are."""
    (result,) = summary["results"]
    console = wide_console()
    layers = counted(result["layers"][-1]["layer"] + 1, "layer")
    heads = "" if result["heads"] == 1 else f" × {result['heads']:,} heads"
    verdict, *more = comparison_sentences(result)
    say_sentences([verdict])
    size = f"{result['tokens']:,} tokens × {layers}{heads}, k = {result['k']:,}"
    console.print(f"\n{result['file']} and {result['against']}: {size}, scores of {result['format']}")
    left_out = {"numeric", "bug"} if result["classes"]["unexplained"] else {"unexplained"}
    left_out |= set() if result["lost"]["of"] else {"lost"}
    console.print(NumberTable([one for one in _LAYERS if one.name not in left_out], result["layers"]))
    for sentence in more:
        console.print(sentence)


def print_own(summary: Summary) -> None:
    """Print a model's own selections: of experts, and of keys."""
    (result,) = summary["results"]
    console = wide_console()
    rows = result["selections"]
    verdict, *more = own_sentences(result)
    say_sentences([verdict])
    console.print(f"\n{result['model']}: {counted(len(rows), 'selection')}, certified for {result['format']}")
    if experts := [row for row in rows if row["kind"] == "experts"]:
        console.print(NumberTable(_EXPERTS, experts))
    if others := [row for row in rows if row["kind"] != "experts"]:
        console.print(NumberTable(_KEYS, others))
    for sentence in more:
        console.print(sentence)


def _worst(result: Summary) -> str:
    """Return a sentence on the worst row."""
    worst = result["worst"]
    begin = f"Worst: row {_place(worst['row'])}, {worst['class']}"
    if worst["worst_chosen"] is None or worst["kth"] is None:
        return f"{begin}."
    scores = f"worst chosen score {number(worst['worst_chosen'], 6)}, k-th score {number(worst['kth'], 6)}"
    gap = f"gap {number(worst['gap'])}, {number(worst['gap_ulps'])} units of the last place of {result['format']}"
    return f"{begin}: {scores}, {gap}."
