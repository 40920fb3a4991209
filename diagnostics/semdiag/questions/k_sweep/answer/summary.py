"""Summary of a k-sweep: its verdict, and the paper's conditions for every k."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import torch

from semdiag.mathematics.bounds.corollary import paper_input_condition, paper_weight_condition
from semdiag.measuring.findings.estimates import drawing, drawn
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import MODEL_FACTS, Summary, json_object, records
from semdiag.measuring.table import ALL
from semdiag.questions.bounds.answer.corollary import JUDGED_PERCENTILES, PAPER_PERCENTILES, separation_rounding
from semdiag.questions.k_sweep.answer.quarters import quarter_table, smallest_enough
from semdiag.questions.k_sweep.answer.rerun import change_table
from semdiag.questions.k_sweep.answer.sparse_verdict import sparse_verdict

SCOPE = (
    "Within one model: its own scores, if each query kept only its k largest. A model trained with that k has "
    "other scores, so this does not compare trained models."
)


def condition_table(findings: Findings) -> pd.DataFrame:
    """Return both conditions of Corollary 1 within each model, for every k, at matching percentiles."""
    rows = []
    for model, own in findings.measurements.sweep.groupby("model", sort=False):
        pooled = {(str(row["quantity"]), row["k"]): row for row in records(own[own["layer"] == ALL])}
        if ("dispersion", 0) not in pooled or model in drawn(findings):
            continue
        full = _cuts(pooled["dispersion", 0])
        rounding = separation_rounding(findings.measurements, str(model), float(full[-1]))
        for k in sorted(own.loc[own["quantity"] == "separation", "k"].unique()):
            delta, load = _cuts(pooled["dispersion", k]), _cuts(pooled["load", k]) / int(k)
            gap = _cuts(pooled["separation", k], mirrored=True)
            gap = torch.where(gap.isnan(), torch.inf, gap.where(gap.abs() > rounding, 0.0))
            sides = {
                "W": paper_weight_condition(full, delta, gap),
                "X": paper_input_condition(full, delta, gap, load),
            }
            for parameter, condition in sides.items():
                for at, percentile in enumerate(PAPER_PERCENTILES):
                    left = float(condition.left_side[at])
                    row = {"model": model, "k": int(k), "percentile": percentile, "parameter": parameter}
                    rows.append({**row, "left_side": left, "met": bool(condition.met[at])})
    table = pd.DataFrame(rows, columns=["model", "k", "percentile", "parameter", "left_side", "met"])
    return table.astype({"k": "int64", "percentile": "int64", "left_side": "float64", "met": "bool"})  # if empty


def _cuts(row: Mapping[Any, Any], mirrored: bool = False) -> torch.Tensor:
    names = [f"p{100 - p if mirrored else p}" for p in PAPER_PERCENTILES]
    return torch.tensor([row[name] for name in names], dtype=torch.float64)


def conditions_met(findings: Findings, model: str) -> dict[int, int]:
    """In how many of 6 cases (W and X at p75, p90 and p95) each k meets the paper's conditions."""
    counts = _judged(findings, model).groupby("k")["met"].sum()
    return {int(str(k)): int(count) for k, count in counts.items()}


def conditions_defined(findings: Findings, model: str) -> bool:
    """Return whether any of these cases has a finite left side, at any k."""
    return bool(np.isfinite(_judged(findings, model)["left_side"].astype(float)).any())


def _judged(findings: Findings, model: str) -> pd.DataFrame:
    table = findings(condition_table)
    return table[(table["model"] == model) & table["percentile"].isin(JUDGED_PERCENTILES)]


def k_sweep_summary(findings: Findings) -> Summary:
    """Return the results and the verdict of a sweep for every model."""
    measurements = findings.measurements
    conditions, again, quarters = (findings(table) for table in (condition_table, change_table, quarter_table))
    results = []
    for row in measurements.models.to_dict("records"):
        own = measurements.sweep[measurements.sweep["model"] == row["model"]]
        result = {key: row[key] for key in MODEL_FACTS} | {"unit": "nats"}
        result["verdict"] = asdict(findings(sparse_verdict, row["model"]))
        result["rerun"] = again[again["model"] == row["model"]].drop(columns="model").to_dict("records")
        own_quarters = quarters[quarters["model"] == row["model"]].drop(columns="model")
        result["quarters"] = own_quarters.to_dict("records")
        result["lengths"] = findings(smallest_enough, row["model"]).to_dict("records")
        result["conditions"] = (
            conditions[conditions["model"] == row["model"]].drop(columns="model").to_dict("records")
        )
        result["sweep"] = own.drop(columns="model").to_dict("records")
        if row["model"] in drawn(findings):
            estimates = measurements.sweep_estimates
            own = estimates[estimates["model"] == row["model"]].drop(columns="model")
            result["sampled"] = {**drawing(findings, row["model"]), "estimates": own.to_dict("records")}
        results.append(result)
    return json_object("k-sweep", findings, scope=SCOPE, results=results)
