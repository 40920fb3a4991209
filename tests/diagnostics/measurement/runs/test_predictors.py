"""Numbers that may predict speed: each is what it says, at the right stage of the run."""

import math
import shutil

import numpy as np
import pytest
import torch

from semdiag.capturing.loading import load
from semdiag.measurement.conditions import Conditions
from semdiag.measurement.probes.loss.lipschitz import LipschitzPlan, lipschitz
from semdiag.measurement.probes.noise.masks import NoisePlan, mask_stability
from semdiag.measurement.runs.predictors import CANDIDATES, RADIUS, STAGES, measure_predictors, stages_of
from semdiag.measurement.survey import survey

CONDITIONS = Conditions(samples=10, dtype="float64")


@pytest.fixture(scope="module")
def topk(tiny_runs):
    return measure_predictors(load(tiny_runs.topk), CONDITIONS, 0.95)


@pytest.fixture(scope="module")
def full(tiny_runs):
    return measure_predictors(load(tiny_runs.full), CONDITIONS, 0.95)


def value(table, stage, candidate):
    return table.set_index(["stage", "candidate"])["ln_value"][stage, candidate]


@pytest.fixture
def run(tiny_runs, tmp_path):
    """A copy of a run with snapshots of epochs 1 to 3 and a history of one's own."""

    def make(accuracy, snapshots=(1, 2, 3)):
        folder = tmp_path / "run"
        shutil.copytree(tiny_runs.full, folder)
        content = torch.load(folder / "last.pt", weights_only=True)
        content["epoch"] = len(accuracy)
        content["config"]["training"]["epochs"] = len(accuracy)
        content["history"] = {name: [*accuracy] for name in content["history"]}
        torch.save(content, folder / "last.pt")
        for epoch in snapshots:
            shutil.copy(tiny_runs.full / "epoch-0.pt", folder / f"epoch-{epoch}.pt")
        return load(folder)

    return make


def names(model):
    return {stage: path.name for stage, path in stages_of(model, 0.95).items()}


def test_the_plateau_ends_before_half_of_the_rise(run):
    found = names(run([0.5, 0.55, 0.6, 0.8, 0.96]))  # half of the way from 0.5 to 0.95 is 0.725
    assert found == {"initialisation": "epoch-0.pt", "plateau": "epoch-3.pt", "end": "last.pt"}


def test_the_plateau_of_a_run_that_never_rises_is_its_latest_named_epoch(run):
    assert names(run([0.5] * 9))["plateau"] == "epoch-3.pt"


def test_a_run_that_rises_at_once_has_no_plateau(run):
    assert set(names(run([0.5, 0.96], snapshots=(2,)))) == {"initialisation", "end"}


def test_a_file_that_is_not_the_last_of_a_run_has_no_stages(tiny_runs):
    assert stages_of(load(tiny_runs.full / "epoch-0.pt"), 0.95) == {}


def test_every_candidate_is_there_at_every_stage(topk):
    assert topk["stage"].unique().tolist() == [s for s in STAGES if s != "plateau"]
    assert topk["candidate"].tolist() == [*CANDIDATES] * 2
    assert topk["ln_value"].notna().all()


def test_dispersion_and_its_share_are_those_of_the_queries(topk, tiny_runs):
    found = survey([tiny_runs.topk], CONDITIONS)
    assert value(topk, "end", "dispersion") == pytest.approx(math.log(found.queries["dispersion"].median()))
    assert value(topk, "end", "dispersion_share") < 0


def test_of_full_attention_all_keys_are_kept_and_no_mask_changes(full):
    assert value(full, "end", "dispersion_share") == 0
    assert value(full, "end", "mask_agreement") == 0


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
    assert value(full, "end", "entropy") == pytest.approx(float(torch.stack(entropies).mean().log()), rel=1e-9)
    assert value(full, "end", "output_spread") == pytest.approx(float(torch.stack(spreads).mean().log()), rel=1e-9)


def test_masks_agree_as_often_as_the_probe_says(topk, tiny_runs):
    model = load(tiny_runs.topk)
    tokens, labels, _ = model.default_inputs(10, 0)
    masks, _ = mask_stability(model, tokens, labels, NoisePlan((0.01,)), dtype=torch.float64)
    assert value(topk, "end", "mask_agreement") == pytest.approx(math.log(masks["agreement"].mean()), abs=1e-6)


def test_the_slope_is_that_of_the_same_planes_in_the_lipschitz_probe(topk, tiny_runs):
    model = load(tiny_runs.topk)
    tokens, labels, _ = model.default_inputs(10, 0)
    plan = LipschitzPlan(samples=10, planes=8, directions=4, draws=5, radius=RADIUS)
    probed = lipschitz(model, tokens, labels, options=plan, seed=0)["loss_secants"]
    largest = probed[(probed["group"] == "all") & (probed["radius"] == RADIUS)]
    assert value(topk, "end", "loss_secant") == pytest.approx(math.log(largest["slope"].median()), rel=1e-9)


def test_what_no_bound_covers_is_unknown(tiny_config, tiny_runs, tmp_path):
    from semdiag_models import TrainingConfig, open_run, train_run

    training = TrainingConfig("even-pairs", tiny_runs.length, 1, 7, 50, 20)
    with torch.random.fork_rng():
        config = tiny_config("bottomk", 3)
        trainer = open_run(tmp_path / "b", config, training, torch.device("cpu"), resume=False, overwrite=False)
        train_run(tmp_path / "b", trainer, {"command": "made by the tests"})
    table = measure_predictors(load(tmp_path / "b"), CONDITIONS, 0.95)
    unknown = {"xi_sound", "xi_paper", "lambda_sound", "lambda_paper"}
    assert set(table.loc[table["ln_value"].isna(), "candidate"]) == unknown
    assert np.isfinite(table["ln_value"].dropna()).all()
