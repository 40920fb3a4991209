"""The answer to each question of a report at one glance: a word, a number with its denominator, what it counts."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np
import pandas as pd

from semdiag.capturing.attention_kinds import DENSE, FIXED_MASKS, external
from semdiag.questions.convergence.answer.epochs import epochs_to
from semdiag.measuring.findings.counterfactuals import counterfactual_ks, what_k_keeps
from semdiag.questions.dispersion.answer.comparisons import PairComparison, pair_comparisons
from semdiag.measuring.findings.distributions import pooled_percentiles
from semdiag.measuring.findings.estimates import drawn, in_part
from semdiag.measuring.findings.findings import Findings
from semdiag.questions.mask_stability.answer import mask_table
from semdiag.measuring.findings.pairing import compared_pairs, find_pairs
from semdiag.measuring.findings.number_words import keys_words, percent, ratio_words
from semdiag.questions.bounds.answer.summary import bounds_findings
from semdiag.questions.bounds.answer.corollary import CLAIMS, JUDGED_PERCENTILES
from semdiag.measuring.findings.finding import Verdict
from semdiag.questions.stability.answer import SECANTS, stability_findings
from semdiag.measuring.table import ALL


class Answer(StrEnum):
    """What a question of a report was answered with."""

    HOLDS = "holds"
    DOES_NOT = "does not hold"
    OPEN = "cannot tell"
    PLAUSIBLE = "plausible"  # sparse attention: it would do
    COSTS = "not without loss"  # sparse attention: it would not
    MEASURED = "measured"  # the question has no yes or no


@dataclass(frozen=True)
class Glance:
    """An answer at one glance.

    Attributes:
        answer: in a word.
        number: with its denominator, like ``3 of 3 pairs``; empty where there is none.
        words: what the number counts.
    """

    answer: Answer
    number: str
    words: str

    def to_dict(self) -> dict[str, str]:
        """As plain values."""
        return {**asdict(self), "answer": self.answer.value}


def dispersion_glance(findings: Findings) -> Glance:
    """In how many pairs the top-k model has the smaller dispersion; of models without a pair, the dispersion.

    A mask has the smaller range of scores before anything is learned: of untrained pairs nothing holds or not.
    """
    compared = findings(pair_comparisons)
    untrained = [pair for pair in compared if pair.snapshot == "initialisation"]
    trained = [pair for pair in compared if pair not in untrained]
    pairs = [pair for pair in trained if pair.snapshot == "last"] or trained or untrained
    if pairs:
        known = [pair for pair in pairs if not pair.gate.unknown]
        if not known:
            words = "of a full and a top-k model have a finite dispersion δ on both sides"
            return Glance(Answer.OPEN, _of(0, len(pairs), "pair"), words)
        passed = sum(pair.gate.passed for pair in known)
        answer = Answer.HOLDS if passed == len(known) else Answer.DOES_NOT
        number = _of(passed, len(known), "pair")
        words = "in which the top-k model has the smaller dispersion δ at the 50th, 75th, 90th and 95th percentile"
        notes = _ratios("ratio of the medians", known)
        notes += _ratios("at initialisation", untrained) if trained else []
        words += f" ({'; '.join(notes)})" if notes else ""
        words += "" if trained else "; they are not trained yet"
        words += f"; {len(pairs) - len(known)} more cannot be judged" if len(known) < len(pairs) else ""
        return Glance(answer if trained else Answer.OPEN, number, words)
    every = findings(pooled_percentiles, "dispersion").values()
    found = [each for each in every if np.isfinite(each["p50"])]
    if not found:
        return Glance(Answer.OPEN, f"0 of {_models(len(every))}", "have a finite dispersion δ")
    queries = sum(int(each["queries"]) for each in found)
    span = _span([each["p50"] for each in found], "{:.3g}")
    words = f"is the median dispersion δ of {_models(len(found))} ({queries:,} queries{_drawn(findings)})"
    words += f"; for {len(every) - len(found)} more it is not a number" if len(found) < len(every) else ""
    if external(findings.measurements.models).all():
        return Glance(Answer.MEASURED, f"{span} nats", words)
    why = (
        "only some queries were drawn or kept, but a verdict on pairs needs all of them"
        if in_part(findings)
        else ("no pair of a full and a top-k model to compare")
    )
    return Glance(Answer.OPEN, f"{span} nats", f"{words}; {why}")


def _ratios(name: str, pairs: Sequence[PairComparison]) -> list[str]:
    """The range of the ratios of the medians that are numbers; nothing if none is."""
    ratios = [pair.ratio.estimate for pair in pairs if np.isfinite(pair.ratio.estimate)]
    return [f"{name} {_span(ratios, ratio_words)}"] if ratios else []


def within_glance(findings: Findings) -> Glance:
    """What the smallest k asked for would keep of the attention weight of the models that keep every key."""
    measurements = findings.measurements
    queries = measurements.queries
    ks = [k for k in counterfactual_ks(queries) if f"mass_k{k}" in queries]
    if not ks:
        return Glance(Answer.OPEN, "0 models", "were measured for the weight on their largest scores")
    k = min(ks)
    dense = measurements.models[measurements.models["attention"].isin(DENSE)]["model"]
    kept = {model: found for model in dense if (found := findings(what_k_keeps, model, k))}
    if not kept:
        return Glance(Answer.OPEN, "0 queries", f"have more than {keys_words(k)} and finite scores")
    count = int(((queries["keys"] > k) & queries["model"].isin(kept)).sum())
    words = f"of the weight of the median query is on its {k} largest scores"
    words += f" ({count:,} queries{' drawn or kept' * in_part(findings)} of {_models(len(kept))})"
    return Glance(Answer.MEASURED, f"{_span([each['mass'] for each in kept.values()], percent)} %", words)


def separation_glance(findings: Findings) -> Glance:
    """How small the separation of the models is that keep their largest scores; Δ ≤ 0 is a tie, which ends it."""
    models = findings.measurements.models
    diverged = models["model"].isin(findings.measurements.non_finite["model"])
    sparse = models[(models["attention"] == "topk") & ~diverged]["model"]
    found = findings(pooled_percentiles, "separation")
    every = [found[model] for model in models[models["attention"] == "topk"]["model"] if model in found]
    tables = [found[model] for model in sparse if model in found and np.isfinite(found[model]["p5"])]
    if not every:
        return Glance(Answer.OPEN, "0 models", "keep the keys with the largest scores")
    if not tables:
        words = "that keep the keys with the largest scores have a finite separation Δ"
        return Glance(Answer.OPEN, f"0 of {_models(len(every))}", words)
    bad, queries = (sum(int(table[name]) for table in tables) for name in ("not_positive", "queries"))
    words = f"is the 5th percentile of the separation Δ of {_models(len(tables))} with top-k masks; {bad:,} of "
    words += f"{queries:,} queries{_drawn(findings)} have none (Δ ≤ 0, a tie)"
    words += f"; for {len(every) - len(tables)} more it is not a number" if len(tables) < len(every) else ""
    answer = Answer.DOES_NOT if bad and not drawn(findings) else Answer.MEASURED
    return Glance(answer, f"{_span([table['p5'] for table in tables], '{:.2g}')} nats", words)


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
    return Glance(answer, _of(first, len(judged), "pair"), words)


def stability_glance(findings: Findings) -> Glance:
    """How many measured pairs of rows exceed the paper's bound."""
    exceeded = findings(exceeding_pairs)
    if "paper" not in exceeded:
        return Glance(Answer.OPEN, "0 pairs of rows", "were measured in attention whose ξ is known")
    paper, sound = exceeded["paper"], exceeded["sound"]
    mostly_vacuous = 2 * paper["vacuous"] > paper["rows"]
    # That no pair exceeds it does not make it a bound: the paper's form is none for every row (docs/theory.md).
    answer = Answer.DOES_NOT if paper["violated"] else Answer.OPEN if mostly_vacuous else Answer.MEASURED
    return Glance(
        answer, f"{paper['violated']:,} of {paper['rows']:,}",
        f"measured pairs of rows exceed the paper's bound ξ (for {paper['vacuous']:,} it is vacuous), "
        f"{sound['violated']:,} exceed the sound one",
    )  # fmt: skip


def exceeding_pairs(findings: Findings) -> dict[str, dict[str, int]]:
    """By form of ξ: pairs of rows that it speaks about, that exceed it, and that cannot; those of fixed masks.

    Args:
        findings: with or without secants.
    """
    models = findings.measurements.models
    fixed = set(models[models["attention"].isin(FIXED_MASKS)]["model"])
    found = {}
    for form in ("sound", "paper"):
        own = [f for f in findings(stability_findings) if f.claim == SECANTS and f.form == form]
        if own:
            counts = {n: int(sum(f.numbers[n] for f in own)) for n in ("violated", "vacuous", "holds")}
            of_fixed = int(sum(f.numbers["violated"] for f in own if f.subject in fixed))
            found[form] = {**counts, "rows": sum(counts.values()), "fixed": of_fixed}
    return found


def bounds_glance(findings: Findings) -> Glance:
    """In how many cases the paper's corollary gives a top-k mask the better guarantee."""
    models = findings.measurements.models
    fixed = set(models[models["attention"].isin(FIXED_MASKS)]["model"])
    heavy = {pair.label for pair in findings(compared_pairs) if pair.other not in fixed}
    cases = [
        f
        for f in findings(bounds_findings)
        if f.claim in CLAIMS and f.form == "paper" and f.percentile in JUDGED_PERCENTILES and f.subject in heavy
    ]
    stated = [f for f in cases if f.verdict is not Verdict.NOT_MET]
    if not stated:
        return Glance(Answer.OPEN, "0 cases", "in which the corollary says anything about a top-k mask")
    met = sum(f.verdict is Verdict.HOLDS for f in stated)
    return Glance(
        Answer.HOLDS if met == len(stated) else Answer.DOES_NOT, f"{met:,} of {len(stated):,} cases",
        "in which the top-k mask has the better guarantee by Corollary 1 as printed (p75 to p95, W and X)",
    )  # fmt: skip


def masks_glance(findings: Findings) -> Glance:
    """How many masks stay the same under the middle noise level: models' own, and those that they would have."""
    table = findings(mask_table)
    table = table[table["layer"] == ALL]
    if table.empty:
        return Glance(Answer.OPEN, "0 models", "have a mask that depends on the input")
    levels = sorted(table["level"].unique())
    rows = table[table["level"] == levels[len(levels) // 2]]
    kinds = findings.measurements.models.set_index("model")["attention"]
    without = rows["model"].map(kinds).isin(DENSE)
    own, supposed = rows[~without], rows[without]
    noise = f"stay the same under noise of {levels[len(levels) // 2]:g}"
    chosen = f"that top-{findings.measurements.provenance['mask_noise']['k']} would choose"
    certified, changed = int(rows["certified_rows"].sum()), int(rows["certified_changed"].sum())
    tail = f"{changed:,} of {certified:,} certified ones changed"
    if own.empty:
        return Glance(
            Answer.MEASURED, _share(supposed), f"of the masks {chosen} in {_models(len(supposed))} {noise}; {tail}"
        )
    if len(supposed):
        tail = f"{_share(supposed)} of those {chosen} in {_models(len(supposed))} without a mask; {tail}"
    return Glance(Answer.MEASURED, _share(own), f"of the masks of {_models(len(own))} {noise}; {tail}")


def _share(masks: pd.DataFrame) -> str:
    return f"{_span(list(masks['exact']), percent)} %"


def measured_glance(*tables: str) -> Callable[[Findings], Glance]:
    """Of a question that has no one number: how many models it was asked of.

    Args:
        tables: of measurements, that hold what was measured.
    """

    def glance(findings: Findings) -> Glance:
        measurements = findings.measurements
        models = {model for name in tables for model in getattr(measurements, name)["model"]}
        return Glance(Answer.MEASURED, f"{len(models)} of {_models(len(measurements.models))}", "measured")

    return glance


def _drawn(findings: Findings) -> str:
    return " drawn" if drawn(findings) else ""


def _of(some: int, every: int, thing: str) -> str:
    return f"{some:,} of {every:,} {thing}{'s' * (every != 1)}"


def _models(count: int) -> str:
    return f"{count} model{'s' * (count != 1)}"


def _span(values: list[float], form: str | Callable[[float], str]) -> str:
    """One number, or the smallest and the largest of several, all finite."""
    said = form.format if isinstance(form, str) else form
    low, high = (re.sub("^-", "−", said(end)) for end in (min(values), max(values)))
    signed = any(end.startswith(("−", "<", ">")) for end in (low, high))  # −3 to 98, 85 to > 99.9
    return low if low == high else f"{low} to {high}" if signed else f"{low}–{high}"
