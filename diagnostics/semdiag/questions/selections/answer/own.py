"""The answer on a model's own selections: their margins, and what they choose."""

from collections import Counter
from typing import Any

import torch

from semdiag.mathematics.selections.top_k_check import CLASSES, FAULTS
from semdiag.measuring.findings.strict_json import Summary, json_ready, schema
from semdiag.measuring.percentiles import percentiles
from semdiag.questions.selections.measure.own import OwnSelection, OwnSelections


def own_summary(measured: OwnSelections, model: str, format: str, provenance: dict[str, Any]) -> Summary:
    """Return what ``--json`` prints of a model's own selections."""
    rows = [_row(entry) for entry in measured.selections]
    faults = sum(row["faults"] for row in rows)
    entry = {
        "model": model,
        "format": format,
        "selections": rows,
        "rows": sum(row["rows"] for row in rows),
        "faults": faults,
        "passed": not faults,
        "others": [
            {"module": module, "shape": list(shape), "times": times}
            for (module, shape), times in measured.others.items()
        ],
    }
    return Summary(json_ready({"schema": schema("selections"), "provenance": provenance, "results": [entry]}))


def _row(entry: OwnSelection) -> dict[str, Any]:
    """Return one selection in plain numbers."""
    parts = entry.parts
    first, margin = parts[0], torch.cat([part.margin for part in parts])
    deciding = margin < torch.inf
    certified = int((torch.cat([part.certified for part in parts]) & deciding).sum())
    spread, number = percentiles(margin[deciding].numpy()), int(deciding.sum())
    counts = sum((part.counts for part in parts), Counter[str]())
    keys, later = first.kind == "keys", first.kind == "keys" and first.causal
    return {
        "module": entry.module,
        "layer": entry.layer,
        "kind": first.kind,
        "choices": max(part.choices for part in parts),
        "k": max(part.k for part in parts),
        "groups": None if first.groups is None else {"of": first.groups[0], "chosen": first.groups[1]},
        "margin_of": "logits" if first.logits else "scores",
        "rows": len(margin),
        "padded": sum(part.padded for part in parts),
        "padding_known": not any(part.unmatched for part in parts),
        "deciding": number,
        "inactive": not number,
        "margin_median": spread["p50"],
        "margin_p5": spread["p5"],
        "ties": int((margin == 0).sum()),
        "certified": certified,
        "certified_share": certified / number if number else None,
        "counts": {name: counts[name] for name in CLASSES},
        "faults": sum(counts[name] for name in FAULTS),
        "future": counts["future"] if later else None,
        "padding": counts["padding"] if keys else None,
        "first_kept_share": sum(part.first_kept for part in parts) / number if keys and number else None,
        "load": _load(entry, len(margin)),
    }


def _load(entry: OwnSelection, rows: int) -> dict[str, Any] | None:
    """Return the share of the tokens that chooses each expert; None if unknown."""
    loads = [part.load for part in entry.parts if part.load is not None]
    if len(loads) < len(entry.parts) or not rows:
        return None
    shares = (torch.stack(loads).sum(0).double() / rows).tolist()
    return {
        "largest": max(shares),
        "smallest": min(shares),
        "even": entry.parts[0].k / len(shares),
        "unused": shares.count(0.0),
        "shares": shares,
    }
