"""How masks change in a number format, in sentences."""

import math
from collections.abc import Iterator

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import interval_words, percent
from semdiag.measuring.findings.strict_json import Summary
from semdiag.presenting.drawing.panels import model_labels
from semdiag.questions.mask_precision.answer import precision_of
from semdiag.questions.mask_stability.answer import mask_words, refusals


def precision_in_short(findings: Findings) -> list[str]:
    """Return the first screen's sentence on masks in number formats: pooled, last snapshots only."""
    if findings.measurements.rounded_masks.empty:
        return []
    parts, faults, scope = [], 0, ""
    for model, label in model_labels(findings.measurements.models, last_only=True).items():
        formats = [(answer["format"], answer["all"]) for answer in precision_of(findings, model)]
        known = [
            f"{kind} {percent(row['changed'], 1)}%" for kind, row in formats if not math.isnan(row["changed"])
        ]
        parts += [f"{label}: {', '.join(known)}"] if known else []
        faults += sum(row["certified_changed"] for _, row in formats)
        scope = ", of the rows that are covered" if any(row["not_covered"] for _, row in formats) else scope
    if not parts:
        return ["Masks in number formats: no row that the error model covers."]
    fault = f" Certified rows that changed: {faults:,}, an error of semdiag." if faults else ""
    return [f"Masks that change in a number format, however ties are broken{scope}: {'; '.join(parts)}.{fault}"]


def precision_sentences(findings: Findings) -> list[str]:
    """Return a sentence for each model on what each number format does to its masks."""
    sentences = []
    for model, label in model_labels(findings.measurements.models).items():
        parts = [part for of_format in precision_of(findings, model) for part in _of_format(of_format)]
        words = mask_words(findings, model)
        why = next(iter(refusals(findings, model)), words)
        sentences.append(f"{label} ({words}): {' '.join(parts)}" if parts else f"{label}: {why}.")
    return sentences


def certified_words(row: Summary) -> str:
    """Return how many certified rows of a format changed or tied, in words; none may."""
    changed = row["certified_changed"]
    fault = ", which is an error of semdiag" if changed else ""
    return f"Certified rows that changed: {changed:,} of {row['certified_rows']:,}{fault}."


def not_covered_words(row: Summary) -> str:
    """Return how many rows of a format the error model does not cover, and why; empty if it covers all."""
    if not row["not_covered"]:
        return ""
    return f"Not covered: {row['not_covered']:,} of {row['queries']:,} rows ({row['why']})."


def _of_format(answer: Summary) -> Iterator[str]:
    row, kind = answer["all"], answer["format"]
    if row["queries"] > row["not_covered"]:
        interval = interval_words(row["changed_low"], row["changed_high"], "{:.2%}".format)
        yield (
            f"In {kind} {percent(row['changed'], 1)}% of the masks change however ties are broken ({interval}), "
            f"{percent(row['tied'], 1)}% have a tie at the boundary, {percent(row['changed_or_tied'], 1)}% "
            f"either; certified {percent(row['certified'], 1)}%."
        )
        if not math.isnan(row["lost_p50"]):
            yield f"A changed row loses {row['lost_p50']:.2g} of its weight (median; mean {row['lost_mean']:.2g})."
        yield certified_words(row)
    else:
        yield f"In {kind}:"
    if row["not_covered"]:
        yield not_covered_words(row)
