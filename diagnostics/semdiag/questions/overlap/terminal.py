"""The table of ``semdiag overlap``."""

import math

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import number_from_json
from semdiag.measuring.table import ALL
from semdiag.presenting.columns import NEVER, Column, Value, text, three_decimals
from semdiag.presenting.terminal.console import NumberTable, wide_console
from semdiag.presenting.terminal.titles import title
from semdiag.questions.overlap.answer import overlap_summary


def _layer(layer: int) -> str:
    return "all" if layer == ALL else str(layer)


def _interval(low: Value, high: Value) -> str:
    unknown = math.isnan(number_from_json(low) + number_from_json(high))
    return "no interval" if unknown else f"{three_decimals(low)}–{three_decimals(high)}"


_COLUMNS = (
    Column("what", "between", text), Column("layer", form=_layer), Column("other_layer", "and layer", _layer),
    Column("pairs", drop=1), Column("jaccard", "index", three_decimals, drop=NEVER),
    Column("low high", "95%", _interval, drop=2), Column("chance", "at random", three_decimals, drop=NEVER),
)  # fmt: skip


def print_overlap(findings: Findings) -> None:
    """Print a table per model, or why there is none."""
    console, remarks = wide_console(), findings.measurements.remarks
    for result in findings(overlap_summary)["results"]:
        if result["overlap"]:
            console.print(f"\n{title(result)}: Jaccard index of kept keys")
            console.print(NumberTable(_COLUMNS, result["overlap"]))
        else:
            reasons = remarks.loc[
                (remarks["model"] == result["model"]) & (remarks["code"] == "no-overlap"), "text"
            ]
            reason = next(iter(reasons), "no two masks to compare (a query that drops no key has none)")
            console.print(f"\n{title(result)}: {reason}")
