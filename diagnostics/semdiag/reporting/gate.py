"""The gate of ``semdiag check``: rules, drift from a baseline, invariants."""

import math
import operator
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd

from semdiag.capturing.attention_call import DENSE, KINDS
from semdiag.measuring.findings.estimates import known_rows, layer_percentiles, pooled_percentiles
from semdiag.measuring.findings.findings import (
    RUN_AND_SNAPSHOT,
    Completeness,
    Findings,
    completeness,
    diverged,
    find_pairs,
    has_schema,
    json_ready,
    records,
    schema,
)
from semdiag.measuring.metrics import METRICS
from semdiag.measuring.percentiles import PERCENTILES, percentiles
from semdiag.measuring.table import ALL
from semdiag.measuring.words import counted, number_from_json
from semdiag.questions.dispersion.answer import GATED, GateResult, dispersion_gate, gate_results
from semdiag.questions.mask_stability.measure import MASKS
from semdiag_files import InputError, read_json, unknown_name

FACTS = ("accuracy", "residual")  # one number per model, without percentiles
STATISTICS = ("mean", *(f"p{p}" for p in PERCENTILES))
_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_FILTERS = ("layer", "attention", "model", "task")
_RULE = re.compile(r"\s*([a-z_]+)(?:\.([a-z]+\d*))?\s*(<=|>=|<|>)\s*(\S+)((?:\s+\S+)*)\s*")
_LONGEST = 1000  # characters: matching takes time quadratic in the length
_EXAMPLE = 'Write it like "dispersion.p95 < 10" or "separation.p5 > 1e-4 attention=topk layer=0".'


@dataclass(frozen=True)
class Rule:
    """A limit that a number of every chosen model must respect."""

    text: str  # as the user wrote it
    metric: str  # one of :func:`gated_metrics`, or one of :data:`FACTS`
    statistic: str  # one of :data:`STATISTICS`; empty for a fact
    comparison: str  # a key of the known comparisons
    limit: float  # the number
    layer: int | None = None  # only this layer; None pools all
    attention: str = ""  # only models with this kind; empty for all
    model: str = ""  # only models whose path matches this pattern (``*``, ``?``); empty for all
    task: str = ""  # only models of this task; empty for all


@dataclass(frozen=True)
class RuleResult:
    """The result of a rule on one model: its value, and whether it passed (an unknown value fails)."""

    rule: Rule
    model: str
    value: float

    @property
    def passed(self) -> bool:
        """Return whether the value is known and on the right side of the limit."""
        compare = _OPERATORS[self.rule.comparison]
        return self.known and bool(compare(self.value, self.rule.limit))

    @property
    def known(self) -> bool:
        """Return whether the value is known."""
        return not math.isnan(self.value)

    @property
    def fault(self) -> str:
        """Return why the rule does not pass; empty if it does."""
        if self.passed:
            return ""
        name = ".".join(filter(None, (self.rule.metric, self.rule.statistic)))
        outcome = f"fails, {self.value:.4g}" if self.known else f"cannot be judged: {name} is not a number"
        return f"{self.rule.text} {outcome}"


def gated_metrics() -> list[str]:
    """Return the metrics whose percentiles a rule may limit."""
    return [metric.name for metric in METRICS.values() if metric.gated]


def parse_rule(text: str) -> Rule:
    """Read ``metric.percentile op number [layer=N] [attention=KIND] [model=PATTERN] [task=NAME]``."""
    if len(text) > _LONGEST:
        raise InputError(f"A rule has up to {_LONGEST:,} characters. Got {len(text):,}: {text[:60]!r} ….")
    read = _RULE.fullmatch(text)
    if read is None:
        raise InputError(f"The rule {text!r} cannot be read. {_EXAMPLE}")
    metric, statistic, comparison, number, rest = read.groups()
    if metric not in (*gated_metrics(), *FACTS):
        raise unknown_name("metric in a rule", metric, (*gated_metrics(), *FACTS))
    if metric in FACTS and statistic:
        raise InputError(f"The rule {text!r}: {metric} is one number per model and takes no percentile.")
    if metric not in FACTS and statistic not in STATISTICS:
        raise InputError(f"The rule {text!r} needs a statistic after {metric}: one of {', '.join(STATISTICS)}.")
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise InputError(f"The rule {text!r} compares with {number!r}, which is not a number. {_EXAMPLE}")
    filters = _filters(text, rest.split())
    if metric in FACTS and "layer" in filters:
        raise InputError(f"The rule {text!r}: {metric} belongs to the whole model and not to a layer.")
    return Rule(text, metric, statistic or "", comparison, limit, **filters)


def _filters(text: str, words: list[str]) -> dict[str, Any]:
    filters: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not value:
            raise InputError(f"The rule {text!r}: {word!r} is not a filter. {_EXAMPLE}")
        if name not in _FILTERS:
            raise unknown_name("filter in a rule", name, _FILTERS)
        if name in filters:
            raise InputError(f"The rule {text!r} names {name} twice.")
        filters[name] = value
    if "layer" in filters:
        if not re.fullmatch(r"\d{1,6}", filters["layer"]):
            raise InputError(f"The rule {text!r}: layers are counted 0, 1, 2 … Got layer={filters['layer']}.")
        filters["layer"] = int(filters["layer"])
    if "attention" in filters and filters["attention"] not in KINDS:
        raise unknown_name("attention in a rule", filters["attention"], KINDS)
    return filters


def apply_rules(findings: Findings, rules: list[Rule]) -> list[RuleResult]:
    """Apply every rule to every model that it chooses."""
    results = []
    for rule in rules:
        chosen = [
            row
            for row in findings.measurements.models.to_dict("records")
            if rule.attention in ("", row["attention"])
            and rule.task in ("", row["task"])
            and (not rule.model or fnmatchcase(row["model"], rule.model))
        ]
        if not chosen:
            raise InputError(f"The rule {rule.text!r} chooses none of the models: nothing would be checked.")
        outcomes = [RuleResult(rule, row["model"], _value(findings, rule, row)) for row in chosen]
        pairs = zip(outcomes, chosen, strict=True)
        concerned = [result for result, row in pairs if result.known or _should_be_known(findings, rule, row)]
        results += concerned or outcomes
    return results


def _should_be_known(findings: Findings, rule: Rule, row: dict[Any, Any]) -> bool:
    """Return whether a model would have the number if its scores were finite."""
    if rule.metric == "accuracy":
        return False
    metric = METRICS.get(rule.metric)
    if metric is not None and metric.of_dropped and row["attention"] in DENSE:  # drops nothing
        return False
    return diverged(findings, row["model"])


def _value(findings: Findings, rule: Rule, row: dict[Any, Any]) -> float:
    if rule.metric in FACTS:
        value = row[rule.metric]
        return math.nan if value is None else float(value)
    if rule.layer is not None and rule.layer >= row["blocks"]:
        raise InputError(f"The rule {rule.text!r}: {row['model']} has the layers 0 to {row['blocks'] - 1}.")
    rows = known_rows(findings, row["model"], rule.metric, ALL if rule.layer is None else rule.layer)
    return float(percentiles(rows[rule.metric])[rule.statistic])


Entry = dict[str, Any]
CONTENT = ("weights_sha256", *RUN_AND_SNAPSHOT, "attention", "k", "global_tokens")
# Facts that must agree, the surest first: models may share weights, like full and top-k ones before training.
_IDENTITIES = (
    CONTENT,
    tuple(name for name in CONTENT if name != "snapshot"),  # a file under another name
    tuple(name for name in CONTENT if name != "weights_sha256"),  # trained again
    ("task", "attention", "k", "seed", "snapshot"),
)
_PLACE = ("model", "task", "attention", "k")


def _matched(baseline: list[Entry], now: list[Entry]) -> dict[int, int]:
    """Return which model each entry is, by position, if that is unambiguous."""
    matched: dict[int, int] = {}
    identities = [facts for identity in _IDENTITIES for facts in ((*identity, "model"), identity)]
    for names in (*identities, _PLACE):
        free = [m for m in range(len(now)) if m not in matched.values()]
        agreeing = {
            e: [m for m in free if _agree(baseline[e], now[m], names)]
            for e in range(len(baseline))
            if e not in matched
        }
        claims = [m for candidates in agreeing.values() for m in candidates]
        matched |= {e: m[0] for e, m in agreeing.items() if len(m) == 1 and claims.count(m[0]) == 1}
    return matched


def _agree(entry: Entry, model: Entry, names: tuple[str, ...]) -> bool:
    """Return whether both have the first fact, and agree in all facts of the entry."""
    return bool(entry.get(names[0])) and all(entry.get(name, model[name]) == model[name] for name in names)


TRACKED = ("p50", "p75", "p90", "p95")  # of δ, pooled; p100 is one query
TOLERANCE = 0.05


@dataclass(frozen=True)
class Compared:
    """The measured models that a baseline covers."""

    models: int  # number measured
    compared: int  # number with an entry in the baseline
    new: tuple[str, ...]  # paths of those without an entry


@dataclass(frozen=True)
class Drift:
    """A number that changed, or a model that is missing or ambiguous."""

    model: str  # path
    quantity: str  # like ``dispersion.p95``; ``model`` if the model is missing or ambiguous
    was: float  # value in the baseline
    now: float  # current value; NaN if missing or undefined
    among: tuple[str, ...] = ()  # paths of current models that may be this one

    @property
    def words(self) -> str:
        """Return what happened, in words."""
        if self.among:
            return (
                f"it is unclear whether {self.model} of the baseline is {' or '.join(self.among)}: the baseline "
                "does not tell these models apart"
            )
        if self.quantity == "model":
            return f"{self.model} is in the baseline and was not measured"
        was = "undefined" if math.isnan(self.was) else f"{self.was:.4g}"
        if math.isnan(self.now):
            return f"{self.model}: it is unclear whether {self.quantity} moved: it was {was} and is not a number"
        return f"{self.model}: {self.quantity} was {was} and is {self.now:.4g}"


def tracked_numbers(findings: Findings) -> list[dict[str, Any]]:
    """Return the numbers with which a later check is compared."""
    measurements = findings.measurements
    rows = []
    for row in measurements.models.to_dict("records"):
        table = findings(pooled_percentiles, "dispersion")[row["model"]]
        numbers = {f"dispersion.{p}": float(table[p]) for p in TRACKED}
        if row["accuracy"] is not None and not math.isnan(row["accuracy"]):
            numbers["accuracy"] = float(row["accuracy"])
        names = ("model", "sha256", "samples", *CONTENT)
        rows.append({name: None if pd.isna(row[name]) else row[name] for name in names} | {"numbers": numbers})
    return rows


def read_baseline(path: Path) -> list[dict[str, Any]]:
    """Read the models from the output of ``semdiag check --json``."""
    make = "Make one with: semdiag check --json > baseline.json."
    try:
        content = read_json(path)
    except InputError as error:
        raise InputError(f"The baseline {error} {make}") from None
    models = content.get("models") if has_schema(content, "check") else None
    if not isinstance(models, list) or not models or not all(map(_is_entry, models)):
        raise InputError(f"The baseline {path} is not the output of semdiag check --json. {make}")
    return models


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        return False
    numbers = entry.get("numbers")
    if not isinstance(numbers, dict) or not isinstance(entry.get("samples"), int):
        return False
    return all(isinstance(value, int | float) or value in (None, "inf", "-inf") for value in numbers.values())


def drift(findings: Findings, baseline: list[Entry], tolerance: float = TOLERANCE) -> tuple[list[Drift], Compared]:
    """Return the numbers that changed by more than a relative tolerance, and the models that were compared."""
    now = findings(tracked_numbers)
    matches = _matched(baseline, now)
    unmatched = [model for m, model in enumerate(now) if m not in matches.values()]
    missing = [_missing(entry, unmatched) for e, entry in enumerate(baseline) if e not in matches]
    missing.sort(key=lambda missing_model: bool(missing_model.among))
    candidates = {path for missing_model in missing for path in missing_model.among}
    new = tuple(model["model"] for model in unmatched if model["model"] not in candidates)
    moved = [change for e, m in sorted(matches.items()) for change in _moved(baseline[e], now[m], tolerance)]
    return [*missing, *moved], Compared(len(now), len(matches), new)


def _missing(entry: Entry, unmatched: list[Entry]) -> Drift:
    """Return that a model of the baseline is missing, or which ones it may be."""
    among = (m["model"] for m in unmatched if any(_agree(entry, m, names) for names in _IDENTITIES))
    return Drift(entry["model"], "model", math.nan, math.nan, tuple(among))


def _moved(entry: Entry, current: Entry, tolerance: float) -> list[Drift]:
    """Return the numbers of a model that changed by more than a relative tolerance."""
    if current["samples"] != entry["samples"]:
        raise InputError(
            f"{entry['model']} was measured on {counted(entry['samples'], 'sample')} in the baseline, but "
            f"now on {current['samples']}. Use --samples {entry['samples']}."
        )
    moved = []
    for quantity, was in entry["numbers"].items():
        value = current["numbers"].get(quantity, math.nan)
        before = number_from_json(was)
        if not _same(before, value, tolerance):
            moved.append(Drift(entry["model"], quantity, before, value))
    return moved


def _same(was: float, now: float, tolerance: float) -> bool:
    if math.isnan(was) or math.isnan(now):  # unknown whether it changed
        return False
    return now == was or abs(now - was) <= tolerance * abs(was) < math.inf


def layer_gate(findings: Findings, results: list[GateResult], every: bool = False) -> list[GateResult]:
    """Compare the median dispersion of paired models in each layer: in all it must hold, or in more than half."""
    gates = []
    tables = findings(layer_percentiles, "dispersion")
    for pair in (result.pair for result in results):
        sides = (tables[model].set_index("layer")["p50"].to_dict() for model in (pair.full, pair.counterpart))
        full, topk = ({int(str(layer)): median for layer, median in side.items()} for side in sides)
        gates.append(GateResult(pair, full, topk, (*full,), 0 if every else (len(full) - 1) // 2))
    return gates


@dataclass(frozen=True)
class Invariant:
    """A statement about the measurements, and whether it holds."""

    name: str  # ``residual``, ``captured``, ``finite`` or ``certified``
    passed: bool  # whether it holds for every model
    words: str  # the statement with its numbers


def invariants(findings: Findings) -> list[Invariant]:
    """Check the residual of every capture, its completeness, the scores, and certified masks under noise."""
    measurements = findings.measurements
    models = measurements.models
    answers = {completeness(row): row for row in records(models)}
    layers = int(models["attention_found"].sum())
    captured = int(models["attention_captured"].sum())
    bad = int(measurements.non_finite["scores"].sum())
    # The deviation is rounding and differs between processors: its digits are meaningless while it is allowed.
    deviation = "is what the model computed, within rounding"
    exact = not answers.keys() & {Completeness.MISSING, Completeness.UNKNOWN}
    if (worst := answers.get(Completeness.UNKNOWN)) is not None:
        deviation = "deviates by a value that is not a number"
    elif (worst := answers.get(Completeness.MISSING)) is not None:
        times = f"{worst['residual_over_rounding']:.2g} times what rounding can do"
        deviation = f"deviates by {worst['residual']:.1e}, {times}: something is missing"
    elif (worst := answers.get(Completeness.BLIND)) is not None:
        deviation = "is within rounding, which is so coarse at this precision that it tells nothing"
    checked = [
        Invariant("residual", exact, f"attention recomputed from the capture {deviation}"),
        Invariant(
            "captured",
            bool((models["attention_found"] == models["attention_captured"]).all()),
            f"attention layers found {layers}, captured {captured}",
        ),
        Invariant("finite", bad == 0, f"scores that are NaN or infinite: {bad:,}"),
    ]
    masks = measurements[MASKS]
    if len(masks):
        rows = round(float((masks["certified"].astype(float) * masks["draws"]).sum()))
        changed = int(masks["certified_changed"].sum())
        words = f"certified masks that changed under noise: {changed:,} of {rows:,}"
        checked.append(Invariant("certified", changed == 0, words))
    return checked


PROBED = 50  # samples on which masks are tested under noise


@dataclass(frozen=True, eq=False)
class Verification:
    """The judgements and what they are about."""

    findings: Findings  # answers about the models
    pairs: list[GateResult]  # pooled percentiles of each pair
    layers: list[GateResult]  # medians by layer of the same pairs
    invariants: list[Invariant]  # checks of capture and certificates
    rules: list[RuleResult]  # results by rule and model
    drifts: list[Drift]  # numbers that differ from the baseline
    compared: Compared | None  # models that the baseline covers; None without a baseline

    def cases(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield group, name, subject and failure (empty: it passes) of everything judged."""
        for group, gates in (("pair", self.pairs), ("layers", self.layers)):
            for gate in gates:
                yield group, gate.pair.label, f"{gate.pair.label}: ", "" if gate.passed else gate.fault
        for invariant in self.invariants:
            failure = "" if invariant.passed else invariant.words
            yield "invariant", invariant.name, f"{invariant.name}: ", failure
        for rule in self.rules:
            yield "rule", f"{rule.rule.text}: {rule.model}", f"{rule.model}: ", rule.fault
        if self.compared and not self.drifts:
            yield "baseline", "nothing has drifted", "", ""
        for change in self.drifts:
            yield "baseline", f"{change.model}: {change.quantity}", "", change.words

    @property
    def failures(self) -> list[str]:
        """Return all failures, one statement each."""
        return [subject + failure for _, _, subject, failure in self.cases() if failure]

    def summary(self) -> dict[str, Any]:
        """Return the verdicts as plain values, schema ``semdiag.check/2``."""
        results = [
            {
                "full": pair.pair.full,
                "topk": pair.pair.counterpart,
                "delta_s": pair.full,
                "delta_h": pair.topk,
                "passed": pair.passed,
                "unknown": pair.unknown,
                "layers": {
                    "delta_s": [*gate.full.values()], "delta_h": [*gate.topk.values()], "failing": gate.failed,
                    "unknown": gate.unknown, "passed": gate.passed,
                },
            }
            for pair, gate in zip(self.pairs, self.layers, strict=True)
        ]  # fmt: skip
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
            "drift": [asdict(change) for change in self.drifts],
            "baseline": None if self.compared is None else asdict(self.compared),
            "models": self.findings(tracked_numbers),
        }
        return {key: json_ready(value) for key, value in content.items()}


def verify(
    findings: Findings,
    rules: list[Rule],
    baseline: list[Entry] | None = None,
    tolerance: float = TOLERANCE,
    every_layer: bool = False,
) -> Verification:
    """Judge pairs, layers, invariants, rules, and drift from the numbers of an earlier check, if there are any."""
    if rules or baseline is not None:  # then a model needs no partner
        gates = gate_results(findings, find_pairs(findings.measurements.models)[0])
    else:
        gates = dispersion_gate(findings)
    drifts, compared = ([], None) if baseline is None else drift(findings, baseline, tolerance)
    return Verification(
        findings=findings, pairs=gates, layers=layer_gate(findings, gates, every_layer),
        invariants=findings(invariants), rules=apply_rules(findings, rules), drifts=drifts, compared=compared,
    )  # fmt: skip


_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(result: Verification) -> str:
    """Return a test case for each pair, layer gate, invariant, rule and model, and changed number."""
    cases = list(result.cases())
    new = result.compared.new if result.compared else ()
    counts = {"tests": str(len(cases) + len(new)), "failures": str(len(result.failures)), "skipped": str(len(new))}
    suite = ElementTree.Element("testsuite", {"name": "semdiag check", **counts})
    for group, name, _, failure in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=f"semdiag.{group}", name=_clean(name))
        if failure:
            ElementTree.SubElement(case, "failure", message=_clean(failure))
    for model in new:
        case = ElementTree.SubElement(suite, "testcase", classname="semdiag.baseline", name=_clean(model))
        ElementTree.SubElement(case, "skipped", message="not in the baseline")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return _NOT_IN_XML.sub("?", text)
