"""Tables of ``semdiag check`` on stderr."""

from semdiag.commands.printing.console import NumberTable, number_table, wide_console
from semdiag.commands.printing.terminal import counted
from semdiag.findings.gate.layers import LayerGate
from semdiag.findings.gate.pairs import GATED, SHOWN, GateResult
from semdiag.findings.gate.verification import Verification


def print_check(result: Verification) -> None:
    """Print pairs, layers, invariants and rules.

    Args:
        result: of the check.
    """
    console = wide_console()
    for pair, gate in zip(result.pairs, result.layers, strict=True):
        console.print(_pair(pair))
        console.print(_layers(gate))
    for invariant in result.invariants:
        console.print(f"{'holds' if invariant.passed else 'FAILS'}: {invariant.words}")
    for rule in result.rules:
        console.print(f"{'holds' if rule.passed else 'FAILS'}: {rule.rule.text} — {rule.value:.4g}, {rule.model}")


def conclusion(result: Verification) -> str:
    """Say in a line how much passes.

    Args:
        result: of the check.
    """
    passing = sum(pair.passed and gate.passed for pair, gate in zip(result.pairs, result.layers, strict=True))
    parts = [f"{passing} of {len(result.pairs)} pairs pass"] if result.pairs else []
    parts.append(f"{sum(i.passed for i in result.invariants)} of {len(result.invariants)} invariants hold")
    if result.rules:
        parts.append(f"{sum(r.passed for r in result.rules)} of {len(result.rules)} rules hold")
    if result.judged_drift:
        parts.append(
            f"{counted(len(result.drifts), 'number')} left the baseline"
            if result.drifts
            else "nothing has drifted"
        )
    return f"{'; '.join(parts)}."


def _pair(result: GateResult) -> NumberTable:
    table = number_table(["nats", *SHOWN], names=1, title=result.pair.label)
    table.add_row("δ_s, full", *(f"{result.full[p]:.4g}" for p in SHOWN))
    table.add_row("δ_h, top-k", *(f"{result.topk[p]:.4g}" for p in SHOWN))
    verdicts = ("–" if p not in GATED else "FAILS" if p in result.failed else "holds" for p in SHOWN)
    table.add_row("δ_h < δ_s", *verdicts)
    return table


def _layers(gate: LayerGate) -> str:
    if not gate.failing:
        return f"δ_h < δ_s at the median of each of the {len(gate.full)} layers"
    parts = [f"layer {n} ({gate.topk[n]:.3g} against {gate.full[n]:.3g})" for n in gate.failing]
    allowed = "which fails" if not gate.passed else "which fewer than half of the layers may"
    return f"δ_h < δ_s does not hold at the median of {', '.join(parts)}, {allowed}"
