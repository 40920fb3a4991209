"""Measuring several checkpoints under the same conditions."""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch

from semdiag.capturing.loading import load
from semdiag.measuring.measure import Conditions, measure
from semdiag.measuring.survey import survey
from semdiag.questions.bounds.measure import CONSTANTS, PARAMETERS, BoundsPlan
from semdiag.questions.mask_stability.measure import NoisePlan
from semdiag.questions.stability.measure import SECANTS, SecantsPlan
from semdiag_files import InputError

TABLES = ("models", "queries", "loads", "history", "non_finite")


@pytest.fixture
def padded_inputs(tmp_path):
    """Three samples with 12, 5 and 2 tokens."""
    tokens = np.full((3, 12), 2)
    for row, length in zip(tokens, (12, 5, 2), strict=True):
        row[:length] = np.arange(length) % 2
    np.save(tmp_path / "inputs.npy", tokens)
    return tmp_path / "inputs.npy"


@pytest.mark.slow
def test_every_model_is_measured_on_its_own_held_out_samples(tiny_runs, tiny_models):
    conditions = Conditions(samples=10, batch_size=4, dtype="float32", device="cpu")  # where the models are
    found = survey([tiny_runs.full, tiny_runs.topk], conditions)
    assert found.models["model"].tolist() == [str(tiny_runs.full), str(tiny_runs.topk)]
    for model in tiny_models:
        tokens, labels, source = model.default_inputs(10, 0)
        expected = measure(model, tokens, labels=labels, inputs=source, batch_size=4)
        own = found.of(model.path)
        for name in TABLES:
            table = getattr(own, name).reset_index(drop=True)
            pd.testing.assert_frame_equal(table, getattr(expected, name), check_dtype=name != "non_finite")
    assert found.models["accuracy"].notna().all()
    assert (found.provenance["seed"], found.provenance["samples"]) == (0, 10)


def test_the_accuracy_is_that_of_the_training_history(tiny_runs, tiny_models):
    found = survey([tiny_runs.full], Conditions(samples=tiny_runs.holdout_samples))
    assert found.models["accuracy"].item() == pytest.approx(tiny_models[0].history["holdout_accuracy"][-1])


def test_the_first_of_given_inputs_are_measured_where_a_number_is_said(tiny_runs, padded_inputs):
    first = survey([tiny_runs.topk], Conditions(inputs=padded_inputs, first=1))
    assert first.models["samples"].item() == 1
    assert first.models["inputs"].item() == f"{padded_inputs} (given), the first 1 of 3"
    with pytest.raises(InputError, match="The inputs hold only 3 samples"):
        survey([tiny_runs.topk], Conditions(inputs=padded_inputs, first=4))


def test_given_inputs_replace_the_held_out_samples(tiny_runs, padded_inputs):
    found = survey([tiny_runs.topk], Conditions(inputs=padded_inputs, samples=1))
    assert found.models["samples"].item() == found.provenance["samples"] == 3
    assert found.models["inputs"].item() == f"{padded_inputs} (given)"
    assert found.models["accuracy"].isna().all()
    assert sorted(set(found.queries["keys"])) == [2, 5, 12]


@pytest.mark.slow
def test_counterfactuals_are_asked_of_full_models_only(tiny_runs):
    found = survey([tiny_runs.full, tiny_runs.topk], Conditions(samples=4, k=(2, 5)))
    assert found.of(str(tiny_runs.full)).queries[["dispersion_k2", "separation_k5"]].notna().all(axis=None)
    assert found.of(str(tiny_runs.topk)).queries[["dispersion_k2", "separation_k5"]].isna().all(axis=None)
    assert "dispersion_k2" not in survey([tiny_runs.topk], Conditions(samples=4, k=(2,))).queries


@pytest.mark.slow
def test_queries_with_few_keys_are_left_out_on_request(tiny_runs, padded_inputs):
    models = [tiny_runs.full, tiny_runs.topk]
    whole = survey(models, Conditions(inputs=padded_inputs))
    some = survey(models, Conditions(inputs=padded_inputs, min_keys=5))
    expected = whole.queries[whole.queries["keys"] >= 5].reset_index(drop=True)
    assert len(expected) < len(whole.queries)
    pd.testing.assert_frame_equal(some.queries, expected)
    pd.testing.assert_frame_equal(some.loads, whole.loads)
    assert some.provenance["min_keys"] == 5
    assert "min_keys" not in whole.provenance


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "topk"])
def test_probes_leave_out_queries_with_few_keys_whether_or_not_all_queries_are_kept(tiny_runs, tmp_path, name):
    tokens = torch.randint(2, (8, 12), generator=torch.Generator().manual_seed(0))
    tokens[:3, 7:] = 2
    torch.save(tokens, tmp_path / "tokens.pt")
    asked = {"inputs": tmp_path / "tokens.pt", "plans": (SecantsPlan((0.1,)), NoisePlan((0.1,), k=3))}
    whole = survey([getattr(tiny_runs, name)], Conditions(**asked))
    some = survey([getattr(tiny_runs, name)], Conditions(**asked, min_keys=8))
    few = survey([getattr(tiny_runs, name)], Conditions(**asked, min_keys=8, max_queries=50))
    assert len(few.queries) <= 50 < len(some.queries)
    place = ["sample", "layer", "head", "query"]
    known = whole.queries.loc[whole.queries["keys"] >= 8, place]
    for table in ("secants", "masks"):
        expected, filtered, sampled = (getattr(found, table) for found in (whole, some, few))
        expected = expected.merge(known, on=place)
        assert 50 < len(expected) < len(getattr(whole, table))
        spread = [name for name in ("predicted", "swing_sd") if name in expected]  # of the queries that are left
        pd.testing.assert_frame_equal(filtered.drop(columns=spread), expected.drop(columns=spread))
        pd.testing.assert_frame_equal(sampled, filtered)


def test_a_least_number_of_keys_that_no_query_has_is_refused(tiny_runs, padded_inputs):
    with pytest.raises(InputError, match=r"^No query of .*full has 13 keys\. Use a smaller --min-keys\.$"):
        survey([tiny_runs.full], Conditions(inputs=padded_inputs, min_keys=13))


def test_the_dtype_is_that_of_model_and_scores(tiny_runs):
    single, double = (survey([tiny_runs.full], Conditions(samples=4, dtype=d)) for d in ("float32", "float64"))
    assert double.queries["dispersion"].dtype == "float64"
    assert 0 < (single.queries["dispersion"] - double.queries["dispersion"]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ({"samples": 0}, r"^samples must be at least 1\. Got 0\.$"),
        ({"batch_size": 0}, r"^batch_size must be at least 1\. Got 0\.$"),
        ({"min_keys": -1}, r"^min_keys must be at least 1\. Got -1\.$"),
        ({"dtype": "float8"}, r"^dtype must be auto, float32, float64, bfloat16, float16\. Got 'float8'\.$"),
    ],
)
def test_illegal_conditions_are_refused(condition, message):
    with pytest.raises(InputError, match=message):
        Conditions(**condition)


def test_conditions_that_cannot_be_met_are_refused_before_anything_is_measured(tiny_runs, tmp_path, recorder):
    for models, conditions, message in (
        ([tiny_runs.full, tmp_path / "nowhere.pt"], Conditions(samples=4), "nowhere.pt does not exist"),
        ([tiny_runs.full], Conditions(inputs=tmp_path / "nowhere.npy"), "nowhere.npy does not exist"),
        ([tiny_runs.full], Conditions(device="abacus"), "Unknown device 'abacus'"),
        ([tiny_runs.full], Conditions(samples=4000), "has 40 held-out samples"),
    ):
        with pytest.raises(InputError, match=message):
            survey(models, conditions, recorder)
    assert recorder.stages == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused(tiny_runs):
    with pytest.raises(InputError, match=r"^No cuda device here\. Use --device auto or --device cpu\.$"):
        survey([tiny_runs.full], Conditions(device="cuda"))


def test_a_model_named_twice_is_refused(tiny_runs):
    with pytest.raises(InputError, match=r"full is named twice\.$"):
        survey([tiny_runs.full, tiny_runs.full], Conditions(samples=4))


@pytest.mark.slow
def test_progress_is_told(tiny_runs, recorder):
    survey([tiny_runs.full, tiny_runs.topk], Conditions(samples=10, batch_size=4), recorder)
    assert recorder.events == [(str(tiny_runs.full), 10), 4, 4, 2, (str(tiny_runs.topk), 10), 4, 4, 2]


def test_loaded_models_and_paths_mix(tiny_runs, tiny_models):
    found = survey([tiny_models[0], tiny_runs.topk / "last.pt"], Conditions(samples=4))
    assert found.models["model"].tolist() == [str(tiny_runs.full), str(tiny_runs.topk / "last.pt")]


@pytest.mark.slow
def test_a_checkpoint_of_the_papers_code_is_measured_on_fresh_samples(paper_code, tmp_path):
    config = {**paper_code.config, "task": "missdup"}
    first, again = (survey([paper_code.checkpoint], Conditions(samples=5, seed=s, config=config)) for s in (1, 1))
    assert first.queries.equals(again.queries)
    assert "fresh samples of missing-duplicate (seed 1)" in first.models["inputs"].item()
    assert first.history.empty
    other = survey([paper_code.checkpoint], Conditions(samples=5, seed=2, config=config))
    assert not first.queries.equals(other.queries)


@pytest.mark.processor
def test_the_papers_fixture_has_its_true_dispersions_from_end_to_end(paper_code, tmp_path):
    np.save(tmp_path / "tokens.npy", paper_code.true["tokens"].numpy())
    conditions = Conditions(
        inputs=tmp_path / "tokens.npy", dtype="float64", config=paper_code.config, batch_size=7
    )
    found = survey([paper_code.checkpoint], conditions)
    place = ["layer", "sample", "head"]
    for quantity in ("dispersion", "separation"):
        values = found.queries.sort_values([*place, "query"])[quantity].to_numpy().reshape(5, 16, 1, 40)
        np.testing.assert_allclose(values, paper_code.true[quantity].numpy(), rtol=0, atol=1e-9)
    loads = found.loads.sort_values([*place, "key"])["load"].to_numpy().reshape(5, 16, 1, 40)
    assert (loads == paper_code.true["beta"].numpy()).all()


def test_a_run_moved_elsewhere_gives_the_same_numbers(tiny_runs, tmp_path):
    moved = shutil.copytree(tiny_runs.full, tmp_path / "moved")
    found, expected = (survey([path], Conditions(samples=4)) for path in (moved, tiny_runs.full))
    assert found.queries.drop(columns="model").equals(expected.queries.drop(columns="model"))
    assert load(moved).sha256 == expected.models["sha256"].item()


@pytest.mark.slow
def test_theory_is_measured_only_when_asked_for(tiny_runs):
    plain = survey([tiny_runs.topk], Conditions(samples=4))
    assert plain[SECANTS].empty
    assert plain[CONSTANTS].empty
    assert "noise" not in plain.provenance
    noisy = survey([tiny_runs.topk], Conditions(samples=4, plans=(SecantsPlan((0.1,)),)))
    assert (len(noisy[SECANTS]), len(noisy[PARAMETERS])) == (len(noisy.queries), 0)
    assert noisy.provenance["noise_samples"] == 4


@pytest.mark.slow
def test_too_few_keys_leave_out_secants_too(tiny_runs, tmp_path):
    tokens = torch.randint(2, (4, 12), generator=torch.Generator().manual_seed(0))
    tokens[0, 5:] = 2
    torch.save(tokens, tmp_path / "tokens.pt")
    common = {"inputs": tmp_path / "tokens.pt", "plans": (SecantsPlan((0.1,)),)}
    found = survey([tiny_runs.topk], Conditions(**common, min_keys=6))
    assert set(found.secants["sample"]) == set(found.queries["sample"]) == {1, 2, 3}


@pytest.mark.parametrize("level", [0.0, -0.1, float("inf"), float("nan")])
def test_a_noise_level_that_no_noise_has_is_refused(level):
    with pytest.raises(InputError, match="noise level must be a positive number"):
        SecantsPlan((0.01, level))


@pytest.mark.parametrize("plan", [0.1, "secants", None, SecantsPlan, Conditions()])
def test_what_is_no_plan_is_refused(plan):
    with pytest.raises(TypeError, match=r"^Plans are instances of subclasses of Plan\. Got "):
        Conditions(plans=(SecantsPlan(), plan))


def test_two_plans_of_one_probe_are_refused():
    with pytest.raises(TypeError, match=r"^Conditions take one plan of a type\. Got several of SecantsPlan\.$"):
        Conditions(plans=(SecantsPlan((0.1,)), BoundsPlan(), SecantsPlan((0.2,))))
