"""Tables of ``semdiag stability`` and ``semdiag bounds`` on stderr."""

import math
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from semdiag.commands.printing.console import number, number_table, wide_console
from semdiag.commands.printing.titles import title
from semdiag.findings.bounds import bounds_summary
from semdiag.findings.findings import Findings
from semdiag.findings.stability import stability_summary

Summary = dict[str, Any]
_CONSTANTS = (
    ("Γ", "gamma", "measured"),
    ("Υ", "upsilon", "measured"),
    ("Ξ", "token_norm", "measured"),
    ("λ_LN1", "norm_lipschitz_attention", "measured"),
    ("λ_LN2", "norm_lipschitz_mlp", "measured"),
    ("ln λ_A", "attention_map", "sound"),
    ("paper", "attention_map", "paper"),
    ("ln λ_M", "bilinear_form", "sound"),
    ("paper", "bilinear_form", "paper"),
    ("ln λ_X", "block_input", "sound"),
    ("paper", "block_input", "paper"),
)


def print_stability(findings: Findings) -> None:
    """Print one table per model and its verdicts.

    Args:
        findings: of what was measured.
    """
    console = wide_console()
    summary = findings(stability_summary)
    for result in summary["results"]:
        heads = ["layer", "head", "local p50", "p100", "secant p50", "p100"]
        heads += ["ln ξ p50", "p100", "ln ξ paper p50", "p100", "same set"]
        heads += [f"response {r['noise']:g}" for r in result["all"].get("response", [])]
        console.print(f"\n{title(result)}: softmax stability")
        table = number_table(heads)
        for row in [*result["layers"], {"layer": "all", "head": "", **result["all"]}]:
            cells = [str(row["layer"]), str(row["head"])]
            for name in ("local", "secant", "ln_sound", "ln_paper"):
                cells += [number(row.get(name, {}).get(p)) for p in ("p50", "p100")]
            cells.append("–" if row.get("same_set") is None else f"{row['same_set']:.1%}")
            cells += [number(level["mean"]) for level in row.get("response", [])]
            table.add_row(*cells)
        console.print(table)
        _verdicts(console, result["verdicts"])


def print_bounds(findings: Findings) -> None:
    """Print constants and slopes of every model, and the conditions of every pair.

    Args:
        findings: of what was measured.
    """
    console = wide_console()
    summary = findings(bounds_summary)
    for result in summary["results"]:
        console.print(f"\n{title(result)}: constants")
        console.print(_constants(result["constants"]))
        console.print("Slopes of the loss, the largest of each group's tensors:")
        console.print(_slopes(result["parameters"]))
        _verdicts(console, (v for v in result["verdicts"] if v["where"] == "all"))
    for pair in summary["pairs"]:
        console.print(f"\n{pair['label']}: {pair['reference']} and {pair['other']}")
        table = number_table(_PAIR_COLUMNS)
        for verdict in pair["verdicts"]:
            sides = [
                v for name, v in verdict["numbers"].items() if name.startswith(("left side p", "ln margin p"))
            ]
            if sides:
                name = "X" if verdict["claim"].endswith("X") else "W"
                kind = "left side < 1" if "left side p75" in verdict["numbers"] else "ln margin < 0"
                table.add_row(name, verdict["form"], kind, *map(number, sides), _ANSWERS[verdict["verdict"]])
        if table.row_count:
            console.print(table)
        shown = (v for v in pair["verdicts"] if not any(n.endswith("p75") for n in v["numbers"]))
        _verdicts(console, (v for v in shown if not v["where"].startswith("p")))
    console.print(summary["scope"])


_PAIR_COLUMNS = ("better guarantee in", "form", "condition", "p75", "p90", "p95", "p100", "mask better?")


_ANSWERS = {
    "holds": "yes",
    "violated": "no",
    "assumption not met": "not met",
    "nothing conclusive": "inconclusive",
}


def _constants(rows: list[Summary]) -> Table:
    found = {(r["layer"], r["head"], r["quantity"], r["form"]): r["ln_value"] for r in rows}
    table = number_table(["layer", "head", *(name for name, _, _ in _CONSTANTS)])
    places = sorted({(layer, head) for layer, head, *_ in found if layer >= 0 and head >= 0})
    for layer, head in places:
        cells = []
        for name, quantity, form in _CONSTANTS:
            value = found.get((layer, head, quantity, form), found.get((layer, -1, quantity, form)))
            logarithm = name.startswith("ln") or form == "paper"
            cells.append(number(value if logarithm or value is None else math.exp(value)))
        table.add_row(str(layer), str(head), *cells)
    network = [number(found.get((-1, -1, "network", form))) for form in ("sound", "paper")]
    table.caption = f"ln λ_L of the network: {network[0]} sound, {network[1]} paper"
    return table


def _slopes(rows: list[Summary]) -> Table:
    """Largest measured slope and constants of each group of tensors, as natural logarithms."""
    table = number_table(["layer", "tensors", "ln measured", "ln sound", "ln paper"])
    for layer, group in dict.fromkeys((r["layer"], r["group"]) for r in rows):
        own = [r for r in rows if (r["layer"], r["group"]) == (layer, group)]
        columns = (("ln_gradient", "ln_secant"), ("ln_sound",), ("ln_paper",))
        cells = []
        for names in columns:
            known = [r[name] for r in own for name in names if r[name] is not None]
            cells.append(number(max(known, default=None)))
        table.add_row("–" if layer < 0 else str(layer), group, *cells)
    return table


def _verdicts(console: Console, verdicts: Iterable[Summary]) -> None:
    for v in verdicts:
        numbers = ", ".join(f"{name} = {number(value)}" for name, value in v["numbers"].items())
        form = f" [{v['form']}]" if v["form"] else ""
        where = "" if v["where"] == "all" else f", {v['where']}"
        note = f"; {v['note']}" if v["note"] else ""
        console.print(f"{v['verdict']}: {v['claim']}{form}{where} ({numbers}){note}")
