"""The answer at one glance."""

from semdiag.capturing.attention_kinds import FIXED_MASKS
from semdiag.measuring.findings.finding import Verdict
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import compared_pairs
from semdiag.presenting.glance import Answer, Glance, top_words
from semdiag.questions.bounds.answer.corollary import CLAIMS, JUDGED_PERCENTILES
from semdiag.questions.bounds.answer.summary import bounds_findings


def bounds_glance(findings: Findings) -> Glance:
    """Return in how many cases the paper's corollary gives a top-k mask the better guarantee."""
    models = findings.measurements.models
    fixed_masks = set(models[models["attention"].isin(FIXED_MASKS)]["model"])
    labels = {pair.label for pair in findings(compared_pairs) if pair.other not in fixed_masks}
    cases = [
        f
        for f in findings(bounds_findings)
        if f.claim in CLAIMS and f.form == "paper" and f.percentile in JUDGED_PERCENTILES and f.subject in labels
    ]
    stated = [f for f in cases if f.verdict is not Verdict.NOT_MET]
    if not stated:
        return Glance(
            Answer.OPEN, "0 cases", "in which the corollary says anything about a top-k mask", claim=True
        )
    met = sum(f.verdict is Verdict.HOLDS for f in stated)
    return Glance(
        Answer.HOLDS if met == len(stated) else Answer.DOES_NOT, f"{met:,} of {len(stated):,} cases",
        f"in which the {top_words(findings)} mask has the better guarantee by Corollary 1 as printed (p75 to "
        "p95, W and X)",
        claim=True,
    )  # fmt: skip
