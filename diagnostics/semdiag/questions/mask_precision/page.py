"""The section ``mask-precision`` of a report."""

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import with_facts
from semdiag.questions.mask_precision.answer import precision_table
from semdiag.questions.mask_precision.figures.masks_in_formats import masks_in_formats
from semdiag.questions.mask_precision.glance import precision_glance
from semdiag.questions.mask_precision.words import precision_in_short, precision_sentences


def precision_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return the masks by number format and layer, heads pooled."""
    table = findings(precision_table)
    if table.empty:
        return {}
    layer = table["layer"].astype(object).mask(table["layer"] == ALL, "all")
    return {"mask_precision": with_facts(findings, table.assign(layer=layer))}


_HEADINGS = (
    Heading(
        "mask-precision",
        "Do masks survive a number format?",
        (
            Shown(
                masks_in_formats,
                "Share of queries whose mask is the same in float64 and with queries, keys and scores rounded to "
                "a number format, per layer, with the certified share dotted: {shown}.",
                "The band of a format is due to ties at the boundary, which engines break in their own ways. The "
                "dotted share is proven: no engine within the error model changes it. Masks above it stay the "
                "same where sums are added in the order of this computer.",
            ),
        ),
        (
            "Certified means: no rounding of operands, sum and score can move a kept score below a dropped one, "
            "or level with it. The proof holds for an error model (docs/theory.md, Scores of rounded queries and "
            "keys), not for an engine's bugs. A certified mask that changed would be an error of semdiag.",
            "The error model rounds queries and keys without a scale, adds in float32, multiplies by the scale of "
            "the scores and rounds once more. 8-bit formats with a scale per tensor or block are other formats. "
            "Rows whose scores have a bias or a soft-cap, or whose softmax has sinks, are not covered: they are "
            "counted, and left out of every share.",
            "Queries and keys are those of a clean forward pass: rounding is not passed on from layer to layer.",
            "A full-attention model drops no key. The mask judged there is the one that top-k would choose from "
            "its scores. The weight lost is a share of the weight over all allowed keys.",
        ),
    ),
)


SECTION = Section(
    name="mask-precision",
    needs=("rounded_masks",),
    headings=_HEADINGS,
    external=_HEADINGS,
    in_short=precision_in_short,
    details=precision_sentences,
    glance=precision_glance,
    tables=precision_tables,
)
