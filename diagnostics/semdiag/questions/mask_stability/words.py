"""Masks under noise in words: sentences, the answer at one glance, and the tables on the terminal."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from semdiag.capturing.attention_call import DENSE
from semdiag.measuring.findings.findings import Findings, Summary
from semdiag.measuring.table import ALL
from semdiag.measuring.words import counted, interval, interval_words, number_from_json, percent
from semdiag.presenting.drawing.panels import model_labels
from semdiag.presenting.question import title
from semdiag.presenting.section import (
    Answer,
    Column,
    Glance,
    NumberTable,
    fine_percent,
    not_shown,
    percent_interval,
    percent_span,
    plain,
    wide_console,
)
from semdiag.questions.mask_precision.words import print_precision
from semdiag.questions.mask_stability.answer import effect_table, mask_summary, mask_table, mask_words


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
    ends = interval_words(low, high, samples=samples, level="")
    return f"rank correlation of Δ with disagreement {rho:.2f} ({ends})"


def masks_glance(findings: Findings) -> Glance:
    """Return the share of masks, own and supposed, that stay the same under the middle noise level."""
    table = findings(mask_table)
    table = table[table["layer"] == ALL]
    if table.empty:
        return Glance(Answer.OPEN, "0 models", "have a mask that depends on the input")
    levels = sorted(table["level"].unique())
    rows = table[table["level"] == levels[len(levels) // 2]]
    kinds = findings.measurements.models.set_index("model")["attention"]
    without = rows["model"].map(kinds).isin(DENSE)
    with_mask, supposed = rows[~without], rows[without]
    noise = f"stay the same under noise of {noise_words(findings, levels[len(levels) // 2])}"
    chosen = f"that top-{findings.measurements.provenance['mask_noise']['k']} would choose"
    certified, changed = int(rows["certified_rows"].sum()), int(rows["certified_changed"].sum())
    tail = f"{changed:,} of {certified:,} certified ones changed"
    if with_mask.empty:
        return Glance(
            Answer.MEASURED,
            _share(supposed),
            f"of the masks {chosen} in {counted(len(supposed), 'model')} {noise}; {tail}",
        )
    if len(supposed):
        tail = f"{_share(supposed)} of those {chosen} in {counted(len(supposed), 'model')} without a mask; {tail}"
    words = f"of the masks of {counted(len(with_mask), 'model')} {noise}; {tail}"
    return Glance(Answer.MEASURED, _share(with_mask), words)


def _share(masks: pd.DataFrame) -> str:
    return percent_span(list(masks["exact"]))


def noise_words(findings: Findings, level: float) -> str:
    """Return a size of noise in words: ``1%``, or ``0.01`` if it is absolute."""
    return f"{level:g}" if _plan(findings).get("absolute") else percent(level, "g")


def mask_facts(findings: Findings) -> str:
    """Return noise, samples and draws behind the judged masks."""
    plan = _plan(findings)
    block = plan.get("block", 0)
    where = "the embedded tokens" if not block else f"the input of block {block}"
    size = "absolute standard deviation" if plan.get("absolute") else "relative to each token's RMS"
    samples = int(findings.measurements.masks.groupby("model")["sample"].nunique().max())
    seed = "" if plan.get("seed") is None else f" (seed {plan['seed']})"
    draws = int(findings.measurements.masks["draws"].iloc[0])
    return f"Noise on {where}, {size}; {counted(samples, 'sample')} per model, {draws} draws{seed}"


def _plan(findings: Findings) -> dict[str, Any]:
    plan = findings.measurements.provenance.get("mask_noise", {})
    return plan if isinstance(plan, dict) else {}


_COLUMNS = (
    Column("noise"), Column("layer", form=plain),
    Column("head", form=lambda head: "" if head == "all" else str(head)),
    Column("separation_p50", "Δ p50", drop=4), Column("certified", form=percent),
    Column("predicted", form=percent), Column("exact", "observed", percent),
    Column("exact_low exact_high", "observed 95%", percent_interval, drop=3), Column("agreement", form=percent),
    Column("response"), Column("spearman", "Spearman Δ", drop=2),
    Column("spearman_low spearman_high", "Spearman 95%", interval, drop=1),
)  # fmt: skip


_MOST_HEADS = 24  # of more, only the least stable are shown
_LEAST_STABLE = 5


def print_masks(findings: Findings, every: bool = False) -> None:
    """Print one table per model: exact agreement, certified, predicted and observed, and related numbers."""
    screen = wide_console()
    for result in findings(mask_summary)["results"]:
        screen.print(f"\n{title(result)}: {result['mask']}")
        for refused in result["refused"]:
            if refused != result["mask"]:
                screen.print(f"{refused}.")
        if result["precision"]:
            print_precision(screen, result["precision"])
        levels = result["levels"]
        if not levels:
            continue
        rows = [{"noise": one["noise"], **row} for one in levels for row in [*_shown(one, every), one["all"]]]
        screen.print(NumberTable(_COLUMNS, rows))
        left_out = sum(len(one["layers"]) + 1 for one in levels) - len(rows)
        if left_out:
            screen.print(f"Shown are the {_LEAST_STABLE} heads whose masks change most. {not_shown(left_out)}")
        changed, certified = result["certified_changed"], result["certified_rows"]
        screen.print(f"Certified rows that changed: {changed:,} of {certified:,}.")
        for level in levels:
            if level["output"]:  # nothing is known of the output of an external model
                screen.print(_output(level))


def _shown(level: Summary, every: bool) -> list[Summary]:
    """Return the rows of the heads, or of many heads the least stable, in the order of the model."""
    heads: list[Summary] = level["layers"]
    if every or len(heads) <= _MOST_HEADS:
        return heads
    least_stable = sorted(heads, key=lambda row: number_from_json(row["exact"]))[:_LEAST_STABLE]
    return [row for row in heads if any(row is one for one in least_stable)]


def _output(level: Summary) -> str:
    output = level["output"]
    moved = number_from_json(output["logit_change"])
    change = f"logits move by {fine_percent(moved)} of their norm"
    change = change if math.isfinite(moved) else "some logits are not numbers"
    words = f"Noise {level['noise']:g}: {change}, {fine_percent(output['flipped'])} of the predictions change"
    if output["accuracy_after"] is not None:
        words += f", accuracy {percent(output['accuracy_before'])} → {percent(output['accuracy_after'])}"
    return words + "."
