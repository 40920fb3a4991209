"""The section ``stability`` of a report."""

import pandas as pd

from semdiag.measuring.findings.distributions import all_by_name
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import verdict_table, with_facts
from semdiag.questions.stability.answer import stability_findings, stability_table
from semdiag.questions.stability.figures.attention_response import attention_response
from semdiag.questions.stability.figures.stability_curves import stability_curves
from semdiag.questions.stability.glance import stability_glance
from semdiag.questions.stability.words import stability_in_short, stability_sentences


def stability_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return percentiles by layer and head, and the verdicts."""
    return {
        "stability": with_facts(findings, all_by_name(findings(stability_table))),
        "stability_verdicts": verdict_table(findings(stability_findings)),
    }


_HEADINGS = (
    Heading(
        "stability",
        "Is the stability bound respected?",
        (
            Shown(
                stability_curves,
                "Constant ξ of a softmax row against its dispersion δ for a small, a middle and a large number "
                "of keys, logarithmic axes, in the paper's form and the sound one, with measured secants of "
                "full attention and fixed masks: {shown}.",
                "Every point, a measured change of attention over the change of its scores, must lie below the "
                "solid curve, the smallest constant that holds for all rows of that δ. Where the paper's dashed "
                "curve lies below it (shaded) it is not an upper bound, even if no point exceeds it; points that "
                "do are ringed. Further right it grows without limit, while the sound constant stays at ½.",
            ),
            Shown(
                attention_response,
                "Distribution of the change of attention weights ‖p − p′‖₁ under input noise per layer, as "
                "nested boxes on a logarithmic axis with the mean marked, attention kinds side by side: "
                "{shown}.",
                "The marked mean of a layer is how far noise of the same relative size moves its attention; of "
                "two attentions at one layer, the higher moves more. A mean far above its box comes from few "
                "queries that exchange a whole key, as a top-k mask does where Δ is small.",
            ),
        ),
        (
            "A constant bounds the worst pair of rows; the response is an average under one kind of noise (level, "
            "samples and draws are given on the figures). A small δ can lower the first and leave the second "
            "high.",
            "ξ bounds the attention weights by the change of the scores. How much noise at the input changes the "
            "scores depends on the earlier layers and on Γ, which ξ does not contain.",
            "The heavy-hitter form takes δ as the larger and Δ as the smaller of both rows; rows with Δ ≤ 0 do"
            " not meet its assumptions and are counted, not judged.",
        ),
    ),
)


SECTION = Section(
    name="stability",
    needs=("secants",),
    headings=_HEADINGS,
    external=_HEADINGS,
    in_short=stability_in_short,
    details=stability_sentences,
    verdicts=stability_findings,
    glance=stability_glance,
    tables=stability_tables,
)
