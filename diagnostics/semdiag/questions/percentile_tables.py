"""Percentiles of a quantity by layer and head on the terminal: of dispersion, of separation and key load."""

from collections.abc import Mapping, Sequence
from typing import Any

from semdiag.measuring.findings.estimates import SAMPLED, sampled_models, sampling_sentences
from semdiag.measuring.findings.findings import Findings, Summary, modules_by_layer
from semdiag.measuring.metrics import METRICS
from semdiag.measuring.words import layer_name, number, number_from_json, percent, plain
from semdiag.presenting.answer import Folded, title
from semdiag.presenting.tables import NEVER, Column, NumberTable, not_shown

_PERCENTILES = ("mean", "p5", "p50", "p75", "p90", "p95", "p100")
_DROPPED = {"p75": 1, "p90": 2, "mean": 3}  # in this order, where the terminal is narrow
_SHARES = (("share_below", "≤ 0"), ("recall", "recall"), ("without_keys", "no key"))
_NOTHING_DROPPED = (
    "every query keeps every key, so no key is separated from others. Add --k 8 to ask what a top-k would drop."
)
_MOST_HEADS = 24  # of more, only the extreme ones are shown
_EXTREME = 5  # heads at each end


def percentile_tables(
    findings: Findings, metric: str, results: Mapping[str, Summary]
) -> list[str | NumberTable | Folded]:
    """Return the tables of each model's heads; of many heads those with extreme medians, unless all are wanted."""
    shown: list[str | NumberTable | Folded] = []
    for model, result in results.items():
        name = title(findings, model)
        if (
            metric == "separation"
            and not result.get("within_model")
            and result["all"]["separation"]["p50"] is None
        ):
            shown.append(f"{name}: {_NOTHING_DROPPED}")
            continue
        sampled = f", {SAMPLED}" if model in sampled_models(findings) else ""
        modules = findings(modules_by_layer, model)
        for quantity in ("separation", "load") if metric == "separation" else ("dispersion",):
            heading = f"{name}: {METRICS[quantity].label} ({METRICS[quantity].unit}){sampled}"
            rows = _rows(result, quantity, modules)
            short = [row for row in rows if row["short"]]
            hidden = len(rows) - len(short)
            more = [extremes(result, quantity, modules), not_shown(hidden)] if hidden else []
            shown.append(Folded([heading, _table(short), *more], [heading, _table(rows)]))
    return shown + sampling_sentences(findings, (metric,))


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
        heads, known = one["layers"], _by_median(one["layers"], quantity)
        ends = [*known[:_EXTREME], *known[-_EXTREME:]] if len(heads) > _MOST_HEADS else heads
        for row in [*heads, {"layer": "all", "head": "", **one["all"]}]:
            pooled, numbers = row["layer"] == "all", row.get(quantity, row)
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
    known = [row for row in heads if row.get(quantity, row)["p50"] is not None]
    return sorted(known, key=lambda row: _median(row, quantity))


def extremes(result: Summary, quantity: str, modules: Sequence[str]) -> str:
    """Return a sentence on the heads with the largest and the smallest median of a quantity."""
    known = _by_median(result["layers"], quantity)
    if not known:
        return "No head has a finite median."
    if len({_median(row, quantity) for row in known}) == 1:
        return f"The median is {_median(known[0], quantity):.3g} in every head."
    ends = [
        f"head {row['head']} of layer {layer_name(row['layer'], modules)} ({_median(row, quantity):.3g})"
        for row in (known[-1], known[0])
    ]
    return f"The median is largest in {ends[0]} and smallest in {ends[1]}."
