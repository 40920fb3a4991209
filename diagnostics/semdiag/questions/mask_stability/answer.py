"""Masks under noise in numbers: by noise level, layer and head, and why a model has none."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import scipy

from semdiag.capturing.attention_call import DENSE
from semdiag.measuring.findings.estimates import all_by_name, without
from semdiag.measuring.findings.findings import MODEL_FACTS, Findings, Summary, json_object, records
from semdiag.measuring.findings.resampling import mean_interval, rank_correlation_interval
from semdiag.measuring.table import ALL
from semdiag.questions.mask_precision.answer import precision_of
from semdiag.questions.mask_stability.mask_rows import SELECTIONS

RESAMPLES = 200
_BINS = 10  # of equal counts; one more holds what lies above them
_MEANS = ("agreement", "exact", "certified", "predicted", "response")
SUPPOSED = "the model selects no keys: this is the mask that top-{k} would choose from its scores"
NOT_APPLICABLE = "not applicable: the mask of {attention} attention does not depend on the input"


def mask_summary(findings: Findings) -> Summary:
    """Return agreement, certificate and prediction by noise level, head and pooled; and by number format."""
    results = []
    table = findings(mask_table)
    effects = findings(effect_table)
    for row in findings.measurements.models.to_dict("records"):
        of_model = table[table["model"] == row["model"]]
        result = {key: row[key] for key in MODEL_FACTS} | {"mask": mask_words(findings, row["model"])}
        changed = int(of_model.loc[of_model["layer"] == ALL, "certified_changed"].sum())
        precision = precision_of(findings, row["model"])
        result |= {
            "applicable": bool(precision) or not of_model.empty,
            "refused": refusals(findings, row["model"]),
        }
        result["certified_changed"] = changed
        result["certified_rows"] = int(of_model.loc[of_model["layer"] == ALL, "certified_rows"].sum())
        levels = []
        for level, rows in of_model.groupby("level"):
            entries = all_by_name(rows).drop(columns=["model", "level"]).to_dict("records")
            after = records(effects[(effects["model"] == row["model"]) & (effects["level"] == level)])
            output = without(after[0], "model", "level") if after else {}
            levels.append({"noise": level, "layers": entries[:-1], "all": entries[-1], "output": output})
        results.append(result | {"levels": levels, "precision": precision})
    return json_object("mask-stability", findings, results=results)


def mask_words(findings: Findings, model: str) -> str:
    """Return which mask of a model was judged, or why none was."""
    measurements = findings.measurements
    row = next(row for row in measurements.models.to_dict("records") if row["model"] == model)
    kind = str(row["attention"])
    if SELECTIONS.get(kind) is None:
        return NOT_APPLICABLE.format(attention=kind)
    kept_keys = pd.concat(
        [t.loc[t["model"] == model, "kept"] for t in (measurements.masks, measurements.rounded_masks)]
    )
    if kept_keys.empty:
        return next(iter(refusals(findings, model)), "no query drops a key: no mask can change")
    if not SELECTIONS[kind].ranked:  # type: ignore[union-attr]  # of a fixed mask it was None
        kept = (
            f"{kept_keys.min()} to {kept_keys.max()} keys"
            if kept_keys.min() < kept_keys.max()
            else f"k = {kept_keys.iloc[0]}"
        )
        return f"the model's own mask, {kept}; no certificate is known for {kind} attention"
    return (
        SUPPOSED.format(k=kept_keys.iloc[0]) if kind in DENSE else f"the model's own mask, k = {kept_keys.iloc[0]}"
    )


def refusals(findings: Findings, model: str) -> list[str]:
    """Return why a model's masks were not tested under noise or number formats although requested."""
    remarks = findings.measurements.remarks
    codes = remarks["code"].isin(["no-mask-stability", "no-mask-precision"])
    return [str(text) for text in remarks["text"][(remarks["model"] == model) & codes]]


def mask_table(findings: Findings) -> pd.DataFrame:
    """Return the stability of masks by model, noise level, layer and head, and pooled."""
    rows = []
    for (model, level), of_level in findings.measurements.masks.groupby(["model", "level"], sort=False):
        for layer, head, part in _places(of_level):
            rows.append({"model": model, "level": level, "layer": layer, "head": head, **_described(part)})
    columns = ["model", "level", "layer", "head", "certified_rows", "certified_changed"]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)


def reliability_tables(findings: Findings) -> dict[tuple[str, float], pd.DataFrame]:
    """Return mean prediction and observed share in bins of Δ/sd: does Δ tell which masks change?"""
    masks = findings.measurements.masks
    highest = findings(foreseen_margin)
    groups = masks[masks["predicted"].notna()].groupby(["model", "level"], sort=True)
    return {(str(model), float(str(level))): _binned(rows, highest) for (model, level), rows in groups}


def foreseen_margin(findings: Findings) -> float:
    """Return the Δ/sd above which Φ(Δ/sd) foresees less than one changed mask, for all models and noise levels."""
    masks = findings.measurements.masks
    candidates = [0.0]
    for _, rows in masks[masks["predicted"].notna()].groupby(["model", "level"]):
        margins = np.sort(_margin(rows).to_numpy())[::-1]
        foreseen = np.cumsum(scipy.special.ndtr(-margins)) * int(rows["draws"].iloc[0])
        candidates += margins[foreseen >= 1][:1].tolist()
    return float(max(candidates))


def heads_pooled(findings: Findings) -> pd.DataFrame:
    """Return the stability of the masks of each layer, its heads together."""
    rows = []
    for (model, level, layer), part in findings.measurements.masks.groupby(["model", "level", "layer"]):
        share = mean_interval(part, "exact").if_varied().columns("exact")
        certified = float(part["certified"].astype(np.float64).mean())
        rows.append({"model": model, "level": level, "layer": layer, **share, "certified": certified})
    columns = ["model", "level", "layer", "exact", "exact_low", "exact_high", "certified"]
    return pd.DataFrame(rows, columns=columns)


def effect_table(findings: Findings) -> pd.DataFrame:
    """Return the effect of the noise on outputs by model and level, over samples."""
    rows = []
    for (model, level), effects in findings.measurements.noise_effects.groupby(["model", "level"], sort=False):
        after = mean_interval(effects, "correct_after").if_varied()
        rows.append(
            {
                "model": model, "level": level, "samples": len(effects),
                "logit_change": effects["logit_change"].mean(skipna=False),
                "flipped": effects["flipped"].mean(), "accuracy_before": effects["correct_before"].mean(),
                **after.columns("accuracy_after"),
            }
        )  # fmt: skip
    return pd.DataFrame(rows, columns=["model", "level"] if not rows else None)


def _margin(rows: pd.DataFrame) -> pd.Series:
    """Return Δ/sd of every query; 0 where Δ is 0, +inf where nothing moves."""
    separation, spread = rows["separation"].astype(np.float64), rows["swing_sd"].astype(np.float64)
    margin: pd.Series = (separation / spread.where(spread > 0, np.nan)).fillna(np.inf)
    return margin.where(separation != 0, 0.0)


def _binned(rows: pd.DataFrame, highest: float) -> pd.DataFrame:
    margin = _margin(rows)
    low = margin <= highest
    bins = ((margin[low].rank(method="first") - 1) * _BINS // low.sum()).reindex(rows.index, fill_value=_BINS)
    table = []
    for place, part in rows.groupby(bins):
        share = mean_interval(part, "exact")
        named = {"margin": float(margin[part.index].median()), "share": len(part) / len(rows)}
        named |= {"predicted": float(part["predicted"].mean()), "above": place == _BINS}
        table.append({**named, "exact": share.estimate, "low": share.low, "high": share.high})
    return pd.DataFrame(table)


def _places(queries: pd.DataFrame) -> Iterator[tuple[int, int, pd.DataFrame]]:
    for layer, rows in queries.groupby("layer", sort=True):
        for head, part in rows.groupby("head", sort=True):
            yield int(str(layer)), int(str(head)), part
    yield ALL, ALL, queries


def _described(part: pd.DataFrame) -> Summary:
    means: dict[str, Any] = {}
    for name in _MEANS:
        means |= mean_interval(part, name, share=name != "response").if_varied().columns(name)
    disagreement = part.assign(disagreement=1 - part["agreement"].astype(np.float64))
    spearman = rank_correlation_interval(disagreement, "separation", "disagreement", RESAMPLES)
    means |= spearman.columns("spearman")
    swing = part["swing_sd"].astype(np.float64)
    return {
        "queries": len(part),
        "draws": int(part["draws"].iloc[0]),
        "separation_p50": float(part["separation"].median()),
        **means,
        "swing_sd": float(np.sqrt((swing**2).mean())),
        "certified_rows": round(float((part["certified"].astype(np.float64) * part["draws"]).sum())),
        "certified_changed": int(part["certified_changed"].sum()),
    }
