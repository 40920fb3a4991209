"""The answer at one glance."""

import numpy as np

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.distributions import pooled_percentiles
from semdiag.measuring.findings.estimates import drawn
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.glance import Answer, Glance, drawn_word, span_words, top_words


def separation_glance(findings: Findings) -> Glance:
    """Return the smallest separation of models that keep their largest scores; Δ ≤ 0 is a tie."""
    models = findings.measurements.models
    diverged = models["model"].isin(findings.measurements.non_finite["model"])
    sparse = models[(models["attention"] == "topk") & ~diverged]["model"]
    percentiles = findings(pooled_percentiles, "separation")
    every = [
        percentiles[model] for model in models[models["attention"] == "topk"]["model"] if model in percentiles
    ]
    tables = [
        percentiles[model] for model in sparse if model in percentiles and np.isfinite(percentiles[model]["p5"])
    ]
    if not every:
        return Glance(Answer.OPEN, "0 models", "keep the keys with the largest scores")
    if not tables:
        words = "that keep the keys with the largest scores have a finite separation Δ"
        return Glance(Answer.OPEN, f"0 of {counted(len(every), 'model')}", words)
    bad, queries = (sum(int(table[name]) for table in tables) for name in ("not_positive", "queries"))
    words = (
        f"is the 5th percentile of the separation Δ of {counted(len(tables), 'model')} with {top_words(findings)} "
    )
    words += f"masks; {bad:,} of {queries:,} queries{drawn_word(findings)} have none (Δ ≤ 0, a tie)"
    words += f"; for {len(every) - len(tables)} more it is not a number" if len(tables) < len(every) else ""
    answer = Answer.DOES_NOT if bad and not drawn(findings) else Answer.MEASURED
    return Glance(answer, f"{span_words([table['p5'] for table in tables], '{:.2g}')} nats", words)
