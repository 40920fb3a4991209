"""Drift: whether the numbers of a check are still those of an earlier one."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semdiag.findings.findings import Findings
from semdiag.measurement.percentiles import percentiles
from semdiag_models import InputError

SCHEMA = "semdiag.check/1"
TRACKED = ("p50", "p75", "p90", "p95")  # of δ, pooled; p100 is one query
TOLERANCE = 0.05


@dataclass(frozen=True)
class Drift:
    """One number that moved, or a model that is gone.

    Attributes:
        model: path.
        quantity: like ``dispersion.p95``; ``model`` if the model is not there any more.
        was: in the baseline.
        now: NaN if it is gone or undefined.
    """

    model: str
    quantity: str
    was: float
    now: float

    @property
    def words(self) -> str:
        """What happened, in words."""
        if self.quantity == "model":
            return f"{self.model} stands in the baseline and was not measured"
        return f"{self.model}: {self.quantity} was {self.was:.4g} and is {self.now:.4g}"


def tracked_numbers(findings: Findings) -> list[dict[str, Any]]:
    """Give the numbers that a later check can be compared with.

    Args:
        findings: of one or more models.

    Returns:
        Per model: model, sha256, samples, numbers (accuracy where known, and δ at p50, p75, p90, p95).
    """
    measurements = findings.measurements
    rows = []
    for row in measurements.models.to_dict("records"):
        table = percentiles(measurements.queries.loc[measurements.queries["model"] == row["model"], "dispersion"])
        numbers = {f"dispersion.{p}": float(table[p]) for p in TRACKED}
        if row["accuracy"] is not None and not math.isnan(row["accuracy"]):
            numbers["accuracy"] = float(row["accuracy"])
        facts = {name: row[name] for name in ("model", "sha256", "samples")}
        rows.append({**facts, "numbers": numbers})
    return rows


def read_baseline(path: Path) -> list[dict[str, Any]]:
    """Read the models of what ``semdiag check --json`` wrote.

    Args:
        path: a JSON file.

    Returns:
        As :func:`tracked_numbers`.

    Raises:
        InputError: if the file cannot be read or is something else.
    """
    make = "Make one with: semdiag check --json > baseline.json."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"The baseline {path} cannot be read as JSON ({reason}). {make}") from None
    models = content.get("models") if isinstance(content, dict) and content.get("schema") == SCHEMA else None
    if not isinstance(models, list) or not models or not all(map(_is_entry, models)):
        raise InputError(f"The baseline {path} is not the output of semdiag check --json. {make}")
    return models


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        return False
    numbers = entry.get("numbers")
    values = (*numbers.values(), entry.get("samples")) if isinstance(numbers, dict) else (None,)
    return all(isinstance(value, int | float) or value is None for value in values[:-1]) and isinstance(
        values[-1], int
    )


def drift(findings: Findings, baseline: list[dict[str, Any]], tolerance: float = TOLERANCE) -> list[Drift]:
    """Numbers that moved by more than a share of what they were.

    Models are matched by their path as named on the command line; models that the baseline does not know are not
    judged.

    Args:
        findings: of now.
        baseline: from :func:`read_baseline`.
        tolerance: largest allowed |now − was| / |was|.

    Returns:
        What moved by more, and models that are gone.

    Raises:
        InputError: if a model was measured on another number of samples.
    """
    now = {entry["model"]: entry for entry in findings(tracked_numbers)}
    moved = []
    for entry in baseline:
        current = now.get(entry["model"])
        if current is None:
            moved.append(Drift(entry["model"], "model", math.nan, math.nan))
            continue
        if current["samples"] != entry["samples"]:
            raise InputError(
                f"{entry['model']} was measured on {entry['samples']} samples in the baseline, and now on "
                f"{current['samples']}. Use --samples {entry['samples']}."
            )
        for quantity, was in entry["numbers"].items():
            value = current["numbers"].get(quantity, math.nan)
            before = math.nan if was is None else float(was)
            if not _same(before, value, tolerance):
                moved.append(Drift(entry["model"], quantity, before, value))
    return moved


def _same(was: float, now: float, tolerance: float) -> bool:
    if math.isnan(was) or math.isnan(now):
        return math.isnan(was) and math.isnan(now)
    return abs(now - was) <= tolerance * abs(was)
