"""Rules of semdiag check: what is read, what is refused, and what they say of measurements."""

import math
from contextlib import suppress

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semdiag.measuring.findings.findings import Findings
from semdiag.reporting.gate import STATISTICS, apply_rules, gated_metrics, parse_rule
from semdiag_files import InputError

VALUES = np.linspace(1, 5, 101)


@given(
    st.sampled_from(gated_metrics()), st.sampled_from(STATISTICS), st.sampled_from(["<", "<=", ">", ">="]),
    st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["", " "]), st.integers(0, 30),
)  # fmt: skip
def test_what_is_written_is_what_is_read(metric, statistic, comparison, limit, blank, layer):
    rule = parse_rule(f"{metric}.{statistic}{blank}{comparison}{blank}{limit!r} layer={layer} attention=topk")
    assert (rule.metric, rule.statistic, rule.comparison, rule.limit) == (metric, statistic, comparison, limit)
    assert (rule.layer, rule.attention) == (layer, "topk")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be read"),
        ("dispersion", "cannot be read"),
        ("dispersion.p95 = 10", "cannot be read"),
        ("dispersion.p95 < 10; import os", "not a number"),
        ("__import__('os').p95 < 10", "cannot be read"),
        ("focus.p95 < 10", "focus"),
        ("dispersion.p94 < 10", "one of mean, p0"),
        ("dispersion < 10", "needs a statistic"),
        ("accuracy.p50 > 0.9", "takes no percentile"),
        ("accuracy > 0.9 layer=0", "whole model"),
        ("dispersion.p95 < ten", "not a number"),
        ("dispersion.p95 < nan", "not a number"),
        ("dispersion.p95 < inf", "not a number"),
        ("dispersion.p95 < 10 layer", "is not a filter"),
        ("dispersion.p95 < 10 layer=-1", "counted 0, 1, 2"),
        ("dispersion.p95 < 10 head=1", "head"),
        ("dispersion.p95 < 10 attention=topp", "topk"),
        ("dispersion.p95 < 10 layer=1 layer=2", "twice"),
    ],
)
def test_what_is_no_rule_is_refused_in_a_line(text, reason):
    with pytest.raises(InputError, match=reason) as refused:
        parse_rule(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_a_rule_may_choose_the_models_that_an_external_mask_makes(kind, made_up):
    """Models of others are causal or masked in the table of models, and are checked like any."""
    measured = made_up(("model", [1.0, 2.0], {"attention": kind}), ("other", [9.0], {}))
    (result,) = apply_rules(Findings(measured), [parse_rule(f"dispersion.p100 < 5 attention={kind}")])
    assert (result.model, result.value, result.passed) == ("model", 2.0, True)


@pytest.mark.slow
@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    with suppress(InputError):
        assert parse_rule(text).text == text


@pytest.fixture
def two(made_up):
    models = ("a/full.pt", VALUES, {}), ("a/top.pt", VALUES / 5, {"attention": "topk", "k": 5})
    return Findings(made_up(*models))


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("dispersion.p50 < 3.01", [True, True]),
        ("dispersion.p50 < 3", [False, True]),
        ("dispersion.p50 <= 3", [True, True]),
        ("dispersion.p100 > 2 attention=full", [True]),
        ("dispersion.p100 >= 2 model=*top*", [False]),
        ("dispersion.mean < 1 attention=topk layer=0", [True]),
    ],
)
def test_a_rule_is_applied_to_the_models_it_chooses(two, text, passed):
    assert [result.passed for result in apply_rules(two, [parse_rule(text)])] == passed


@pytest.mark.parametrize("text", ["dispersion.p50 < 9 attention=banded", "dispersion.p50 < 9 model=nothing"])
def test_a_rule_that_chooses_nothing_is_refused(two, text):
    with pytest.raises(InputError, match="chooses none of the models"):
        apply_rules(two, [parse_rule(text)])


def test_a_layer_that_is_not_there_is_refused(two):
    with pytest.raises(InputError, match="has the layers 0 to"):
        apply_rules(two, [parse_rule("dispersion.p50 < 9 layer=77")])


def test_what_is_undefined_does_not_pass(made_up):
    found = Findings(made_up(("x", np.full(10, np.nan), {})))
    (result,) = apply_rules(found, [parse_rule("dispersion.p50 < 9")])
    assert not result.passed
    assert math.isnan(result.value)


def test_a_model_whose_scores_are_no_numbers_does_not_pass_beside_others(made_up):
    models = ("full", VALUES, {}), ("top", VALUES / 5, {"attention": "topk", "k": 5}), ("fine", VALUES, {})
    broken = [{"model": m, "sample": 0, "layer": 0, "head": 0, "scores": 1} for m in ("full", "top")]
    found = Findings(made_up(*models).replace(non_finite=pd.DataFrame(broken)))
    results = apply_rules(found, [parse_rule("dispersion.p50 < 100"), parse_rule("separation.p50 > 0")])
    assert [(r.model, r.passed, r.known) for r in results] == [
        ("full", False, False), ("top", False, False), ("fine", True, True),
        ("top", False, False), ("fine", True, True),
    ]  # fmt: skip
    assert results[0].fault == "dispersion.p50 < 100 cannot be judged: dispersion.p50 is not a number"


def test_a_rule_is_no_longer_than_a_pattern_that_is_matched_at_once(two):
    """Brackets that nobody closes: 30,000 took minutes, as every one looks for its end through all the others."""
    start = "dispersion.p50 < 10 model="
    with pytest.raises(InputError, match=r"chooses none of the models"):
        apply_rules(two, [parse_rule(start + "[" * (1000 - len(start)))])
    with pytest.raises(InputError, match=r"A rule has up to 1,000 characters\. Got 30,026: 'dispersion"):
        parse_rule(start + "[" * 30_000)
