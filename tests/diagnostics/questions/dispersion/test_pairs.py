"""The gate: δ_h < δ_s at p50, p75, p90 and p95 of every pair."""

import numpy as np
import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.questions.dispersion.answer import GATED, SHOWN, dispersion_gate
from semdiag_files import InputError

TOPK = {"attention": "topk", "k": 5}
LARGE = np.linspace(1, 2, 100)


def gate(made_up, full, topk):
    return dispersion_gate(Findings(made_up(("f", full, {}), ("t", topk, TOPK))))[0]


def test_smaller_dispersions_pass(made_up):
    result = gate(made_up, LARGE, LARGE / 2)
    assert (result.passed, result.failed) == (True, ())
    assert (result.pair.full, result.pair.counterpart) == ("f", "t")
    for p in (50, 75, 90, 95, 100):
        assert result.full[f"p{p}"] == np.percentile(LARGE, p)
        assert result.topk[f"p{p}"] == np.percentile(LARGE / 2, p)
    assert tuple(result.full) == tuple(result.topk) == SHOWN == (*GATED, "p100")


def test_larger_dispersions_fail_everywhere(made_up):
    result = gate(made_up, LARGE / 2, LARGE)
    assert (result.passed, result.failed) == (False, GATED)


def test_equal_dispersions_fail(made_up):
    assert gate(made_up, LARGE, LARGE).failed == GATED


@pytest.mark.parametrize(("above", "failed"), [(92, ("p95",)), (80, ("p90", "p95")), (40, GATED)])
def test_a_pair_fails_at_the_percentiles_at_which_it_fails(made_up, above, failed):
    topk = LARGE / 2
    topk[above:] = 3
    assert gate(made_up, LARGE, topk).failed == failed


def test_the_maximum_is_shown_and_not_judged(made_up):
    topk = LARGE / 2
    topk[-1] = 50
    result = gate(made_up, LARGE, topk)
    assert result.passed
    assert result.topk["p100"] == 50 > result.full["p100"]


def test_dispersions_that_are_no_numbers_fail(made_up):
    assert gate(made_up, LARGE, np.full(100, np.nan)).failed == GATED
    assert gate(made_up, np.full(100, np.nan), LARGE).failed == GATED


def test_of_scores_that_are_no_numbers_nobody_can_tell(made_up):
    """The dispersions of the other queries are finite and small, and say nothing of the model."""
    measured = made_up(("f", LARGE, {}), ("t", LARGE / 2, TOPK))
    broken = {"model": ["t"], "sample": [0], "layer": [0], "head": [0], "scores": [3]}
    (result,) = dispersion_gate(Findings(measured.replace(non_finite=pd.DataFrame(broken))))
    assert (result.passed, result.unknown) == (False, GATED)
    assert result.fault == "δ_h < δ_s cannot be judged at p50, p75, p90, p95, because a δ there is not a number"
    assert gate(made_up, LARGE / 2, LARGE).fault == "δ_h < δ_s fails at p50, p75, p90, p95"


def test_every_pair_is_judged_on_its_own(made_up):
    other = {"seed": 2}
    models = [("f", LARGE, {}), ("t", LARGE / 2, TOPK), ("g", LARGE, other), ("u", 2 * LARGE, {**TOPK, **other})]
    results = dispersion_gate(Findings(made_up(*models)))
    assert [(r.pair.counterpart, r.passed) for r in results] == [("t", True), ("u", False)]


@pytest.mark.parametrize("facts", [{}, TOPK])
def test_a_missing_partner_is_no_pass(made_up, facts):
    with pytest.raises(InputError, match=r"^x has no partner: .* Train the other one with semdiag train,"):
        dispersion_gate(Findings(made_up(("x", LARGE, facts))))


def test_a_missing_partner_is_told_beside_the_nearest_model(made_up):
    near, far = {"setting": "learning_rate 0.5"}, {"setting": "learning_rate 0.5", "seed": 2}
    models = made_up(("t", LARGE, {**TOPK, "setting": "usual"}), ("far", LARGE, far), ("near", LARGE, near))
    with pytest.raises(
        InputError, match=r"^t has no partner: .* \(near differs from it in setting usual and learn"
    ):
        dispersion_gate(Findings(models))


def test_two_full_models_that_differ_are_no_partner(made_up):
    models = [(name, LARGE, {"weights_sha256": name}) for name in "fg"]
    with pytest.raises(InputError, match=r"^f and g could both be the partner of t, and differ: name one\.$"):
        dispersion_gate(Findings(made_up(*models, ("t", LARGE, TOPK))))
    dispersion_gate(Findings(made_up(models[0], ("t", LARGE, TOPK))))


def test_nothing_to_pair_is_no_pass(made_up):
    with pytest.raises(
        InputError, match=r"^There is no full or top-k checkpoint to pair\. .*semdiag train even-pairs"
    ):
        dispersion_gate(Findings(made_up(("x", LARGE, {"attention": "banded", "k": 3}))))
