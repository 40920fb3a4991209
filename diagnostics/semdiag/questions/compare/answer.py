"""How far two models' attention and outputs are apart: head by head, ranked, and overall."""

from typing import Any

import numpy as np
import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.resampling import Interval, sum_ratio_interval
from semdiag.measuring.findings.strict_json import MODEL_FACTS, Summary, json_object, records
from semdiag.measuring.table import ALL

_RELATIVE = {"output_change": "change", "by_weights": "by_weights", "by_values": "by_values"}
_COLUMNS = [
    "model", "base", "layer", "head", "rank", "queries", "total_variation", "low", "high", "largest",
    "dispersion_base", "dispersion", "moved", "top_queries", "overlap", *_RELATIVE, "weights_share",
]  # fmt: skip


def change_table(findings: Findings) -> pd.DataFrame:
    """Return the changes of every head, of every layer (head ALL), and in total (both ALL)."""
    rows = []
    for (model, base), of_model in findings.measurements.compared.groupby(["model", "base"], sort=False):
        names = {"model": model, "base": base}
        rows.append(names | {"layer": ALL, "head": ALL} | _described(of_model, interval=True))
        for layer, part in of_model.groupby("layer"):
            rows.append(names | {"layer": layer, "head": ALL} | _described(part, interval=True))
        for place, part in of_model.groupby(["layer", "head"]):
            rows.append(names | dict(zip(("layer", "head"), place, strict=True)) | _described(part))
    table = pd.DataFrame(rows, columns=[name for name in _COLUMNS if name != "rank"])
    heads = table[table["head"] != ALL]
    ranks = heads.groupby("model")["total_variation"].rank(method="first", ascending=False)
    return table.assign(rank=ranks.astype("Int64"))[_COLUMNS]


def head_ranking(findings: Findings) -> pd.DataFrame:
    """Return the rows of single heads by model, the largest total variation first."""
    table = findings(change_table)
    heads = table[table["head"] != ALL]
    return heads.sort_values(["model", "rank"], kind="stable", ignore_index=True)


def answer_table(findings: Findings) -> pd.DataFrame:
    """Return the changes of the outputs, one row per model."""
    rows = []
    for (model, base), of_model in findings.measurements.compared_outputs.groupby(["model", "base"], sort=False):
        predictions, targets = int(of_model["predictions"].sum()), int(of_model["targets"].sum())
        divergence = _mean_of(of_model, "divergence", "predictions")
        rows.append(
            {
                "model": model, "base": base, "samples": len(of_model), "predictions": predictions,
                "changed": int(of_model["changed"].sum()),
                "divergence": divergence.estimate, "low": divergence.low, "high": divergence.high,
                "targets": targets,
                **{name: of_model[name].sum() / targets if targets else np.nan for name in ("loss_base", "loss")},
                "output_change": float(of_model["output_change"].mean()),
            }
        )  # fmt: skip
    columns = [
        "model", "base", "samples", "predictions", "changed", "divergence", "low", "high", "targets", "loss_base",
        "loss", "output_change",
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def _described(rows: pd.DataFrame, interval: bool = False) -> dict[str, Any]:
    sums = rows.drop(columns=["model", "base", "sample", "layer", "head", "largest"]).sum()
    queries, top = int(sums["queries"]), int(sums["top_queries"])
    means = {name: sums[name] / queries for name in ("total_variation", "dispersion_base", "dispersion", "moved")}
    low_high = _mean_of(rows, "total_variation", "queries") if interval else Interval(np.nan, np.nan, np.nan)
    output, parts = sums["output"], sums["by_weights"] + sums["by_values"]
    return {
        "queries": queries, **means, "low": low_high.low, "high": low_high.high,
        "largest": float(rows["largest"].max()), "top_queries": top,
        "overlap": sums["overlap"] / top if top else np.nan,
        **{name: np.sqrt(sums[of] / output) if output > 0 else np.nan for name, of in _RELATIVE.items()},
        "weights_share": sums["by_weights"] / parts if parts > 0 else np.nan,
    }  # fmt: skip


def _mean_of(rows: pd.DataFrame, sums: str, counts: str) -> Interval:
    """Return Σ sums / Σ counts with its interval over samples."""
    each = rows.groupby("sample")[[sums, counts]].sum().to_numpy(np.float64)
    return sum_ratio_interval(each[:, 0], each[:, 1], share=sums == "total_variation").if_varied()


def compare_summary(findings: Findings) -> Summary:
    """Return the changes from the base to the model."""
    changes, ranking, answers = findings(change_table), findings(head_ranking), findings(answer_table)
    results = []
    for row in records(findings.measurements.models):
        changed, base = changes[changes["model"] == row["model"]], changes["base"]
        if changed.empty:
            continue
        plain = changed.drop(columns=["model", "base", "rank"])
        layers = plain[(plain["head"] == ALL) & (plain["layer"] != ALL)].drop(columns="head")
        heads = ranking[ranking["model"] == row["model"]].drop(columns=["model", "base", "low", "high"])
        outputs = records(answers[answers["model"] == row["model"]].drop(columns=["model", "base"]))
        results.append(
            {key: row[key] for key in MODEL_FACTS}
            | {
                "base": base[changed.index[0]],
                "all": records(plain[plain["layer"] == ALL].drop(columns=["layer", "head"]))[0],
                "outputs": outputs[0] if outputs else None,
                "layers": records(layers),
                "heads": records(heads),
            }
        )
    return json_object(
        "compare", findings, top=findings.measurements.provenance.get("compare_top"), results=results
    )
