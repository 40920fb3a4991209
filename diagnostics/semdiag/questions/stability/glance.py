"""The answer at one glance."""

from semdiag.capturing.attention_kinds import DENSE, FIXED_MASKS
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.glance import Answer, Glance
from semdiag.questions.stability.answer import OF_PAIR, SECANTS, stability_findings


def stability_glance(findings: Findings) -> Glance:
    """Return how many measured pairs of rows exceed the paper's bound."""
    exceeded = findings(exceeding_pairs)
    if "paper" not in exceeded:
        return Glance(Answer.OPEN, "0 pairs of rows", "were measured in attention whose ξ is known", claim=True)
    paper, pair = exceeded["paper"], exceeded[OF_PAIR]
    mostly_vacuous = 2 * paper["vacuous"] > paper["rows"]
    # Even if no pair exceeds it, the paper's form is not a bound for every row (docs/theory.md).
    answer = Answer.DOES_NOT if paper["violated"] else Answer.OPEN if mostly_vacuous else Answer.MEASURED
    return Glance(
        answer, f"{paper['violated']:,} of {paper['rows']:,}",
        f"measured pairs of rows exceed the paper's bound ξ{_of_fixed(paper)} (for {paper['vacuous']:,} it is "
        f"too loose to test), {pair['violated']:,} exceed the sound one of the pair (too loose for "
        f"{pair['vacuous']:,})",
        claim=True,
    )  # fmt: skip


def _of_fixed(paper: dict[str, int]) -> str:
    """Return a remark if every pair that exceeds the bound belongs to a mask that ignores the scores."""
    return ", all of fixed masks" if 0 < paper["violated"] == paper["fixed"] else ""


def exceeding_pairs(findings: Findings) -> dict[str, dict[str, int]]:
    """Return counts of pairs of rows by form of ξ: judged, exceeding, vacuous, exceeding ones of fixed masks."""
    models = findings.measurements.models
    fixed = set(models[models["attention"].isin(FIXED_MASKS) & ~models["attention"].isin(DENSE)]["model"])
    exceeding = {}
    for form in (OF_PAIR, "sound", "paper"):
        judged = [f for f in findings(stability_findings) if f.claim == SECANTS and f.form == form]
        if judged:
            counts = {n: int(sum(f.numbers[n] for f in judged)) for n in ("violated", "vacuous", "holds")}
            of_fixed = int(sum(f.numbers["violated"] for f in judged if f.subject in fixed))
            exceeding[form] = {**counts, "rows": sum(counts.values()), "fixed": of_fixed}
    return exceeding
