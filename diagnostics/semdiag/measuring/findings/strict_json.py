"""Write and read what a command prints with ``--json``: strict JSON under a schema."""

import math
from typing import Any

import pandas as pd

from semdiag.measuring.findings.findings import Findings

Summary = dict[str, Any]
MODEL_FACTS = ("model", "sha256", "task", "attention", "k", "epoch")  # of every entry of results


def json_ready(value: Any) -> Any:
    """Replace what JSON cannot represent, at any depth: NaN by None, infinities by the strings "inf" and "-inf"."""
    if isinstance(value, dict):
        return {str(key): json_ready(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(float(value))
    return None if value is pd.NA else value


def number_from_json(value: float | str | None) -> float:
    """Return the number that :func:`json_ready` wrote; NaN for null."""
    if value is None:
        return math.nan
    if isinstance(value, str) and value not in ("inf", "-inf"):
        raise ValueError(f"Expected a number, null, 'inf' or '-inf'. Got {value!r}.")
    return float(value)


def schema(command: str) -> str:
    """Return name and version of a command's schema."""
    return f"semdiag.{command}/2"


def has_schema(content: Any, command: str) -> bool:
    """Return whether content was written by a command, in this version or the one before."""
    return isinstance(content, dict) and content.get("schema") in (schema(command), f"semdiag.{command}/1")


def json_object(command: str, findings: Findings, **content: Any) -> Summary:
    """Return the object that a command prints."""
    whole = {"schema": schema(command), "provenance": findings.measurements.provenance, **content}
    return Summary(json_ready(whole))


def records(table: pd.DataFrame) -> list[Summary]:
    """Return the rows of a table as dictionaries."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
