"""Tables of ``semdiag bounds``."""

import math
from collections.abc import Iterable

from rich.console import Console

from semdiag.measuring.findings.finding import Finding, Verdict, agreed
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import compared_pairs
from semdiag.measuring.findings.strict_json import Summary, number_from_json
from semdiag.measuring.table import ALL
from semdiag.presenting.columns import STAYS, Column, Value, finite, number, plain
from semdiag.presenting.terminal.console import NumberTable, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.presenting.terminal.verdicts import print_verdicts
from semdiag.questions.bounds.answer.consequences import consequence_findings
from semdiag.questions.bounds.answer.corollary import CLAIMS, LEFT_SIDES, corollary_findings
from semdiag.questions.bounds.answer.rungs import network_rungs
from semdiag.questions.bounds.answer.summary import FORMS, bounds_summary, parameter_findings
from semdiag.questions.bounds.words import constants_sentences, rungs_sentences


def _exponential(value: Value) -> str:
    return number(None if value is None else math.exp(number_from_json(value)))


_CONSTANTS = (
    Column("layer", said=plain), Column("head", said=plain), Column("gamma-measured", "Γ", _exponential),
    Column("upsilon-measured", "Υ", _exponential), Column("token_norm-measured", "Ξ", _exponential),
    Column("norm_lipschitz_attention-measured", "λ_LN1", _exponential, goes=1),
    Column("norm_lipschitz_mlp-measured", "λ_LN2", _exponential, goes=2), Column("attention_map-sound", "ln λ_A"),
    Column("attention_map-paper", "ln λ_A paper"), Column("bilinear_form-sound", "ln λ_M"),
    Column("bilinear_form-paper", "ln λ_M paper"), Column("block_input-sound", "ln λ_X"),
    Column("block_input-paper", "ln λ_X paper"),
)  # fmt: skip
_SLOPES = (
    Column("layer", said=plain),
    Column("group", "tensors", plain),
    *(Column(name, name.replace("_", " ")) for name in ("ln_gradient", "ln_secant", *(f"ln_{f}" for f in FORMS))),
)
_PAIR = (
    Column("better", "better guarantee in", plain), Column("form", said=plain, goes=STAYS),
    Column("condition", said=plain, goes=1),
    *(Column(f"sides.{at}", p, finite) for at, p in enumerate(("p75", "p90", "p95", "p100"))),
    Column("answer", "mask better?", plain, goes=STAYS),
)  # fmt: skip
_ANSWERS = {
    Verdict.HOLDS: "yes",
    Verdict.VIOLATED: "no",
    Verdict.NOT_MET: "not met",
    Verdict.NOTHING: "inconclusive",
}


def print_bounds(findings: Findings) -> None:
    """Print constants and slopes of every model, and the conditions of every pair."""
    console = wide_console()
    summary, judged = findings(bounds_summary), findings(parameter_findings)
    for result in summary["results"]:
        console.print(f"\n{title(result)}: slopes of the loss, by group")
        console.print(NumberTable(_SLOPES, _by_group(result["parameters"])))
        for said in constants_sentences(f for f in judged if f.subject == result["model"] and f.where == "all"):
            console.print(said, style="red" if "an error of semdiag" in said else None)
        for said in rungs_sentences(findings(network_rungs, result["model"])):
            console.print(said)
        console.print("Constants:")
        console.print(_constants(result["constants"]))
    for pair in findings(compared_pairs):
        console.print(f"\n{pair.label}: {pair.full} and {pair.other}")
        _print_pair(console, findings(corollary_findings, pair), findings(consequence_findings, pair))
    console.print(summary["scope"])


def _print_pair(console: Console, conditions: list[Finding], consequences: list[Finding]) -> None:
    """Print the conditions of a pair in a table by percentile, and what is not in it in words."""
    at: dict[tuple[str, str], list[Finding]] = {}
    for finding in conditions:
        if finding.percentile is not None:
            at.setdefault((finding.claim, finding.form), []).append(finding)
    rows = []
    for (claim, form), parts in at.items():
        name, threshold = LEFT_SIDES[form]
        one_k = ", one k" if any("one k" in part.note for part in parts) else ""
        row = {"better": CLAIMS[claim], "form": form + one_k, "condition": f"{name} < {threshold:g}"}
        answer = _ANSWERS[agreed(part.verdict for part in parts)]
        rows.append({**row, "sides": [part.numbers[name] for part in parts], "answer": answer})
    if rows:
        console.print(NumberTable(_PAIR, rows))
    others = [f for f in conditions if f.percentile is None]
    others = [f for f in others if f.where != "all" or (f.claim, f.form) not in at]  # which the table says
    print_verdicts(console, [*others, *consequences])


def _constants(rows: list[Summary]) -> NumberTable:
    """A row a head; what a layer's heads share stands in each."""
    found = {(r["layer"], r["head"], f"{r['quantity']}-{r['form']}"): r for r in rows}
    names = [column.name for column in _CONSTANTS[2:]]
    places = sorted({(layer, head) for layer, head, _ in found if layer >= 0 and head >= 0})
    shown = []
    for layer, head in places:
        values = ((name, found.get((layer, head, name), found.get((layer, ALL, name)))) for name in names)
        shown.append({"layer": layer, "head": head} | {name: row and row["ln_value"] for name, row in values})
    network = {form: found.get((ALL, ALL, f"network-{form}"), {}) for form in ("local", "sound", "paper")}
    said = ", ".join(f"{number(row.get('ln_value'))} {form}" for form, row in network.items())
    caption = f"ln λ_L of the network: {said}"
    if network["sound"].get("infinite"):
        others = number(network["sound"]["ln_finite"])
        caption += f"; {network['sound']['infinite']} inputs have no sound one, {others} for the others"
    return NumberTable(_CONSTANTS, shown, caption=caption)


def _by_group(rows: list[Summary]) -> Iterable[Summary]:
    """Largest measured slope and constants of each group of tensors, as natural logarithms."""
    for layer, group in dict.fromkeys((r["layer"], r["group"]) for r in rows):
        own = [r for r in rows if (r["layer"], r["group"]) == (layer, group)]
        names = [column.name for column in _SLOPES[2:]]
        known = {name: [number_from_json(r[name]) for r in own if r[name] is not None] for name in names}
        largest = {name: max(values, default=None) for name, values in known.items()}
        yield {"layer": None if layer < 0 else layer, "group": group, **largest}
