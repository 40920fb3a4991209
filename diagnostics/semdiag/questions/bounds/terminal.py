"""Tables of ``semdiag stability`` and ``semdiag bounds`` on stderr."""

import math
from typing import Any

from rich.console import Console

from semdiag.measuring.findings.finding import Finding, Verdict, agreed
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import compared_pairs
from semdiag.measuring.findings.strict_json import number_from_json
from semdiag.measuring.table import ALL
from semdiag.presenting.terminal.console import NumberTable, number, number_table, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.presenting.terminal.verdicts import print_verdicts
from semdiag.questions.bounds.answer.consequences import consequence_findings
from semdiag.questions.bounds.answer.corollary import CLAIMS, LEFT_SIDES, corollary_findings
from semdiag.questions.bounds.answer.rungs import network_rungs
from semdiag.questions.bounds.answer.summary import FORMS, bounds_summary, parameter_findings
from semdiag.questions.bounds.words import constants_sentences, rungs_sentences

Summary = dict[str, Any]
_CONSTANTS = (
    ("Γ", "gamma", "measured"),
    ("Υ", "upsilon", "measured"),
    ("Ξ", "token_norm", "measured"),
    ("λ_LN1", "norm_lipschitz_attention", "measured"),
    ("λ_LN2", "norm_lipschitz_mlp", "measured"),
    ("ln λ_A", "attention_map", "sound"),
    ("ln λ_A paper", "attention_map", "paper"),
    ("ln λ_M", "bilinear_form", "sound"),
    ("ln λ_M paper", "bilinear_form", "paper"),
    ("ln λ_X", "block_input", "sound"),
    ("ln λ_X paper", "block_input", "paper"),
)


def print_bounds(findings: Findings) -> None:
    """Print constants and slopes of every model, and the conditions of every pair.

    Args:
        findings: of what was measured.
    """
    console = wide_console()
    summary, judged = findings(bounds_summary), findings(parameter_findings)
    for result in summary["results"]:
        console.print(f"\n{title(result)}: slopes of the loss, by group")
        console.print(_slopes(result["parameters"]))
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
    table = number_table(_PAIR_COLUMNS, least=["condition"], kept=["form", "mask better?"])
    for (claim, form), parts in at.items():
        name, threshold = LEFT_SIDES[form]
        sides = [_finite(part.numbers[name]) for part in parts]
        answer = _ANSWERS[agreed(part.verdict for part in parts)]
        one_k = ", one k" if any("one k" in part.note for part in parts) else ""
        table.add_row(CLAIMS[claim], form + one_k, f"{name} < {threshold:g}", *sides, answer)
    if table.row_count:
        console.print(table)
    others = [f for f in conditions if f.percentile is None]
    others = [f for f in others if f.where != "all" or (f.claim, f.form) not in at]  # which the table says
    print_verdicts(console, [*others, *consequences])


_PAIR_COLUMNS = ("better guarantee in", "form", "condition", "p75", "p90", "p95", "p100", "mask better?")


_ANSWERS = {
    Verdict.HOLDS: "yes",
    Verdict.VIOLATED: "no",
    Verdict.NOT_MET: "not met",
    Verdict.NOTHING: "inconclusive",
}


def _constants(rows: list[Summary]) -> NumberTable:
    found = {(r["layer"], r["head"], r["quantity"], r["form"]): r["ln_value"] for r in rows}
    table = number_table(["layer", "head", *(name for name, _, _ in _CONSTANTS)], least=["λ_LN1", "λ_LN2"])
    places = sorted({(layer, head) for layer, head, *_ in found if layer >= 0 and head >= 0})
    for layer, head in places:
        cells = []
        for name, quantity, form in _CONSTANTS:
            value = found.get((layer, head, quantity, form), found.get((layer, ALL, quantity, form)))
            logarithm = name.startswith("ln") or form == "paper"
            cells.append(number(value if logarithm or value is None else math.exp(number_from_json(value))))
        table.add_row(str(layer), str(head), *cells)
    forms = ("local", "sound", "paper")
    network = (f"{number(found.get((ALL, ALL, 'network', form)))} {form}" for form in forms)
    table.caption = f"ln λ_L of the network: {', '.join(network)}"
    tied = next((r for r in rows if r["quantity"] == "network" and r["form"] == "sound" and r["infinite"]), None)
    if tied is not None:
        table.caption += (
            f"; {tied['infinite']} inputs have no sound one, {number(tied['ln_finite'])} for the others"
        )
    return table


def _slopes(rows: list[Summary]) -> NumberTable:
    """Largest measured slope and constants of each group of tensors, as natural logarithms."""
    table = number_table(["layer", "tensors", "ln gradient", "ln secant", *(f"ln {form}" for form in FORMS)])
    for layer, group in dict.fromkeys((r["layer"], r["group"]) for r in rows):
        own = [r for r in rows if (r["layer"], r["group"]) == (layer, group)]
        cells = []
        for name in ("ln_gradient", "ln_secant", *(f"ln_{form}" for form in FORMS)):
            known = [number_from_json(r[name]) for r in own if r[name] is not None]
            cells.append(number(max(known, default=None)))
        table.add_row("–" if layer < 0 else str(layer), group, *cells)
    return table


def _finite(value: float) -> str:
    return number(value if math.isfinite(value) else None)
