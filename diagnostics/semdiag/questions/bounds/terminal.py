"""Tables of ``semdiag bounds``."""

import math

import pandas as pd
from rich.console import Console

from semdiag.measuring.findings.finding import Finding, Verdict, agreed
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import compared_pairs
from semdiag.measuring.findings.strict_json import records
from semdiag.measuring.table import ALL
from semdiag.presenting.columns import NEVER, Column, finite, number, plain
from semdiag.presenting.terminal.console import NumberTable, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.presenting.terminal.verdicts import print_verdicts
from semdiag.questions.bounds.answer.corollary import CLAIMS, LEFT_SIDES, corollary_findings
from semdiag.questions.bounds.answer.rungs import network_rungs
from semdiag.questions.bounds.answer.summary import FORMS, bounds_summary, parameter_findings
from semdiag.questions.bounds.words import constants_sentences, rungs_sentences


def _exponential(value: float) -> str:
    return number(math.exp(value))


_CONSTANTS = (
    Column("layer", form=plain), Column("head", form=plain), Column("gamma-measured", "Γ", _exponential),
    Column("upsilon-measured", "Υ", _exponential), Column("token_norm-measured", "Ξ", _exponential),
    Column("norm_lipschitz_attention-measured", "λ_LN1", _exponential, drop=1),
    Column("norm_lipschitz_mlp-measured", "λ_LN2", _exponential, drop=2), Column("attention_map-sound", "ln λ_A"),
    Column("attention_map-paper", "ln λ_A paper"), Column("bilinear_form-sound", "ln λ_M"),
    Column("bilinear_form-paper", "ln λ_M paper"), Column("block_input-sound", "ln λ_X"),
    Column("block_input-paper", "ln λ_X paper"),
)  # fmt: skip
_SLOPES = (
    Column("layer", form=lambda layer: plain(None if layer == ALL else layer)),
    Column("group", "tensors", plain),
    *(Column(f"ln_{name}") for name in ("gradient", "secant", *FORMS)),
)
_PAIR = (
    Column("better", "better guarantee in", plain), Column("form", form=plain, drop=NEVER),
    Column("condition", form=plain, drop=1),
    *(Column(f"sides.{at}", p, finite) for at, p in enumerate(("p75", "p90", "p95", "p100"))),
    Column("answer", "mask better?", plain, drop=NEVER),
)  # fmt: skip
_ANSWERS = {
    Verdict.HOLDS: "yes",
    Verdict.VIOLATED: "no",
    Verdict.NOT_MET: "not met",
    Verdict.NOTHING: "inconclusive",
}


def print_bounds(findings: Findings) -> None:
    """Print slopes and constants of every model, and the conditions of every pair."""
    console = wide_console()
    summary = findings(bounds_summary)
    of_models = [finding for finding in findings(parameter_findings) if finding.where == "all"]
    for result in summary["results"]:
        console.print(f"\n{title(result)}: slopes of the loss, by group")
        own = findings.measurements.of(result["model"])
        console.print(_slopes(own.parameters))
        for sentence in constants_sentences(f for f in of_models if f.subject == result["model"]):
            console.print(sentence, style="red" if "an error of semdiag" in sentence else None)
        for sentence in rungs_sentences(findings(network_rungs, result["model"])):
            console.print(sentence)
        console.print("Constants:")
        console.print(_constants(own.constants))
    for pair in findings(compared_pairs):
        console.print(f"\n{pair.label}: {pair.full} and {pair.other}")
        _print_pair(console, findings(corollary_findings, pair))
    console.print(summary["scope"])


def _print_pair(console: Console, conditions: list[Finding]) -> None:
    """Print the conditions of a pair in a table by percentile, and the other findings as sentences."""
    by_condition: dict[tuple[str, str], list[Finding]] = {}
    for finding in conditions:
        if finding.percentile is not None:
            by_condition.setdefault((finding.claim, finding.form), []).append(finding)
    rows = []
    for (claim, form), parts in by_condition.items():
        name, threshold = LEFT_SIDES[form]
        one_k = ", one k" if any("one k" in part.note for part in parts) else ""
        row = {"better": CLAIMS[claim], "form": form + one_k, "condition": f"{name} < {threshold:g}"}
        answer = _ANSWERS[agreed(part.verdict for part in parts)]
        rows.append({**row, "sides": [part.numbers[name] for part in parts], "answer": answer})
    if rows:
        console.print(NumberTable(_PAIR, rows))
    others = [
        f for f in conditions
        if f.percentile is None and (f.where != "all" or (f.claim, f.form) not in by_condition)
    ]  # fmt: skip
    print_verdicts(console, others)


def _slopes(parameters: pd.DataFrame) -> NumberTable:
    """Return the largest measured slope and constants of each group of tensors, as natural logarithms."""
    names = [column.name for column in _SLOPES[2:]]
    largest = parameters.groupby(["layer", "group"], sort=False)[names].max().reset_index()
    return NumberTable(_SLOPES, records(largest))


def _constants(constants: pd.DataFrame) -> NumberTable:
    """Return a row a head, which repeats the constants of its layer."""
    named = constants.assign(name=constants["quantity"] + "-" + constants["form"])
    by_head = named[named["head"] != ALL].pivot(index=["layer", "head"], columns="name", values="ln_value")
    by_layer = named[named["head"] == ALL].pivot(index="layer", columns="name", values="ln_value")
    table = by_head.join(by_layer, on="layer").reindex(columns=[column.name for column in _CONSTANTS[2:]])
    network = named[named["layer"] == ALL].set_index("name")
    forms = {form: network["ln_value"].get(f"network-{form}") for form in ("local", "sound", "paper")}
    caption = f"ln λ_L of the network: {', '.join(f'{number(value)} {form}' for form, value in forms.items())}"
    if infinite := network["infinite"].get("network-sound"):
        others = number(network["ln_finite"].get("network-sound"))
        caption += f"; {infinite} inputs have no sound one, {others} for the others"
    return NumberTable(_CONSTANTS, records(table.reset_index()), caption=caption)
