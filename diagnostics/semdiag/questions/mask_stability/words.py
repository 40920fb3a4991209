"""What became of masks under noise, in sentences."""

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
    """Return the first screen's sentence on masks under noise: pooled, one level, last snapshots only.

    Args:
        findings: with or without masks.
    """
    if findings.measurements.masks.empty:
        return []
    table = findings(mask_table)
    table = table[table["layer"] == ALL]
    levels = sorted(table["level"].unique())
    if not levels:
        return []
    level = levels[len(levels) // 2]
    labels = model_labels(findings.measurements.models, last_only=True)
    told = table[(table["level"] == level) & table["model"].isin(labels)].set_index("model")
    kinds = findings.measurements.models.set_index("model")["attention"]
    kept = findings.measurements.masks.groupby("model")["kept"].max()
    supposed = {
        model: f"; the mask that top-{kept[model]} would choose" for model in told.index if kinds[model] in DENSE
    }
    parts = [
        f"{label} {told.loc[model, 'exact']:.0%} (certified {told.loc[model, 'certified']:.0%}"
        f"{supposed.get(model, '')})"
        for model, label in labels.items()
        if model in told.index
    ]
    if not parts:
        return []
    changed, certified = int(told["certified_changed"].sum()), int(told["certified_rows"].sum())
    others = int(table["certified_changed"].sum()) - changed
    more = f" (and {others:,} under other noise or of other snapshots)" if others else ""
    fault = f"{more}, which is an error of semdiag" if changed or others else ""
    return [
        f"Masks that survive noise of {noise_words(findings, float(level))} unchanged: {'; '.join(parts)}. "
        f"Certified rows that changed: {changed:,} of {certified:,}{fault}."
    ]


def mask_sentences(findings: Findings) -> list[str]:
    """Say of every model how many masks survive, what Δ has to do with it, and what the output does.

    Args:
        findings: with masks.

    Returns:
        What was added, then a few sentences per model.
    """
    if findings.measurements.masks.empty:
        return ["Not applicable: no mask of these models depends on the input, so none can change."]
    table, effects = findings(mask_table), findings(effect_table)
    said = [f"{mask_facts(findings)}."]
    for model, label in model_labels(findings.measurements.models).items():
        own = table[(table["model"] == model) & (table["layer"] == ALL)]
        if own.empty:
            said.append(f"{label}: {mask_words(findings, model)}.")
            continue
        changed, certified = int(own["certified_changed"].sum()), int(own["certified_rows"].sum())
        fault = ", which is an error of semdiag" if changed else ""
        parts = list(_levels(findings, own, effects[effects["model"] == model]))
        parts.append(f"Certified rows that changed: {changed:,} of {certified:,}{fault}.")
        said.append(f"{label} ({mask_words(findings, model)}): {' '.join(parts)}")
    return said


def _levels(findings: Findings, own: pd.DataFrame, effects: pd.DataFrame) -> Iterator[str]:
    outputs = effects.set_index("level")
    masks = findings.measurements.masks
    samples = masks.loc[masks["model"].isin(own["model"]), "sample"].nunique()
    for row in own.to_dict("records"):
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
