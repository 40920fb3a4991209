"""How masks change under noise, in sentences."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from semdiag.capturing.attention_kinds import DENSE
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import interval_words
from semdiag.measuring.table import ALL
from semdiag.presenting.drawing.panels import model_labels
from semdiag.questions.mask_stability.answer import effect_table, mask_table, mask_words
from semdiag.questions.mask_stability.figures.panels import mask_facts, noise_words


def masks_in_short(findings: Findings) -> list[str]:
    """Return the first screen's sentence on masks under noise: pooled, one level, last snapshots only."""
    if findings.measurements.masks.empty:
        return []
    table = findings(mask_table)
    table = table[table["layer"] == ALL]
    levels = sorted(table["level"].unique())
    if not levels:
        return []
    level = levels[len(levels) // 2]
    labels = model_labels(findings.measurements.models, last_only=True)
    shown = table[(table["level"] == level) & table["model"].isin(labels)].set_index("model")
    kinds = findings.measurements.models.set_index("model")["attention"]
    kept = findings.measurements.masks.groupby("model")["kept"].max()
    supposed = {
        model: f"; the mask that top-{kept[model]} would choose" for model in shown.index if kinds[model] in DENSE
    }
    parts = [
        f"{label} {shown.loc[model, 'exact']:.0%} (certified {shown.loc[model, 'certified']:.0%}"
        f"{supposed.get(model, '')})"
        for model, label in labels.items()
        if model in shown.index
    ]
    if not parts:
        return []
    changed, certified = int(shown["certified_changed"].sum()), int(shown["certified_rows"].sum())
    others = int(table["certified_changed"].sum()) - changed
    more = f" (and {others:,} under other noise or of other snapshots)" if others else ""
    fault = f"{more}, which is an error of semdiag" if changed or others else ""
    return [
        f"Masks that survive noise of {noise_words(findings, float(level))} unchanged: {'; '.join(parts)}. "
        f"Certified rows that changed: {changed:,} of {certified:,}{fault}."
    ]


def mask_sentences(findings: Findings) -> list[str]:
    """Return a sentence on the noise, then a few per model: masks that survive, the part of Δ, and outputs."""
    if findings.measurements.masks.empty:
        return ["Not applicable: no mask of these models depends on the input, so none can change."]
    table, effects = findings(mask_table), findings(effect_table)
    sentences = [f"{mask_facts(findings)}."]
    for model, label in model_labels(findings.measurements.models).items():
        rows = table[(table["model"] == model) & (table["layer"] == ALL)]
        if rows.empty:
            sentences.append(f"{label}: {mask_words(findings, model)}.")
            continue
        changed, certified = int(rows["certified_changed"].sum()), int(rows["certified_rows"].sum())
        fault = ", which is an error of semdiag" if changed else ""
        parts = list(_levels(findings, rows, effects[effects["model"] == model]))
        parts.append(f"Certified rows that changed: {changed:,} of {certified:,}{fault}.")
        sentences.append(f"{label} ({mask_words(findings, model)}): {' '.join(parts)}")
    return sentences


def _levels(findings: Findings, rows: pd.DataFrame, effects: pd.DataFrame) -> Iterator[str]:
    outputs = effects.set_index("level")
    masks = findings.measurements.masks
    samples = masks.loc[masks["model"].isin(rows["model"]), "sample"].nunique()
    for row in rows.to_dict("records"):
        known = row["level"] in outputs.index
        flipped = f"; {outputs.loc[row['level'], 'flipped']:.1%} of the predictions change" if known else ""
        promised = f"; certified {row['certified']:.1%}, predicted {row['predicted']:.1%}"
        interval = interval_words(row["exact_low"], row["exact_high"], "{:.1%}".format, samples)
        yield (
            f"Under {noise_words(findings, row['level'])} noise {row['exact']:.1%} of the masks stay exactly "
            f"the same ({interval}{'' if np.isnan(row['predicted']) else promised}), {row['agreement']:.1%} of "
            f"their keys are kept; {_correlation(row, samples)}{flipped}."
        )


def _correlation(row: dict[Any, Any], samples: int) -> str:
    """Return the correlation of Δ with changes of masks, or why it is unknown."""
    rho, low, high = (row[name] for name in ("spearman", "spearman_low", "spearman_high"))
    if np.isnan(rho):
        same = "no mask changes" if row["agreement"] == 1 else "Δ or the agreement is the same everywhere"
        return f"{same}, and Δ has no rank correlation with disagreement"
    ends = interval_words(low, high, samples=samples).removeprefix("95% interval ")
    return f"rank correlation of Δ with disagreement {rho:.2f} ({ends})"
