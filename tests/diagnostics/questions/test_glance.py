"""Answers at one glance: the number has its denominator, and the word follows from it."""

import re

import numpy as np
import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings, Verdict, find_pairs
from semdiag.measuring.measure import Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.survey import survey
from semdiag.presenting.answer import Outcome, measured_glance, sentences_of
from semdiag.questions.bounds.corollary import corollary_findings
from semdiag.questions.dispersion.answer import (
    dispersion_claims,
    dispersion_glance,
    layer_ratios,
    pair_comparisons,
)
from semdiag.questions.learning import learning_glance
from semdiag.questions.mask_stability.answer import masks_glance
from semdiag.questions.mask_stability.measure import NoisePlan
from semdiag.questions.separation.answer import separation_claims, separation_glance
from semdiag.questions.stability.answer import stability_glance
from semdiag.questions.stability.measure import SecantsPlan


@pytest.fixture(scope="module")
def pair(tiny_runs):
    """Measurements of the tiny runs: full and top-k."""
    conditions = Conditions(samples=6, k=(3, 5), plans=(SecantsPlan((0.01,)),))
    return survey([tiny_runs.full, tiny_runs.topk], conditions)


def history(measurements, full, topk, seeds=1):
    """The measurements, with training accuracies by epoch of both runs; as if of several seeds."""
    each = [
        measurements.models.assign(model=measurements.models["model"] + f"-{n}", seed=n) for n in range(1, seeds)
    ]
    models = pd.concat([measurements.models, *each], ignore_index=True)
    rows = [
        {"model": model, "epoch": epoch, "train_accuracy": value}
        for model, values in zip(models["model"], (full, topk) * seeds, strict=True)
        for epoch, value in enumerate(values, 1)
    ]
    return measurements.replace(models=models, history=pd.DataFrame(rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "answer", "number"), [(100, "holds", "1 of 1 pair"), (0.01, "does not hold", "0 of 1 pair")]
)
def test_the_dispersion_of_a_pair(pair, factor, answer, number):
    queries = pair.queries.copy()
    queries.loc[queries["model"].str.contains("full"), "dispersion"] *= factor
    glance = dispersion_glance(Findings(pair.replace(queries=queries)))
    assert (glance.answer, glance.number) == (answer, number)


def diverged(measurements, kind="topk"):
    """The measurements, with a score of one model's last layer that is no number."""
    (model,) = (name for name in measurements.models["model"] if kind in name.rsplit("/", 1)[-1])
    bad = pd.DataFrame({"model": [model], "sample": [0], "layer": [1], "head": [0], "scores": [3]})
    return measurements.replace(non_finite=bad)


@pytest.mark.parametrize("kind", ["full", "topk"])
def test_of_a_diverged_model_no_verdict_is_given(pair, kind):
    factor = pair.queries["model"].str.contains("full").map({True: 100.0, False: 1.0})
    smaller = pair.replace(queries=pair.queries.assign(dispersion=pair.queries["dispersion"] * factor))
    assert dispersion_glance(Findings(smaller)).answer is Outcome.HOLDS
    findings = Findings(diverged(smaller, kind))
    glance = dispersion_glance(findings)
    assert (glance.answer, glance.number) == (Outcome.OPEN, "0 of 1 pair")
    (compared,) = pair_comparisons(findings)
    assert compared.answer == "inconclusive"
    assert np.isnan([compared.ratio.estimate, compared.ratio.low, compared.ratio.high]).all()
    said = [glance.words, compared.sentence, *corollary_sentences(findings)]
    assert not any(re.search(r"\bnan\b|holds", each) for each in said)
    ratios = layer_ratios(findings).set_index("layer")["ratio"]
    assert ratios.loc[0].notna().all()
    assert ratios.loc[1].isna().all()


def corollary_sentences(findings):
    (pair,) = find_pairs(findings.measurements.models)[0]
    found = corollary_findings(findings, pair)
    assert [f.verdict for f in found] == [Verdict.NOTHING]
    return [found[0].note]


def test_one_sample_has_no_interval_and_small_ratios_keep_their_digits(pair):
    """A ratio of hundred-thousandths is not 0.00, and of δ = 0 there is none."""
    full = pair.queries["model"].str.contains("full")
    few = pair.queries["sample"] == pair.queries["sample"].iloc[0]
    queries = pair.queries[few].assign(dispersion=np.where(full[few], 1.0, 4e-5))
    one = Findings(pair.replace(queries=queries))
    (said,) = (each.sentence for each in pair_comparisons(one))
    assert said.endswith("(median δₕ 4e-05 against δₛ 1 nats, ratio 4e-05, 1 sample: too few for an interval).")
    assert "(ratio of the medians 4e-05)" in dispersion_glance(one).words
    flat = Findings(pair.replace(queries=pair.queries.assign(dispersion=0.0)))
    (said,) = (each.sentence for each in pair_comparisons(flat))
    assert said.endswith("(median δₕ 0 against δₛ 0 nats).")
    assert "ratio" not in dispersion_glance(flat).words


def test_before_training_a_smaller_dispersion_is_no_focus(pair):
    """A mask alone has the smaller range; beside trained pairs the ratio is told."""
    factor = pair.queries["model"].str.contains("full").map({True: 100.0, False: 1.0})
    smaller = pair.replace(queries=pair.queries.assign(dispersion=pair.queries["dispersion"] * factor))
    first = smaller.replace(models=smaller.models.assign(snapshot="initialisation"))
    glance = dispersion_glance(Findings(first))
    assert (glance.answer, glance.number) == (Outcome.OPEN, "1 of 1 pair")
    assert glance.words.endswith("; they are not trained yet")
    trained = dispersion_glance(Findings(smaller))
    assert (trained.answer, "initialisation" in trained.words) == (Outcome.HOLDS, False)


def test_without_a_pair_nobody_can_tell(pair):
    alone = pair.of(pair.models["model"].iloc[0])
    glance = dispersion_glance(Findings(alone))
    assert glance.answer is Outcome.OPEN
    assert f"of 1 model ({len(alone.queries):,} queries)" in glance.words
    assert separation_glance(Findings(alone)).answer is Outcome.OPEN


def test_separations_that_are_not_positive_are_counted(pair):
    topk = pair.queries["model"].str.contains("topk")
    queries = pair.queries.copy()
    queries.loc[queries.index[topk][:2], "separation"] = [0.0, -1.0]
    glance = separation_glance(Findings(pair.replace(queries=queries)))
    clean = int((pair.queries[topk]["separation"] <= 0).sum())
    assert glance.answer is Outcome.DOES_NOT
    assert f"; {clean + 2:,} of {topk.sum():,} queries have none" in glance.words
    finite = queries[topk]["separation"][lambda gaps: gaps < np.inf]
    assert glance.number == f"{np.percentile(finite, 5):.2g} nats"


@pytest.mark.parametrize("undefined", ["first", "last"])
def test_a_separation_that_is_no_number_hides_no_other(pair, undefined):
    """A top-k mask with as many keys as there are drops nothing: its Δ is undefined."""
    topk = pair.of(pair.models["model"].iloc[1])
    name = "whole/last.pt"
    named = {t: getattr(topk, t).assign(model=name) for t in ("models", "queries", "loads")}
    queries = named["queries"].assign(separation=np.inf)
    whole = topk.replace(**named | {"queries": queries, "history": topk.history.iloc[:0]})
    both = (whole, topk) if undefined == "first" else (topk, whole)
    findings, alone = Findings(Measurements.concat(both)), separation_glance(Findings(topk))
    glance = separation_glance(findings)
    assert (glance.answer, glance.number) == (alone.answer, alone.number)
    assert glance.words == f"{alone.words}; for 1 more it is not a number"
    said = sentences_of(separation_claims(findings))
    assert not any(re.search(r"\bnan\b", each) for each in said)
    assert sum("no query drops a key, so the separation Δ is undefined. The busiest" in s for s in said) == 1


def test_of_a_diverged_model_no_separation_is_told(pair):
    findings = Findings(diverged(pair))
    glance = separation_glance(findings)
    assert (glance.answer, glance.number) == (Outcome.OPEN, "0 of 1 model")
    (claim,) = separation_claims(findings)
    assert claim.sentence.endswith(
        "the separation Δ and the key loads are unknown, because attention scores are NaN or infinite."
    )


@pytest.mark.parametrize(
    ("full", "topk", "answer", "number"),
    [
        ([0.5, 0.96], [0.96, 1.0], Outcome.HOLDS, "3 of 3 pairs"),
        ([0.96, 1.0], [0.5, 0.96], Outcome.DOES_NOT, "0 of 3 pairs"),
        ([0.5, 0.6], [0.5, 0.96], Outcome.HOLDS, "3 of 3 pairs"),
        ([0.5, 0.6], [0.5, 0.6], Outcome.OPEN, "0 pairs"),
        ([0.96, 1.0], [0.97, 1.0], Outcome.OPEN, "0 of 3 pairs"),
    ],
)
def test_who_learned_first(pair, full, topk, answer, number):
    glance = learning_glance(Findings(history(pair, full, topk, seeds=3)))
    assert (glance.answer, glance.number, glance.of_paper) == (answer, number, True)


def test_two_seeds_tell_nothing_about_speed(pair):
    glance = learning_glance(Findings(history(pair, [0.5, 0.96], [0.96, 1.0], seeds=2)))
    assert (glance.answer, glance.number) == (Outcome.OPEN, "2 of 2 pairs")
    assert glance.words.endswith("; 2 seeds of even-pairs: at least 3 of one task would tell")


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ((1.0, 0.3), "before training it is 0.30: the mask alone does most of it."),
        ((1.0, 0.9), "before training it is 0.90: most of it was learned."),
        ((1.0,), "is not known: no initialisation was measured."),
    ],
)
def test_the_headline_of_pairs_names_the_initialisation(pair, before, said):
    """The ratio of the tiny pair is about 0.25, so that half of it, on the logarithmic scale, is 0.5."""
    table = pd.DataFrame({"model": pair.models["model"][: len(before)], "samples": 6, "dispersion": before})
    first = dispersion_claims(Findings(pair.replace(initialisation=table)))[0]
    assert first.id == "ratio"
    assert 0 < first.value < 1
    assert first.sentence.endswith(said)


def test_layers_with_the_smaller_median_are_counted(pair):
    def claim(measured):
        claims = dispersion_claims(Findings(measured))
        return next(each for each in claims if each.id == "layers")

    layers = pair.queries["layer"].nunique()
    assert claim(pair).value == layers
    queries = pair.queries.copy()
    queries.loc[queries["model"].str.contains("topk") & (queries["layer"] == 0), "dispersion"] *= 100
    assert claim(pair.replace(queries=queries)).value == layers - 1


def test_ties_are_nobodys_and_said(pair):
    glance = learning_glance(Findings(history(pair, [0.96, 1.0], [0.97, 1.0])))
    assert glance.words.startswith(
        "in which the top-3 model reached 95% training accuracy in fewer epochs; in 1 both needed"
    )
    behind = learning_glance(Findings(history(pair, [0.96, 1.0], [0.5, 1.0])))
    assert "in fewer epochs; in 1 full attention did; 1 seed of" in behind.words
    ahead = learning_glance(Findings(history(pair, [0.5, 1.0], [0.97, 1.0])))
    assert "in fewer epochs; 1 seed of" in ahead.words


def test_exceeded_bounds_have_their_denominator(pair):
    glance = stability_glance(Findings(pair))
    assert glance.answer in (Outcome.MEASURED, Outcome.OPEN)  # that nothing exceeds it makes it no bound
    assert glance.number == f"0 of {len(pair.secants):,}"
    assert "it is too loose to test" in glance.words
    steep = pair.secants.assign(weight_change=2.0, score_change=1e-9)
    assert stability_glance(Findings(pair.replace(secants=steep))).answer is Outcome.DOES_NOT


def test_what_has_no_one_number_says_of_how_many_models(pair):
    assert measured_glance(Findings(pair), pair.secants).number == "2 of 2 models"


@pytest.mark.slow
def test_masks_that_a_model_has_and_those_it_would_have_are_told_apart(tiny_runs):
    full, topk = tiny_runs.full, tiny_runs.topk
    of_both, of_full = (
        survey(runs, Conditions(samples=6, plans=(NoisePlan((0.01,), draws=2, k=3),)))
        for runs in ([full, topk], [full])
    )
    exact = of_both.masks["model"].map(lambda model: 0.5 if "full" in model else 0.25)
    both = masks_glance(Findings(of_both.replace(masks=of_both.masks.assign(exact=exact.astype("float32")))))
    assert (both.answer, both.number) == (Outcome.MEASURED, "25%")
    assert both.words.startswith(
        "of the masks of 1 model stay the same under noise of 1%; 50% of those that top-3 would choose in "
        "1 model without a mask; 0 of "
    )
    alone = masks_glance(Findings(of_full))
    assert alone.words.startswith(
        "of the masks that top-3 would choose in 1 model stay the same under noise of 1%; "
    )
