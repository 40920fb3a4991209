"""Drift: compare the numbers of a check with those of an earlier one."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.distributions import known_rows
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import has_schema, number_from_json
from semdiag.measuring.percentiles import percentiles
from semdiag.reporting.gate.matching import CONTENT, match
from semdiag_models import InputError
from semdiag_models.reading import read_json

TRACKED = ("p50", "p75", "p90", "p95")  # of δ, pooled; p100 is one query
TOLERANCE = 0.05


@dataclass(frozen=True)
class Compared:
    """The measured models that a baseline covers."""

    models: int  # number measured
    compared: int  # number with an entry in the baseline
    new: tuple[str, ...]  # paths of those without an entry

    @property
    def words(self) -> list[str]:
        """Return what was not compared, one statement per model."""
        return [f"{model} is not in the baseline" for model in self.new]


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
        if math.isnan(self.now):
            was = "undefined" if math.isnan(self.was) else f"{self.was:.4g}"
            return f"{self.model}: it is unclear whether {self.quantity} moved: it was {was} and is not a number"
        was = "undefined" if math.isnan(self.was) else f"{self.was:.4g}"
        return f"{self.model}: {self.quantity} was {was} and is {self.now:.4g}"


def tracked_numbers(findings: Findings) -> list[dict[str, Any]]:
    """Return the numbers with which a later check is compared."""
    measurements = findings.measurements
    rows = []
    for row in measurements.models.to_dict("records"):
        table = percentiles(known_rows(findings, row["model"], "dispersion")["dispersion"])
        numbers = {f"dispersion.{p}": float(table[p]) for p in TRACKED}
        if row["accuracy"] is not None and not math.isnan(row["accuracy"]):
            numbers["accuracy"] = float(row["accuracy"])
        facts = {
            name: None if pd.isna(row[name]) else row[name] for name in ("model", "sha256", "samples", *CONTENT)
        }
        rows.append({**facts, "numbers": numbers})
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


def compared(findings: Findings, baseline: list[dict[str, Any]]) -> Compared:
    """Count the models that :func:`drift` compares, and name those without an entry in the baseline."""
    now = findings(tracked_numbers)
    matches = match(baseline, now)
    return Compared(len(now), len(matches.pairs), tuple(model["model"] for model in matches.new))


def drift(findings: Findings, baseline: list[dict[str, Any]], tolerance: float = TOLERANCE) -> list[Drift]:
    """Return the numbers that changed by more than a relative tolerance."""
    matches = match(baseline, findings(tracked_numbers))
    moved = [Drift(entry["model"], "model", math.nan, math.nan) for entry in matches.missing]
    for entry, several in matches.unclear:
        moved.append(Drift(entry["model"], "model", math.nan, math.nan, tuple(m["model"] for m in several)))
    for entry, current in matches.pairs:
        if current["samples"] != entry["samples"]:
            raise InputError(
                f"{entry['model']} was measured on {counted(entry['samples'], 'sample')} in the baseline, but "
                f"now on {current['samples']}. Use --samples {entry['samples']}."
            )
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
