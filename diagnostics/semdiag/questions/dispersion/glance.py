"""The answer at one glance."""

from collections.abc import Sequence

import numpy as np

from semdiag.capturing.attention_kinds import external
from semdiag.measuring.counted import counted
from semdiag.measuring.findings.distributions import pooled_percentiles
from semdiag.measuring.findings.estimates import in_part
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import ratio_words
from semdiag.presenting.drawing.reference_ranges import reference_words
from semdiag.presenting.glance import Answer, Glance, count_of, drawn_word, span_words, top_words
from semdiag.questions.dispersion.answer.comparisons import PairComparison, pair_comparisons


def dispersion_glance(findings: Findings) -> Glance:
    """Return in how many pairs the top-k model has the smaller dispersion; without pairs, the dispersion."""
    compared = findings(pair_comparisons)
    untrained = [pair for pair in compared if pair.snapshot == "initialisation"]
    trained = [pair for pair in compared if pair not in untrained]
    pairs = [pair for pair in trained if pair.snapshot == "last"] or trained or untrained
    if pairs:
        judged = [pair for pair in pairs if not pair.gate.unknown]
        if not judged:
            words = "of a full and a top-k model have a finite dispersion δ on both sides"
            return Glance(Answer.OPEN, count_of(0, len(pairs), "pair"), words, claim=True)
        passed = sum(pair.gate.passed for pair in judged)
        answer = Answer.HOLDS if passed == len(judged) else Answer.DOES_NOT
        number = count_of(passed, len(judged), "pair")
        words = f"in which the {top_words(findings)} model has the smaller dispersion δ at the 50th, 75th, 90th "
        words += "and 95th percentile"
        notes = _ratios("ratio of the medians", judged)
        notes += [f"before training {before}"] if trained and (before := ratio_before(findings)) else []
        words += f" ({'; '.join(notes)})" if notes else ""
        words += "" if trained else "; they are not trained yet"
        words += f"; {len(pairs) - len(judged)} more cannot be judged" if len(judged) < len(pairs) else ""
        return Glance(answer if trained else Answer.OPEN, number, words, claim=True)
    every = findings(pooled_percentiles, "dispersion").values()
    known = [each for each in every if np.isfinite(each["p50"])]
    if not known:
        return Glance(Answer.OPEN, f"0 of {counted(len(every), 'model')}", "have a finite dispersion δ")
    queries = sum(int(each["queries"]) for each in known)
    span = span_words([each["p50"] for each in known], "{:.3g}")
    words = (
        f"is the median dispersion δ of {counted(len(known), 'model')} ({queries:,} queries{drawn_word(findings)})"
    )
    words += f"; for {len(every) - len(known)} more it is not a number" if len(known) < len(every) else ""
    if external(findings.measurements.models).all():
        words += f"; in trained models 90% of the heads have {reference_words('dispersion')}"
        return Glance(Answer.MEASURED, f"{span} nats", words)
    why = (
        "only some queries were drawn or kept, but a verdict on pairs needs all of them"
        if in_part(findings)
        else ("no pair of a full and a top-k model to compare")
    )
    return Glance(Answer.OPEN, f"{span} nats", f"{words}; {why}")


def before_training(findings: Findings) -> list[float]:
    """Return for each trained pair the ratio of the median δ at the initialisations, where both are known."""
    table = findings.measurements.initialisation
    medians = dict(zip(table["model"], table["dispersion"], strict=True))
    compared = findings(pair_comparisons)
    untrained = [pair.ratio.estimate for pair in compared if pair.snapshot == "initialisation"]
    pairs = [pair.gate.pair for pair in compared if pair.snapshot == "last"]
    ratios = [
        medians[pair.other] / medians[pair.full] for pair in pairs if {pair.full, pair.other} <= set(medians)
    ]
    return [ratio for ratio in untrained or ratios if np.isfinite(ratio) and ratio > 0]


def ratio_before(findings: Findings) -> str:
    """Return the range of the ratios before training in words; empty if none is known."""
    ratios = before_training(findings)
    return span_words(ratios, ratio_words) if ratios else ""


def _ratios(name: str, pairs: Sequence[PairComparison]) -> list[str]:
    """Return the range of the finite ratios of medians; empty if there are none."""
    ratios = [pair.ratio.estimate for pair in pairs if np.isfinite(pair.ratio.estimate)]
    return [f"{name} {span_words(ratios, ratio_words)}"] if ratios else []
