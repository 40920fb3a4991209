"""The answer at one glance."""

import operator

import numpy as np

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import find_pairs
from semdiag.presenting.glance import Answer, Glance, count_of
from semdiag.questions.convergence.answer.epochs import epochs_to


def learning_glance(findings: Findings) -> Glance:
    """In how many pairs the top-k model was the first to learn its training data; ties are nobody's."""
    measurements = findings.measurements
    pairs = find_pairs(measurements.models[measurements.models["snapshot"] == "last"])[0]
    arrived = {
        str(model): epochs_to(rows.sort_values("epoch")) or np.inf
        for model, rows in measurements.history.groupby("model")
    }
    known = [pair for pair in pairs if {pair.full, pair.other} <= arrived.keys()]
    judged = [p for p in known if np.isfinite(min(arrived[p.full], arrived[p.other]))]
    if not judged:
        return Glance(
            Answer.OPEN, "0 pairs", "of a full and a top-k model in which at least one learned its training data"
        )
    first, tied = (
        sum(compare(arrived[p.other], arrived[p.full]) for p in judged) for compare in (operator.lt, operator.eq)
    )
    behind = len(judged) - first - tied
    answer = Answer.DOES_NOT if behind else Answer.OPEN if tied else Answer.HOLDS
    words = "in which the top-k model reached 95 % training accuracy in fewer epochs"
    words += f"; in {behind:,} full attention did" if behind else ""
    words += f"; in {tied:,} both needed the same number" if tied else ""
    return Glance(answer, count_of(first, len(judged), "pair"), words)
