"""Where random keys cost less than the largest, and why, judged by the numbers of made-up runs."""

import math

import numpy as np
import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.questions.k_sweep import QUESTION
from semdiag.questions.k_sweep.judging import cheaper_random
from semdiag.questions.k_sweep.rerun import RERUN_TABLE

SAMPLES = 40
RIGHT = 0.02  # loss of a right answer


def runs(made_up, answers, targets=1, chunk=0):
    """Findings on one model; ``answers``: by mask and k the share of wrong answers and the loss of one."""
    rows = []
    for (mask, k), (wrong, loss) in {("none", 0): (0.0, 0.0), **answers}.items():
        is_wrong = np.arange(SAMPLES) < wrong * SAMPLES
        rows += [
            {
                "model": "m", "mask": mask, "k": k, "sample": sample, "part": 0, "chunk": chunk,
                "targets": targets, "correct": 0 if errs else targets, "predictions": targets, "changed": 0,
                "classes": 2, "loss": targets * (loss if errs else RIGHT), "divergence": 0.0, "output_change": 0.0,
                "kept": float(max(k, 1)), "keys": 16.0,
            }
            for sample, errs in enumerate(is_wrong)
        ]  # fmt: skip
    found = made_up(("m", np.ones(8), {"attention": "full"}))
    return Findings(found.replace(rerun=RERUN_TABLE.of_rows(rows)))


SURE = {
    ("topk", 1): (0.5, 16.0), ("random", 1): (0.5, 3.0),
    ("topk", 2): (0.25, 12.0), ("random", 2): (0.4, 3.0),
    ("topk", 4): (0.0, 0.0), ("random", 4): (0.4, 3.0),
}  # fmt: skip


def test_a_sure_model_loses_more_with_its_largest_keys_than_at_random(made_up):
    findings = runs(made_up, SURE)
    control = cheaper_random(findings, "m")
    assert control.ks == (1, 2)
    assert (control.accuracy, control.random_accuracy) == (0.75, 0.6)
    assert control.largest_excess == pytest.approx(0.5 * (16 - 3))
    assert control.error_loss == pytest.approx((0.5 * 16 + 0.25 * 12) / 0.75)
    assert control.random_error_loss == pytest.approx(3)
    excess = (0.5 * 16 + 0.25 * 12 + 1.25 * RIGHT) / 2 - (0.9 * 3 + 1.1 * RIGHT) / 2
    errors = (0.75 + 0.9) / 4
    assert control.by_errors == pytest.approx(errors * (control.error_loss - 3) / excess)
    assert control.overconfident
    claim = next(each for each in QUESTION.answered(findings).headline if each.id == "cheaper-random")
    assert (claim.subject, claim.value, claim.unit) == ("m", control.largest_excess, "nats")


def test_more_wrong_answers_of_the_same_loss_are_no_overconfidence(made_up):
    control = cheaper_random(runs(made_up, {("topk", 1): (0.5, 3.0), ("random", 1): (0.1, 3.0)}), "m")
    assert control.ks == (1,)
    assert control.by_errors == pytest.approx(0)
    assert not control.overconfident


def test_of_several_targets_a_sample_it_is_unknown_what_a_wrong_answer_costs(made_up):
    control = cheaper_random(runs(made_up, SURE, targets=5), "m")
    assert control.ks == (1, 2)
    assert math.isnan(control.by_errors)
    assert not control.overconfident


@pytest.mark.parametrize(
    ("answers", "chunk"),
    [
        ({("topk", 1): (0.5, 3.0), ("random", 1): (0.5, 3.0)}, 0),  # a tie
        ({("topk", 1): (0.5, 3.01), ("random", 1): (0.5, 3.0)}, 0),  # within the limit
        ({("topk", 1): (0.025, 16.0), ("random", 1): (0.0, 0.0)}, 0),  # one sample alone
        ({("topk", 1): (0.5, 16.0), ("random", 2): (0.5, 3.0)}, 0),  # at another k
        (SURE, 128),  # chunks of few texts say nothing of others
    ],
)
def test_without_a_sure_difference_nothing_is_claimed(answers, chunk, made_up):
    findings = runs(made_up, answers, chunk=chunk)
    assert cheaper_random(findings, "m") is None
    assert all(claim.id != "cheaper-random" for claim in QUESTION.answered(findings).headline)
