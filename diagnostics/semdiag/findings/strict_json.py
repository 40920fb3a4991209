"""What a command prints with ``--json``: values that strict JSON can hold, under a schema."""

import math
from typing import Any

import pandas as pd

from semdiag.findings.findings import Findings

Summary = dict[str, Any]
MODEL_FACTS = ("model", "sha256", "task", "attention", "k", "epoch")  # of every entry of results


def json_ready(value: Any) -> Any:
    """Replace what JSON has no number for — NaN and infinities — by None, at any depth."""
    if isinstance(value, dict):
        return {str(key): json_ready(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return None if value is pd.NA else value


def json_object(command: str, findings: Findings, **content: Any) -> Summary:
    """The one object that a command prints.

    Args:
        command: its name, part of the schema.
        findings: whose provenance it carries.
        content: what it says besides.
    """
    schema = f"semdiag.{command}/1"
    return Summary(json_ready({"schema": schema, "provenance": findings.measurements.provenance, **content}))
