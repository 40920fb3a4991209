"""The section ``lipschitz`` of a report."""

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import compared_pairs
from semdiag.presenting.glance import measured_glance
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import with_facts
from semdiag.questions.lipschitz.answer.secant_percentiles import secant_percentiles, secant_ratios
from semdiag.questions.lipschitz.answer.summary import lipschitz_findings
from semdiag.questions.lipschitz.figures.block_stretch import block_stretch
from semdiag.questions.lipschitz.figures.lipschitz_percentiles import lipschitz_percentiles
from semdiag.questions.lipschitz.figures.lipschitz_rungs import lipschitz_rungs
from semdiag.questions.lipschitz.words import lipschitz_sentences


def lipschitz_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return secants by radius, gradients, Jacobians, and one model's secants over another's."""
    tables = {"lipschitz_secants": with_facts(findings, findings(secant_percentiles))}
    for name in ("loss_gradients", "jacobians"):
        tables[name] = with_facts(findings, getattr(findings.measurements, name))
    ratios = [findings(secant_ratios, pair).assign(pair=pair.label) for pair in findings(compared_pairs)]
    return tables | ({"lipschitz_ratios": pd.concat(ratios, ignore_index=True)} if ratios else {})


_HEADINGS = (
    Heading(
        "lipschitz",
        "How steep is the loss around the checkpoint?",
        (
            Shown(
                lipschitz_percentiles,
                "Percentiles 50, 75, 95 and 99 of the secants of the loss between parameters on circles in random "
                "planes against the radius, logarithmic axes, with 95% bands, attention kinds together: "
                "{shown}.",
                "The lower curve belongs to the model whose loss changes less per distance, as the paper says of "
                "top-k. Where the bands overlap, these planes do not settle it.",
            ),
            Shown(
                lipschitz_rungs,
                "Decimal logarithm of the largest secant, the largest gradient norm "
                "and the sound bound for each group of parameters, and of queries and keys a bound at the "
                "checkpoint: {shown}.",
                "Secants and gradients are two estimates from below, in no order among themselves. "
                "The bound at the checkpoint belongs to the open circle below it, and could have failed. The grey "
                "lines are what the sound bound leaves open, in powers of ten.",
            ),
            Shown(
                block_stretch,
                "How much each block stretches a small change of its input at most, sample by sample, below bars "
                "for the bound λ_X, logarithmic axis: {shown}.",
                "Compare the points of both models at the same block: the higher ones pass a change of the input "
                "on more strongly. The black dashes bound them closely, at these inputs; the bars above them are "
                "what the theory promises of all with the same δ, Δ and norms.",
            ),
        ),
        (
            "A trained model whose loss is near 0 is flat nearby whatever its attention: gradients and secants "
            "shrink with the loss. Compare the initialisations as well (the runs' epoch-0.pt).",
            "Random directions are nearly orthogonal to the gradient, so secants lie far below gradient norms; "
            "none of these numbers is the supremum over the ball.",
            "With a top-k mask the loss jumps where a key is swapped: gradients do not see it, secants do.",
            "The intervals are about other random planes around these models, not about other training runs.",
        ),
    ),
)


SECTION = Section(
    name="lipschitz",
    needs=("loss_gradients",),
    glance=measured_glance("loss_gradients"),
    headings=_HEADINGS,
    external=(),
    details=lipschitz_sentences,
    verdicts=lipschitz_findings,
    tables=lipschitz_tables,
)
