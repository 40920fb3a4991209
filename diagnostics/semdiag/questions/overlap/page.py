"""The section ``overlap`` of a report: its figure, sentences and tables."""

import math
from collections.abc import Mapping
from typing import Any

from semdiag.capturing.attention_kinds import DENSE
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import interval_words
from semdiag.measuring.table import ALL
from semdiag.presenting.drawing.panels import model_labels
from semdiag.presenting.glance import measured_glance
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import answers_with_facts
from semdiag.questions.overlap.answer import overlap_table
from semdiag.questions.overlap.figures.mask_overlap import mask_overlap

_BETWEEN = {
    "layers": "two layers",
    "heads": "two heads of a layer",
    "previous": "a query and the one before it",
}


def _interval(row: Mapping[Any, Any]) -> str:
    if math.isnan(row["low"] + row["high"]):
        return interval_words(row["low"], row["high"], samples=row["samples"])
    return f"{row['low']:.3f} to {row['high']:.3f}"


def overlap_sentences(findings: Findings) -> list[str]:
    """Return a sentence for each model on how much the masks of layers, heads and successive queries overlap."""
    table, models = findings(overlap_table), findings.measurements.models
    kinds = dict(zip(models["model"], models["attention"], strict=True))
    sentences = []
    for model, label in model_labels(models).items():
        rows = table[(table["model"] == model) & (table["layer"] == ALL)]
        parts = [
            f"{_BETWEEN[row['what']]} {row['jaccard']:.3f} ({_interval(row)}; at random "
            f"{row['chance']:.3f}; {row['pairs']:,} pairs, {row['samples']:,} samples)"
            for row in rows.to_dict("records")
        ]
        k = findings.measurements.provenance.get("overlap_k")
        supposed = f", the mask that top-{k} would choose" if kinds[model] in DENSE else ""
        sentences.append(
            f"{label}{supposed}: mean Jaccard index of the kept keys of {', of '.join(parts)}."
            if parts
            else f"{label}{supposed}: no query drops a key at both of two places, so nothing can be compared."
        )
    return sentences


_HEADINGS = (
    Heading(
        "overlap",
        "Do layers keep the same keys?",
        (
            Shown(
                mask_overlap,
                "Mean Jaccard index of the kept keys as coloured cells, layer by layer, heads of a layer on the "
                "diagonal, and beside it for successive queries: {shown}.",
                "A bright cell is a pair of layers that could share one selection: for the same query they keep "
                "the same keys. The column on the right tells how much of a query's selection the next one could "
                "reuse. Compare with the value that random sets of the same size have, in the panel's title.",
            ),
        ),
        (
            "A model that keeps every key has no masks: those that top-k would choose from its scores are "
            "compared, and its output does not depend on them. Queries with too few keys to drop one are left "
            "out.",
            "The index counts keys, not weights: two heads may share all but the key that matters. Masks that do "
            "not depend on the input overlap by construction.",
            "Intervals resample sequences; they are about other inputs of the same kind.",
        ),
    ),
)

SECTION = Section(
    name="overlap",
    needs=("overlap",),
    glance=measured_glance("overlap"),
    headings=_HEADINGS,
    external=_HEADINGS,
    details=overlap_sentences,
    tables=answers_with_facts(overlap=overlap_table),
)
