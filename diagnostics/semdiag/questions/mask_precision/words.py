"""Masks in a number format: sentences, and the table on the terminal."""

import math
from collections.abc import Iterator

from rich.console import Console

from semdiag.measuring.findings.findings import Findings, Summary
from semdiag.measuring.words import counted, interval_words, percent, strict_percent
from semdiag.presenting.drawing.panels import model_labels
from semdiag.presenting.section import (
    NEVER,
    Column,
    NumberTable,
    count,
    fine_percent,
    percent_interval,
    plain,
    text,
)
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
            f"{kind} {strict_percent(row['changed'])}" for kind, row in formats if not math.isnan(row["changed"])
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
    return f"Not covered: {row['not_covered']:,} of {counted(row['queries'], 'row')} ({row['why']})."


def _of_format(answer: Summary) -> Iterator[str]:
    row, kind = answer["all"], answer["format"]
    if row["queries"] > row["not_covered"]:
        interval = interval_words(row["changed_low"], row["changed_high"], "{:.2%}".format)
        yield (
            f"In {kind} {strict_percent(row['changed'])} of the masks change however ties are broken "
            f"({interval}), "
            f"{strict_percent(row['tied'])} have a tie at the boundary, {strict_percent(row['changed_or_tied'])} "
            f"either; certified {strict_percent(row['certified'])}."
        )
        if not math.isnan(row["lost_p50"]):
            yield f"A changed row loses {row['lost_p50']:.2g} of its weight (median; mean {row['lost_mean']:.2g})."
        yield certified_words(row)
    else:
        yield f"In {kind}:"
    if row["not_covered"]:
        yield not_covered_words(row)


_COLUMNS = (
    Column("format", form=text), Column("layer", form=plain),
    Column("queries not_covered", "rows", lambda queries, not_covered: count(queries - not_covered)),
    Column("certified", form=lambda share: "not covered" if share is None else percent(share), drop=NEVER),
    Column("changed", form=fine_percent, drop=NEVER),
    Column("changed_low changed_high", "changed 95%", percent_interval, drop=1),
    Column("tied", form=fine_percent, drop=NEVER), Column("changed_or_tied", form=fine_percent),
    Column("lost_p50", "weight lost p50"), Column("lost_mean", "mean", drop=2),
)  # fmt: skip


def print_precision(screen: Console, formats: list[Summary]) -> None:
    """Print how one model's masks change, a row for each format and layer, and what was certified."""
    rows = [{"format": one["format"], **row} for one in formats for row in [*one["layers"], one["all"]]]
    screen.print(NumberTable(_COLUMNS, rows))
    for one in formats:
        row, uncovered = one["all"], not_covered_words(one["all"])
        words = [certified_words(row)] * (row["queries"] > row["not_covered"]) + [uncovered] * bool(uncovered)
        screen.print(f"{one['format']}: {' '.join(words)}")
