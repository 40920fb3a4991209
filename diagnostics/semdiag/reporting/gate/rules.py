"""Rules like ``dispersion.p95 < 10``: parsed without evaluation, then applied to measurements."""

import math
import operator
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from semdiag.capturing.attention_kinds import DENSE, KINDS
from semdiag.measuring.findings.distributions import known_rows
from semdiag.measuring.findings.divergence import diverged
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.percentiles import PERCENTILES, percentiles
from semdiag.measuring.table import ALL
from semdiag_models import InputError
from semdiag_models.errors import unknown_name

METRICS = {"dispersion": "queries", "separation": "queries", "load": "loads"}  # and the table of each
FACTS = ("accuracy", "residual")  # one number per model, without percentiles
STATISTICS = ("mean", *(f"p{p}" for p in PERCENTILES))
_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_FILTERS = ("layer", "attention", "model", "task")
_RULE = re.compile(r"\s*([a-z]+)(?:\.([a-z]+\d*))?\s*(<=|>=|<|>)\s*(\S+)((?:\s+\S+)*)\s*")
_LONGEST = 1000  # characters: matching takes time quadratic in the length
_EXAMPLE = 'Write it like "dispersion.p95 < 10" or "separation.p5 > 1e-4 attention=topk layer=0".'


@dataclass(frozen=True)
class Rule:
    """A limit that a number of every chosen model must respect."""

    text: str  # as the user wrote it
    metric: str  # a key of :data:`METRICS`, or one of :data:`FACTS`
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


def parse_rule(text: str) -> Rule:
    """Read ``metric.percentile op number [layer=N] [attention=KIND] [model=PATTERN] [task=NAME]``."""
    if len(text) > _LONGEST:
        raise InputError(f"A rule has up to {_LONGEST:,} characters. Got {len(text):,}: {text[:60]!r} ….")
    read = _RULE.fullmatch(text)
    if read is None:
        raise InputError(f"The rule {text!r} cannot be read. {_EXAMPLE}")
    metric, statistic, comparison, number, rest = read.groups()
    if metric not in (*METRICS, *FACTS):
        raise unknown_name("metric in a rule", metric, (*METRICS, *FACTS))
    if metric in FACTS and statistic:
        raise InputError(f"The rule {text!r}: {metric} is one number per model and takes no percentile.")
    if metric in METRICS and statistic not in STATISTICS:
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
        chosen = [row for row in findings.measurements.models.to_dict("records") if _chooses(rule, row)]
        if not chosen:
            raise InputError(f"The rule {rule.text!r} chooses none of the models: nothing would be checked.")
        outcomes = [RuleResult(rule, row["model"], _value(findings, rule, row)) for row in chosen]
        concerned = [
            result
            for result, row in zip(outcomes, chosen, strict=True)
            if result.known or (_would_be_known(rule, row) and diverged(findings, row["model"]))
        ]
        results += concerned or outcomes
    return results


def _would_be_known(rule: Rule, row: dict[Any, Any]) -> bool:
    """Return whether a model would have the rule's quantity if its scores were finite."""
    return rule.metric != "accuracy" and not (rule.metric == "separation" and row["attention"] in DENSE)


def _chooses(rule: Rule, row: dict[Any, Any]) -> bool:
    return (
        rule.attention in ("", row["attention"])
        and rule.task in ("", row["task"])
        and (not rule.model or fnmatchcase(row["model"], rule.model))
    )


def _value(findings: Findings, rule: Rule, row: dict[Any, Any]) -> float:
    if rule.metric in FACTS:
        value = row[rule.metric]
        return math.nan if value is None else float(value)
    if rule.layer is not None and rule.layer >= row["blocks"]:
        raise InputError(f"The rule {rule.text!r}: {row['model']} has the layers 0 to {row['blocks'] - 1}.")
    rows = known_rows(findings, row["model"], rule.metric, ALL if rule.layer is None else rule.layer)
    return float(percentiles(rows[rule.metric])[rule.statistic])
