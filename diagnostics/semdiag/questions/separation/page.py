"""The section ``separation`` of a report."""

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import percentile_csv
from semdiag.questions.separation.figures.key_load import key_load
from semdiag.questions.separation.figures.separation_by_layer import separation_by_layer
from semdiag.questions.separation.glance import separation_glance
from semdiag.questions.separation.words import separation_in_short


def separation_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return percentiles of Δ and of the key loads."""
    return {name: percentile_csv(findings, name) for name in ("separation", "load")}


_HEADINGS = (
    Heading(
        "separation",
        "Is the mask well separated?",
        (
            Shown(
                separation_by_layer,
                "Distribution of the semantic separation Δ in nats per layer, as nested boxes on a "
                "logarithmic axis, with the share of queries at or below 0 stated: {shown}.",
                "Δ is the lowest kept score minus the highest dropped one; the lower ends of the boxes are "
                "what matters. A tiny Δ means that a small change of the input can swap keys in and out of "
                "the mask, and the bounds of a heavy-hitter mask grow as 1/Δ.",
            ),
        ),
        (
            "Full attention drops no key, so Δ is undefined there. Masks that ignore the input (banded, "
            "block-local, random) drop larger scores than they keep for most queries, and bottom-k does for all: "
            "Δ ≤ 0, which lies below a logarithmic axis.",
            "A tie between the last kept and the first dropped key has Δ = 0 and counts as not positive.",
        ),
    ),
    Heading(
        "load",
        "Which keys carry the load?",
        (
            Shown(
                key_load,
                "Share of keys that at least x queries keep, logarithmic axis, with k and the largest load "
                "marked: {shown}.",
                "Read a curve from left to right: how many keys are kept by at least that many queries. A curve "
                "that falls at k keeps every key about as often; a long tail means sinks, a few keys that many "
                "queries rely on, beside keys that no query keeps.",
            ),
        ),
        (
            "Loads are raw counts within one sequence, layers and heads pooled; they cannot exceed its "
            "length. They count how often a key is kept, not the weight it gets.",
        ),
    ),
)


SECTION = Section(
    name="separation",
    needs=(),
    headings=_HEADINGS,
    external=(),
    in_short=separation_in_short,
    glance=separation_glance,
    tables=separation_tables,
)
