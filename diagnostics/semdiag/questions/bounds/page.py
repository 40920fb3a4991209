"""The section ``bounds`` of a report."""

import pandas as pd

from semdiag.measuring.findings.estimates import in_part
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import compared_pairs
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import verdict_table, with_facts
from semdiag.questions.bounds.answer.corollary import corollary_table
from semdiag.questions.bounds.answer.summary import bounds_findings
from semdiag.questions.bounds.figures.corollary_conditions import corollary_conditions
from semdiag.questions.bounds.figures.secants_under_bounds import secants_under_bounds
from semdiag.questions.bounds.glance import bounds_glance
from semdiag.questions.bounds.words import bounds_sentences, corollary_in_short


def bounds_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return constants and tensors of every model, conditions of every pair, verdicts."""
    return {
        "constants": with_facts(findings, findings.measurements.constants),
        "parameters": with_facts(findings, findings.measurements.parameters),
        "corollary": corollary_table(findings, findings(compared_pairs)),
        "bounds_verdicts": verdict_table(findings(bounds_findings)),
    }


_HEURISTIC = (
    "Percentiles of δ, Δ and load are combined although they come from different queries, as the paper does: "
    "that is a heuristic, not a theorem about any one query."
)
_HEADINGS = (
    Heading(
        "constants",
        "How far below their bounds are the slopes of the loss?",
        (
            Shown(
                secants_under_bounds,
                "Bounds on the slope of the loss over the slope that was measured, block by block, logarithmic "
                "ordinate, attentions side by side: {shown}.",
                "The bound at the point, of queries and keys, lies close above their slope: it could have failed. "
                "The higher a line, the less its bound says: a difference between two models' constants then need "
                "not show in how they learn.",
            ),
        ),
        (
            "A constant is the largest over the evaluated inputs at this checkpoint, not over all inputs, nor "
            "along training: it bounds the gradient there and is not a Lipschitz constant of a region. The local "
            "form carries each input's residual back token by token, with what is known at the point. "
            "Gradient and secant are lower bounds of the true constant; either may be the larger.",
            "The paper's form is one value for all evaluated inputs together, from their largest norm, δ and load "
            "and their smallest Δ. It is computed for its own equations (post-norm, no biases). Where a model "
            "differs, the verdict says so: there the paper's theorem claims nothing.",
        ),
    ),
    Heading(
        "corollary",
        "Does the mask have the better guarantee?",
        (
            Shown(
                corollary_conditions,
                "Left sides of both conditions of Corollary 1 at percentiles 75, 90, 95 and 100, and the "
                "margins of the sound comparison beside them, as coloured cells, two rows a pair: {shown}.",
                "A blue cell means that the mask has the better worst-case guarantee at that percentile, an "
                "orange one that full attention has. Left is the paper's condition, right the comparison of "
                "sound constants; where the two disagree, the paper's explanation rests on its form of ξ. For "
                "masks whose rows differ in length the right numbers are not bounds: see the comparison by "
                "layers.",
            ),
        ),
        (
            _HEURISTIC,
            "The sound comparison in W never favours a heavy-hitter mask: the worst-case constant of full "
            "attention does not depend on its δ. Faster learning of a top-k model cannot follow from it.",
            "Fixed masks (banded, block-local, random) are a control: their constants differ from those of full "
            "attention only in δ, k and load, and ignore what the tokens mean. The paper's numbers are those "
            "it prints, k = 5.",
        ),
    ),
)


SECTION = Section(
    name="bounds",
    needs=("constants", "parameters"),
    measured=lambda findings: not in_part(findings),
    headings=_HEADINGS,
    external=(),
    in_short=corollary_in_short,
    details=bounds_sentences,
    verdicts=bounds_findings,
    glance=bounds_glance,
    glanced="corollary",
    tables=bounds_tables,
)
