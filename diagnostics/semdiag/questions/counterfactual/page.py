"""The section ``within`` of a report."""

import pandas as pd

from semdiag.measuring.findings.counterfactuals import counterfactual_ks
from semdiag.measuring.findings.distributions import all_by_name, within_table
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.questions.counterfactual.figures.dispersion_counterfactual import dispersion_counterfactual
from semdiag.questions.counterfactual.figures.key_load_counterfactual import key_load_counterfactual
from semdiag.questions.counterfactual.figures.mass_kept import mass_kept
from semdiag.questions.counterfactual.figures.separation_counterfactual import separation_counterfactual
from semdiag.questions.counterfactual.glance import within_glance
from semdiag.questions.counterfactual.words import within_sentences


def within_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return percentiles of what every counterfactual k would keep."""
    table = findings(within_table)
    return {"within": table if table.empty else all_by_name(table)}


_HEADINGS = (
    Heading(
        "within",
        "How much attention would a top-k mask keep?",
        (
            Shown(
                dispersion_counterfactual,
                "Within full-attention models: dispersion over all keys beside the dispersion over the k largest "
                "scores of the same rows, per layer: {shown}.",
                "Within one and the same model: the spread of all its scores beside the spread of its k "
                "largest only. It shows what a top-k mask would leave of this model's dispersion without training "
                "it anew; it does not compare trained models.",
            ),
            Shown(
                mass_kept,
                "Within full-attention models: share of the attention weight on the k largest scores, per layer: "
                "{shown}.",
                "How much of the attention a top-k mask would keep. Layers whose boxes touch 1 already attend to "
                "k keys and would hardly notice the mask; where the boxes are low, the mask would throw away what "
                "the model uses.",
            ),
            Shown(
                separation_counterfactual,
                "Within full-attention models: gap in nats between the k-th and the next largest score, per "
                "layer, logarithmic axis: {shown}.",
                "The gap between the last score that a top-k mask would keep and the first it would drop. Small "
                "gaps mean that a small change of the input would swap keys in and out of the mask.",
            ),
            Shown(
                key_load_counterfactual,
                "Within full-attention models: share of keys that at least x queries would keep, logarithmic "
                "axis: {shown}.",
                "Which keys a top-k mask would rely on: a curve that falls near k spreads the queries evenly, a "
                "long tail means sinks that nearly every query would keep.",
            ),
        ),
        (
            "A counterfactual within one model, on its own scores. Training with such a mask "
            "would move its scores; how far, only training can tell.",
            "Queries with at most k keys lose none: their δₕ(k) is δₛ, they keep all weight and have no "
            "separation.",
        ),
    ),
)


def _measured(findings: Findings) -> bool:
    return bool(counterfactual_ks(findings.measurements.queries))


SECTION = Section(
    name="within",
    needs=(),
    headings=_HEADINGS,
    external=_HEADINGS,
    measured=_measured,
    in_short=within_sentences,
    glance=within_glance,
    tables=within_tables,
)
