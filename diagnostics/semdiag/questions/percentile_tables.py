"""Percentiles of a quantity by layer and head on the terminal: of dispersion, of separation and key load."""

from collections.abc import Mapping, Sequence
from typing import Any

from semdiag.measuring.findings.estimates import SAMPLED, sampled_models, sampling_sentences
from semdiag.measuring.findings.findings import Findings, Summary, modules_by_layer
from semdiag.measuring.metrics import METRICS
from semdiag.measuring.words import layer_name, number, number_from_json, percent, plain
from semdiag.presenting.answer import Collapsible, Part, Shown, title
from semdiag.presenting.tables import NEVER, Column, NumberTable, not_shown

_PERCENTILES = ("mean", "p5", "p50", "p75", "p90", "p95", "p100")
_DROPPED = {"p75": 1, "p90": 2, "mean": 3}  # in this order, where the terminal is narrow
_SHARES = (("share_below", "≤ 0"), ("recall", "recall"), ("without_keys", "no key"))
_NOTHING_DROPPED = (
    "every query keeps every key, so no key is separated from others. Add --k 8 to ask what a top-k would drop."
)
_MOST_HEADS = 24  # of more, only the extreme ones are shown
_EXTREME = 5  # heads at each end


def percentile_tables(findings: Findings, metric: str, results: Mapping[str, Summary]) -> list[Shown]:
    """Return the tables of each model's heads; of many heads those with extreme medians, unless all are wanted."""
    shown: list[Shown] = []
    for model, result in results.items():
        name = title(findings, model)
        if metric == "separation" and _drops_nothing(result):
            shown.append(f"{name}: {_NOTHING_DROPPED}")
            continue
        for quantity in ("separation", "load") if metric == "separation" else ("dispersion",):
            heading = f"{name}: {METRICS[quantity].label} ({METRICS[quantity].unit})"
            if model in sampled_models(findings):
                heading += f", {SAMPLED}"
            shown.append(_head_tables(heading, result, quantity, findings(modules_by_layer, model)))
    return [*shown, *sampling_sentences(findings, (metric,))]


def _drops_nothing(result: Summary) -> bool:
    return not result.get("within_model") and result["all"]["separation"]["p50"] is None


def _head_tables(heading: str, result: Summary, quantity: str, modules: Sequence[str]) -> Collapsible:
    rows = _rows(result, quantity, modules)
    short = [row for row in rows if row["short"]]
    collapsed: list[Part] = [heading, _table(short)]
    if len(short) < len(rows):
        collapsed += [extremes(result, quantity, modules), not_shown(len(rows) - len(short))]
    return Collapsible(collapsed, [heading, _table(rows)])


def _table(rows: Sequence[dict[str, Any]]) -> NumberTable:
    shares = [Column(*share, percent, NEVER) for share in _SHARES if any(share[0] in row for row in rows)]
    columns = [Column("place", "layer", plain), Column("head", form=plain)]
    columns += [Column(p, form=number, drop=_DROPPED.get(p, 0)) for p in _PERCENTILES]
    return NumberTable(
        [*columns, *shares], [dict.fromkeys(column.name for column in shares) | row for row in rows]
    )


def _rows(result: Summary, quantity: str, modules: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each head and one for all; of many heads only those with extreme medians are ``short``."""
    rows = []
    for one in (result, *result.get("within_model", [])):
        heads = one["layers"]
        ends = heads
        if len(heads) > _MOST_HEADS:
            ranked = _by_median(heads, quantity)
            ends = [*ranked[:_EXTREME], *ranked[-_EXTREME:]]
        for row in [*heads, {"layer": "all", "head": "", **one["all"]}]:
            pooled = row["layer"] == "all"
            numbers = row.get(quantity, row)
            layer = "all" if pooled else layer_name(row["layer"], modules)
            suffix = "" if one is result else f" k={one['k']}"
            short = pooled or any(row is end for end in ends)
            rows.append({**row, **numbers, "place": f"{layer}{suffix}", "short": short})
            if METRICS[quantity].of_dropped:
                separated = numbers["queries"] - numbers["undefined"]
                rows[-1]["share_below"] = numbers["not_positive"] / separated if separated else None
    return rows


def _median(row: dict[str, Any], quantity: str) -> float:
    return number_from_json(row.get(quantity, row)["p50"])


def _by_median(heads: list[dict[str, Any]], quantity: str) -> list[dict[str, Any]]:
    finite = [row for row in heads if row.get(quantity, row)["p50"] is not None]
    return sorted(finite, key=lambda row: _median(row, quantity))


def extremes(result: Summary, quantity: str, modules: Sequence[str]) -> str:
    """Return a sentence on the heads with the largest and the smallest median of a quantity."""
    ranked = _by_median(result["layers"], quantity)
    if not ranked:
        return "No head has a finite median."
    if len({_median(row, quantity) for row in ranked}) == 1:
        return f"The median is {_median(ranked[0], quantity):.3g} in every head."
    least, most = (
        f"head {row['head']} of layer {layer_name(row['layer'], modules)} ({_median(row, quantity):.3g})"
        for row in (ranked[0], ranked[-1])
    )
    return f"The median is largest in {most} and smallest in {least}."
