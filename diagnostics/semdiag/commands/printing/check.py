"""Tables of ``semdiag check`` on stderr."""

from semdiag.measuring.counted import counted
from semdiag.presenting.columns import Column, four_digits, plain, text, three_digits
from semdiag.presenting.terminal.console import NumberTable, wide_console
from semdiag.questions.dispersion.answer.pairs import GATED, SHOWN, GateResult
from semdiag.reporting.gate.layers import LayerGate
from semdiag.reporting.gate.verification import Verification


def print_check(result: Verification) -> None:
    """Print pairs, layers, invariants, rules, and what was not compared with the baseline."""
    console = wide_console()
    for pair, gate in zip(result.pairs, result.layers, strict=True):
        console.print(_pair(pair))
        console.print(_layers(gate))
    for invariant in result.invariants:
        console.print(f"{'holds' if invariant.passed else 'FAILS'}: {invariant.words}")
    for rule in result.rules:
        word = "holds" if rule.passed else "FAILS" if rule.known else "cannot tell"
        value = four_digits(rule.value) if rule.known else "undefined"
        console.print(f"{word}: {rule.rule.text} — {value}, {rule.model}")
    for words in result.compared.words if result.compared else ():
        console.print(f"not compared: {words}")


def conclusion(result: Verification) -> str:
    """Return in a line how much passes."""
    passing = sum(pair.passed and gate.passed for pair, gate in zip(result.pairs, result.layers, strict=True))
    parts = [f"{passing} of {len(result.pairs)} pairs pass"] if result.pairs else []
    parts.append(f"{sum(i.passed for i in result.invariants)} of {len(result.invariants)} invariants hold")
    if result.rules:
        parts.append(f"{sum(r.passed for r in result.rules)} of {len(result.rules)} rules hold")
    if result.compared:
        unmatched = sum(moved.quantity == "model" for moved in result.drifts)
        numbers = len(result.drifts) - unmatched
        changes = [f"{counted(numbers, 'number')} left the baseline"] if numbers else []
        changes += [f"{counted(unmatched, 'model')} of the baseline not matched"] if unmatched else []
        parts.append(f"{result.compared.compared} of {result.compared.models} models compared")
        parts[-1] += f", {' and '.join(changes) or 'nothing has drifted'}"
    return f"{'; '.join(parts)}."


def _pair(result: GateResult) -> NumberTable:
    named = {"δ_s, full": result.full, "δ_h, top-k": result.topk}
    rows = [{"nats": name} | {p: four_digits(values[p]) for p in SHOWN} for name, values in named.items()]
    rows.append({"nats": "δ_h < δ_s"} | {p: _verdict(result, p) for p in SHOWN})
    return NumberTable(
        [Column("nats", form=text), *(Column(p, form=plain) for p in SHOWN)], rows, result.pair.label
    )


def _verdict(result: GateResult, percentile: str) -> str:
    if percentile not in GATED:
        return "–"
    if percentile in result.unknown:
        return "cannot tell"
    return "FAILS" if percentile in result.failed else "holds"


def _layers(gate: LayerGate) -> str:
    if not gate.failing:
        return f"δ_h < δ_s at the median of each of the {len(gate.full)} layers"
    judged = [n for n in gate.failing if n not in gate.unknown]
    parts = [f"layer {n} ({three_digits(gate.topk[n])} against {three_digits(gate.full[n])})" for n in judged]
    sentences = [f"does not hold at the median of {', '.join(parts)}"] if parts else []
    unjudged = ", ".join(f"layer {n}" for n in gate.unknown)
    sentences += [f"cannot be judged at the median of {unjudged}"] if unjudged else []
    allowed = "which fails" if not gate.passed else "which is allowed in fewer than half of the layers"
    return f"δ_h < δ_s {' and '.join(sentences)}, {allowed}"
