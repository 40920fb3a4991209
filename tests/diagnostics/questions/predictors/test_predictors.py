"""Numbers that may predict speed: each is what it says."""

import math

import numpy as np
import pytest
import torch

from semdiag.capturing.loading import load
from semdiag.measuring.conditions import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions.lipschitz.measure.probe import LipschitzPlan, lipschitz
from semdiag.questions.mask_stability.measure.probe import NoisePlan, mask_stability
from semdiag.questions.predictors.measure import CANDIDATES, RADIUS, measure_predictors
from semdiag_models import TrainingConfig, open_run, train_run

CONDITIONS = Conditions(samples=10, dtype="float64")


@pytest.fixture(scope="module")
def topk(tiny_runs):
    return measure_predictors(load(tiny_runs.topk), CONDITIONS)


@pytest.fixture(scope="module")
def full(tiny_runs):
    return measure_predictors(load(tiny_runs.full), CONDITIONS)


def value(table, candidate):
    """Of the last snapshot."""
    return table[table["candidate"] == candidate]["ln_value"].iloc[-1]


def test_only_what_is_asked_is_measured_and_is_the_same(topk, tiny_runs):
    table = measure_predictors(load(tiny_runs.topk), CONDITIONS, ("response", "dispersion"))
    assert table["candidate"].tolist() == ["response", "dispersion"] * 2
    assert value(table, "response") == value(topk, "response")


def test_a_range_of_one_key_is_zero_and_known(tiny_config, tiny_runs, tmp_path):
    table = measure_predictors(one_epoch(tiny_config("topk", 1), tiny_runs, tmp_path), CONDITIONS, ("dispersion",))
    assert (table["ln_value"] == -math.inf).all()


def test_every_candidate_is_there_at_every_snapshot(topk, tiny_runs):
    assert topk["epoch"].unique().tolist() == [0, tiny_runs.epochs]
    assert topk["candidate"].tolist() == [*CANDIDATES] * 2
    assert topk["ln_value"].notna().all()


def test_dispersion_and_its_share_are_those_of_the_queries(topk, tiny_runs):
    found = survey([tiny_runs.topk], CONDITIONS)
    assert value(topk, "dispersion") == pytest.approx(math.log(found.queries["dispersion"].median()))
    assert value(topk, "dispersion_share") < 0


def test_of_full_attention_all_keys_are_kept_and_no_mask_changes(full):
    assert value(full, "dispersion_share") == 0
    assert value(full, "mask_agreement") == 0


def test_entropy_and_spread_are_those_of_weights_computed_by_hand(full, tiny_runs):
    model = load(tiny_runs.full)
    seen = []
    encoder = model.encoder.double().requires_grad_(False)
    for block in encoder.blocks:
        block.attention.core.register_forward_hook(lambda _, given, out: seen.append((*given[:4], out)))
    encoder(model.default_inputs(10, 0)[0])
    entropies, spreads = [], []
    for q, k, v, scale, mixed in seen:
        weights = torch.softmax(scale * q @ k.transpose(-1, -2), -1)
        entropies.append(-(weights * weights.log()).sum(-1))
        assert torch.allclose(weights @ v, mixed)
        centred = mixed - mixed.mean(2, keepdim=True)
        spreads.append(centred.square().sum((2, 3)) / mixed.square().sum((2, 3)))
    assert value(full, "entropy") == pytest.approx(float(torch.stack(entropies).mean().log()), rel=1e-9)
    assert value(full, "output_spread") == pytest.approx(float(torch.stack(spreads).mean().log()), rel=1e-9)


def test_masks_agree_as_often_as_the_probe_says(topk, tiny_runs):
    model = load(tiny_runs.topk)
    tokens, labels, _ = model.default_inputs(10, 0)
    masks, _ = mask_stability(model, tokens, labels, NoisePlan((0.01,)), dtype=torch.float64)
    assert value(topk, "mask_agreement") == pytest.approx(math.log(masks["agreement"].mean()), abs=1e-6)


def test_the_slope_is_that_of_the_same_planes_in_the_lipschitz_probe(topk, tiny_runs):
    model = load(tiny_runs.topk)
    tokens, labels, _ = model.default_inputs(10, 0)
    plan = LipschitzPlan(samples=10, planes=8, directions=4, draws=5, radius=RADIUS)
    probed = lipschitz(model, tokens, labels, plan=plan, seed=0)["loss_secants"]
    largest = probed[(probed["group"] == "all") & (probed["radius"] == RADIUS)]
    assert value(topk, "loss_secant") == pytest.approx(math.log(largest["slope"].median()), rel=1e-9)


def one_epoch(config, tiny_runs, folder):
    training = TrainingConfig("even-pairs", tiny_runs.length, 1, 7, 50, 20)
    with torch.random.fork_rng():
        trainer = open_run(folder / "b", config, training, torch.device("cpu"), resume=False, overwrite=False)
        train_run(folder / "b", trainer, {"command": "made by the tests"})
    return load(folder / "b")


def test_what_no_bound_covers_is_unknown(tiny_config, tiny_runs, tmp_path):
    table = measure_predictors(one_epoch(tiny_config("bottomk", 3), tiny_runs, tmp_path), CONDITIONS)
    unknown = {"xi_sound", "xi_paper", "lambda_sound", "lambda_paper"}
    assert set(table.loc[table["ln_value"].isna(), "candidate"]) == unknown
    assert np.isfinite(table["ln_value"].dropna()).all()
