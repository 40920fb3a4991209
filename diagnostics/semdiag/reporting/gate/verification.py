"""All judgements of ``semdiag check``."""

from dataclasses import asdict, dataclass
from typing import Any

from semdiag.measuring.findings.estimates import require_every_query
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import find_pairs
from semdiag.measuring.findings.strict_json import json_ready, schema
from semdiag.questions.dispersion.answer.pairs import GATED, GateResult, dispersion_gate, require_one_partner
from semdiag.reporting.gate.drift import TOLERANCE, Compared, Drift, compared, drift, tracked_numbers
from semdiag.reporting.gate.invariants import Invariant, invariants
from semdiag.reporting.gate.layers import LayerGate, layer_gate
from semdiag.reporting.gate.rules import Rule, RuleResult, apply_rules

PROBED = 50  # samples on which masks are tested under noise


@dataclass(frozen=True)
class Expectations:
    """Further requirements on the models besides δ_h < δ_s."""

    rules: list[Rule]  # that every model must satisfy
    baseline: list[dict[str, Any]] | None = None  # numbers of an earlier check; None: there is no baseline
    tolerance: float = TOLERANCE  # relative change allowed
    every_layer: bool = False  # whether a single layer without δ_h < δ_s at its median is a failure


@dataclass(frozen=True, eq=False)
class Verification:
    """The judgements and what they are about."""

    findings: Findings  # of the models
    pairs: list[GateResult]  # pooled percentiles of each pair
    layers: list[LayerGate]  # medians by layer of the same pairs
    invariants: list[Invariant]  # of capture and certificates
    rules: list[RuleResult]  # results by rule and model
    drifts: list[Drift]  # numbers that differ from the baseline
    compared: Compared | None  # models that the baseline covers; None without a baseline

    @property
    def failures(self) -> list[str]:
        """Return all failures, one statement each."""
        statements = [f"{result.pair.label}: {result.fault}" for result in self.pairs if not result.passed]
        statements += [f"{gate.label}: {gate.fault}" for gate in self.layers if not gate.passed]
        statements += [
            f"{invariant.name}: {invariant.words}" for invariant in self.invariants if not invariant.passed
        ]
        statements += [f"{result.model}: {result.fault}" for result in self.rules if not result.passed]
        return statements + [moved.words for moved in self.drifts]

    def summary(self) -> dict[str, Any]:
        """Return the verdicts as plain values, schema ``semdiag.check/2``."""
        results = [
            {
                "full": pair.pair.full,
                "topk": pair.pair.other,
                "delta_s": pair.full,
                "delta_h": pair.topk,
                "passed": pair.passed,
                "unknown": pair.unknown,
                "layers": {
                    "delta_s": gate.full,
                    "delta_h": gate.topk,
                    "failing": gate.failing,
                    "unknown": gate.unknown,
                    "passed": gate.passed,
                },
            }
            for pair, gate in zip(self.pairs, self.layers, strict=True)
        ]
        content: dict[str, Any] = {
            "schema": schema("check"),
            "provenance": self.findings.measurements.provenance,
            "gated": GATED,
            "passed": not self.failures,
            "failures": self.failures,
            "results": results,
            "invariants": [asdict(invariant) for invariant in self.invariants],
            "rules": [
                {"rule": r.rule.text, "model": r.model, "value": r.value, "passed": r.passed} for r in self.rules
            ],
            "drift": [asdict(moved) for moved in self.drifts],
            "baseline": None if self.compared is None else asdict(self.compared),
            "models": self.findings(tracked_numbers),
        }
        return {key: json_ready(value) for key, value in content.items()}


def verify(findings: Findings, expected: Expectations) -> Verification:
    """Judge pairs, layers, invariants, rules and drift."""
    require_every_query(findings, "The gate")
    measurements = findings.measurements
    judged = findings
    if expected.rules or expected.baseline is not None:
        pairs, _ = find_pairs(measurements.models)
        paired = {path for pair in pairs for path in (pair.full, pair.other)}
        paired_models = measurements.models[measurements.models["model"].isin(paired)]
        judged = Findings(measurements.replace(models=paired_models))
    require_one_partner(judged)
    gates = dispersion_gate(judged) if len(judged.measurements.models) else []
    known = expected.baseline
    return Verification(
        findings=findings,
        pairs=gates,
        layers=layer_gate(judged, gates, expected.every_layer),
        invariants=findings(invariants),
        rules=apply_rules(findings, expected.rules),
        drifts=[] if known is None else drift(findings, known, expected.tolerance),
        compared=None if known is None else compared(findings, known),
    )
