"""What goes with learning, from runs made by hand: what is planted is found, chance is not."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from predictors import (
    CANDIDATES,
    RADIUS,
    STAGES,
    Study,
    held_out_tasks,
    mask_cells,
    measure_predictors,
    output_spread,
    predictor_table,
    rank_candidates,
    run_outcomes,
)

from semdiag.capturing.loading import load
from semdiag.measuring.measure import Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.survey import survey
from semdiag.measuring.training_runs import RUNS
from semdiag.questions.lipschitz.measure import LipschitzPlan, lipschitz_tables
from semdiag.questions.mask_stability.measure import NoisePlan, noise_tables
from semdiag_models import TrainingConfig, configure, find_task, open_run, train_run

pytestmark = pytest.mark.slow  # of finished studies

MASKS = ("full", "topk-1", "topk-5", "banded-5", "block-5", "bottomk-5", "random-5", "random-8")
TASKS = ("even-pairs", "parity", "cycle-navigation")
NAMES = ("response", "entropy")


def made(losses, values, *, accuracy=None, state="finished", snapshots=(0, 2, 4)):
    """Findings of runs that hold nothing but histories and predictors.

    Args:
        losses: training losses by task, attention and seed.
        values: ln of a candidate from (task, attention, seed, epoch, candidate).
        accuracy: training accuracies likewise; 0.5 throughout where there are none.
        state: of all runs.
        snapshots: epochs that are measured.
    """
    runs, history, predictors = [], [], []
    for (task, mask, seed), loss in losses.items():
        name = f"{task}-{mask}-{seed}"
        facts = {"model": name, "task": task, "attention": mask, "kind": mask.split("-")[0], "seed": seed}
        setting = json.dumps({"task": task, "length": 8, "listops": None})
        runs.append({**facts, "setting": setting, "epochs": len(loss), "planned": len(loss), "state": state})
        right = (accuracy or {}).get((task, mask, seed), [0.5] * len(loss))
        history += [
            {"model": name, "epoch": e, "train_loss": one, "train_accuracy": a, "holdout_accuracy": 0.5}
            for e, (one, a) in enumerate(zip(loss, right, strict=True), 1)
        ]
        predictors += [
            {"model": name, "epoch": e, "candidate": c, "ln_value": values(task, mask, seed, e, c)}
            for e in snapshots for c in NAMES
        ]  # fmt: skip
    none = pd.DataFrame({"model": []})
    measurements = Measurements(
        none, none, none, pd.DataFrame(history), none, {"target": 0.95},
        runs=pd.DataFrame(runs)[[*RUNS.columns]],
    )  # fmt: skip
    return Study(measurements, pd.DataFrame(predictors))


def falling(rate, epochs=4):
    return [math.exp(-rate * e) for e in range(1, epochs + 1)]


@pytest.fixture(scope="module")
def planted():
    """Three tasks: the response at the initialisation falls with the speed of each mask; entropy is noise."""
    rng = np.random.default_rng(0)
    rate = {(task, mask): rng.uniform(0.1, 1) for task in TASKS for mask in MASKS}
    losses = {(task, mask, seed): falling(rate[task, mask]) for task, mask in rate for seed in (1, 2)}

    def values(task, mask, seed, epoch, candidate):
        return -rate[task, mask] if (candidate, epoch) == ("response", 0) else float(rng.normal())

    return made(losses, values)


@pytest.fixture(scope="module")
def table(planted):
    found = predictor_table(planted, draws=199, resamples=100)
    return found.set_index(["outcome", "stage", "candidate"])


def test_what_was_planted_is_found_and_nothing_else(table):
    row = table.loc["loss_area", "initialisation", "response"]
    assert row[["rho", "low", "high", "held_out"]].tolist() == pytest.approx([1, 1, 1, 1])
    assert row["p_corrected"] <= 0.01
    others = table.loc["loss_area"].xs("entropy", level="candidate")
    assert (others["p_corrected"] > 0.05).all()


def test_all_candidates_and_stages_share_cells_and_family(table):
    primary = table.loc["loss_area"]
    assert len(primary) == len(STAGES) * len(NAMES)
    assert set(primary["tasks"]) == {3}
    assert set(primary["cells"]) == {24}
    assert (primary["p_corrected"] >= primary["p"]).all()
    assert set(primary["relabellings"]) == {math.factorial(8)}


def test_where_nothing_arrives_epochs_order_nothing(table):
    assert "epochs" not in table.index.get_level_values(0) or table.loc["epochs"]["rho"].isna().all()


def test_the_area_is_that_of_the_common_epochs():
    study = made({("parity", "full", 1): [1.0, 0.5, 0.1], ("parity", "topk-5", 1): [0.8, 0.2]}, lambda *_: 0.0)
    found = run_outcomes(study).set_index("attention")
    assert found["common_epochs"].tolist() == [2, 2]
    assert found.loc["full", "loss_area"] == pytest.approx(math.log(0.75))
    assert found.loc["topk-5", "loss_area"] == pytest.approx(math.log(0.5))


def test_matched_loss_is_the_lowest_that_every_run_reached():
    study = made(
        {("parity", "full", 1): [1.0, 0.6, 0.1], ("parity", "topk-5", 1): [0.9, 0.4, 0.5]}, lambda *_: 0.0
    )
    found = run_outcomes(study).set_index("attention")
    assert found["matched_loss"].tolist() == [0.4, 0.4]
    assert found.loc["topk-5", "matched_epoch"] == 2
    assert found.loc["full", "matched_epoch"] == pytest.approx(2 + 0.2 / 0.5)


def test_candidates_at_the_matched_loss_lie_between_their_snapshots():
    losses = {("parity", "full", 1): [1.0, 0.6, 0.1], ("parity", "topk-5", 1): [0.9, 0.4, 0.5]}
    study = made(losses, lambda task, mask, seed, epoch, candidate: 10.0 * epoch, snapshots=(0, 2, 3))
    found = mask_cells(study)
    found = found[found["stage"] == "matched loss"].set_index(["attention", "candidate"])["ln_value"]
    assert found["topk-5", "response"] == 20
    assert found["full", "response"] == pytest.approx(24)


def test_a_candidate_of_zero_is_the_smallest_and_not_unknown():
    study = made({("parity", "topk-1", 1): [1.0, 0.5, 0.4]}, lambda *_: -math.inf, snapshots=(0, 2, 3))
    assert (mask_cells(study)["ln_value"] == -math.inf).all()


def test_epochs_are_counted_from_the_shortcut_and_censored_runs_are_last():
    rising = [0.5, 0.94, 0.96, 1.0]
    runs = {("parity", "full", 1): falling(1), ("parity", "topk-5", 1): falling(1)}
    found = run_outcomes(made(runs, lambda *_: 0.0, accuracy={("parity", "full", 1): rising}))
    found = found.set_index("attention")
    assert found["target"].tolist() == [pytest.approx(0.95, abs=1e-3)] * 2  # 50% and 90% of the rest
    assert found["epochs"].to_dict() == {"full": 3, "topk-5": math.inf}


def test_a_run_that_was_stopped_before_it_arrived_is_unknown_not_slow():
    study = made({("parity", "full", 1): falling(1)}, lambda *_: 0.0, state="stopped at --until")
    assert run_outcomes(study)["epochs"].isna().all()


def test_unfinished_runs_are_left_out():
    study = made({("parity", "full", 1): falling(1)}, lambda *_: 0.0, state="unfinished")
    assert run_outcomes(study).empty
    assert predictor_table(study).empty
    assert held_out_tasks(study).empty


def test_seeds_are_averaged_and_add_no_cells():
    runs = {("parity", "full", seed): [loss] * 3 for seed, loss in ((1, 1.0), (2, 4.0))}
    found = mask_cells(made(runs, lambda task, mask, seed, *_: float(seed)))
    assert len(found) == len(STAGES) * len(NAMES)
    assert set(found["seeds"]) == {2}
    assert found["loss_area"].unique().tolist() == [pytest.approx(math.log(2))]
    assert found["ln_value"].unique().tolist() == [1.5]


def test_a_mask_without_a_seed_is_compared_on_the_seeds_that_it_has():
    """The runs of seed 2 are slow, and one of them diverged: it is not the faster for that."""
    runs = {("parity", mask, seed): falling(1 / seed) for mask in MASKS for seed in (1, 2)}
    whole = made(runs, lambda *_: 0.0)
    state = whole.measurements.runs["state"].mask(
        whole.measurements.runs["model"] == "parity-topk-5-2", "unfinished"
    )
    study = Study(whole.measurements.replace(runs=whole.measurements.runs.assign(state=state)), whole.predictors)
    found = mask_cells(study)
    assert set(found["seeds"]) == {1}
    assert found["loss_area"].nunique() == 1


def test_a_mask_of_which_one_candidate_is_unknown_is_left_out_for_all():
    rng = np.random.default_rng(2)
    runs = {("parity", mask, 1): falling(rng.uniform()) for mask in MASKS}

    def values(task, mask, seed, epoch, candidate):
        return math.nan if (mask, candidate) == ("bottomk-5", "entropy") else float(rng.normal())

    found = rank_candidates(mask_cells(made(runs, values)), draws=1, resamples=0)
    assert set(found["cells"]) == {7}
    assert set(found["left_out"]) == {1}


def test_a_task_is_predicted_by_what_was_strongest_on_the_others_and_by_the_masks(planted):
    found = held_out_tasks(planted)
    found = found[found["outcome"] == "loss_area"]
    strongest = found[found["choice"] == "strongest elsewhere"]
    assert strongest["group"].tolist() == [*TASKS]
    assert set(strongest["candidate"]) == {"response"}
    assert strongest["rho"].tolist() == [1, 1, 1]
    itself = found[found["choice"] == "the mask itself"]["rho"]
    assert (itself.abs() < 0.9).all()  # rates are drawn anew for each task: the mask itself tells nothing


def test_a_rule_that_turns_round_on_one_task_is_wrong_there():
    rng = np.random.default_rng(5)
    rate = {(task, mask): rng.uniform(0.1, 1) for task in TASKS for mask in MASKS}
    study = made(
        {(*name, 1): falling(one) for name, one in rate.items()},
        lambda task, mask, *_: (1 if task == "parity" else -1) * rate[task, mask],
    )
    found = held_out_tasks(study)
    found = found[(found["outcome"] == "loss_area") & (found["choice"] == "strongest elsewhere")].set_index(
        "group"
    )
    assert found.loc["parity", "rho"] == -1
    table = predictor_table(study, draws=19, resamples=0)
    assert table.loc[0, "rho"] == pytest.approx(1 / 3)
    assert table.loc[0, "held_out"] == pytest.approx((0 + 0 - 1) / 3)  # the sign of two that disagree is none


def test_a_candidate_and_the_masks_predict_the_same_cells():
    """Both are right on the five masks of parity that other tasks know; three others learn in another order."""
    rate = {("even-pairs", mask): 0.1 * n for n, mask in enumerate(MASKS[:5], 1)}
    rate |= {("cycle-navigation", mask): 0.1 * n for n, mask in enumerate(MASKS[:5], 1)}
    rate |= {("parity", mask): 0.1 * n for n, mask in zip((4, 5, 6, 7, 8, 1, 2, 3), MASKS, strict=True)}
    study = made(
        {(*name, 1): falling(one) for name, one in rate.items()},
        lambda task, mask, *_: -float(MASKS.index(mask)),
    )
    found = held_out_tasks(study).query("outcome == 'loss_area' and group == 'parity'")
    assert found.set_index("choice")["rho"].to_dict() == {"strongest elsewhere": 1, "the mask itself": 1}


CONDITIONS = Conditions(samples=10, dtype="float64")


def trained(folder, attention, k):
    """A run of one epoch."""
    config, _ = configure(
        find_task("even-pairs"), {"attention": attention, "k": k, "length": 12, "blocks": 2, "width": 16}
    )
    training = TrainingConfig("even-pairs", 12, 1, 7, 50, 20)
    with torch.random.fork_rng():
        trainer = open_run(folder, config, training, torch.device("cpu"), resume=False, overwrite=False)
        train_run(folder, trainer, {"command": "made by the tests"})
    return load(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {name: trained(folder / name, name, k) for name, k in (("topk", 3), ("full", None), ("bottomk", 3))}


@pytest.fixture(scope="module")
def topk(models):
    return measure_predictors(models["topk"], CONDITIONS)


@pytest.fixture(scope="module")
def full(models):
    return measure_predictors(models["full"], CONDITIONS)


def value(table, candidate):
    """Of the last snapshot."""
    return table[table["candidate"] == candidate]["ln_value"].iloc[-1]


def test_only_what_is_asked_is_measured_and_is_the_same(topk, models):
    table = measure_predictors(models["topk"], CONDITIONS, ("response", "dispersion"))
    assert table["candidate"].tolist() == ["response", "dispersion"] * 2
    assert value(table, "response") == value(topk, "response")


def test_every_candidate_is_there_at_every_snapshot(topk, models):
    assert topk["epoch"].unique().tolist() == [0, 1]
    assert topk["candidate"].tolist() == [*CANDIDATES] * 2
    assert topk["ln_value"].notna().all()


def test_dispersion_and_its_share_are_those_of_the_queries(topk, models):
    found = survey([models["topk"]], CONDITIONS)
    assert value(topk, "dispersion") == pytest.approx(math.log(found.queries["dispersion"].median()))
    assert value(topk, "dispersion_share") < 0


def test_of_full_attention_all_keys_are_kept_and_no_mask_changes(full):
    assert value(full, "dispersion_share") == 0
    assert value(full, "mask_agreement") == 0


def test_entropy_and_spread_are_those_of_weights_computed_by_hand(full, models):
    model = models["full"]
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


def test_masks_agree_as_often_as_the_probe_says(topk, models):
    model = models["topk"]
    tokens, labels, _ = model.default_inputs(10, 0)
    masks, _ = noise_tables(model, tokens, labels, NoisePlan((0.01,)), dtype=torch.float64)
    assert value(topk, "mask_agreement") == pytest.approx(math.log(masks["agreement"].mean()), abs=1e-6)


def test_the_slope_is_that_of_the_same_planes_in_the_lipschitz_probe(topk, models):
    model = models["topk"]
    tokens, labels, _ = model.default_inputs(10, 0)
    plan = LipschitzPlan(samples=10, planes=8, directions=4, draws=5, radius=RADIUS)
    probed = lipschitz_tables(model, tokens, labels, plan=plan, seed=0)["loss_secants"]
    largest = probed[(probed["group"] == "all") & (probed["radius"] == RADIUS)]
    assert value(topk, "loss_secant") == pytest.approx(math.log(largest["slope"].median()), rel=1e-9)


def test_what_no_bound_covers_is_unknown(models):
    table = measure_predictors(models["bottomk"], CONDITIONS)
    unknown = {"xi_sound", "xi_paper", "lambda_sound", "lambda_paper"}
    assert set(table.loc[table["ln_value"].isna(), "candidate"]) == unknown
    assert np.isfinite(table["ln_value"].dropna()).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_spread_is_what_loops_give(seed):
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(1, 1, 6, 4, generator=generator)
    counted = torch.tensor([True, True, False, True, False, True])
    rows = [row for row, there in zip(mixed[0, 0].double().tolist(), counted.tolist(), strict=True) if there]
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    apart = sum((x - m) ** 2 for row in rows for x, m in zip(row, mean, strict=True))
    assert output_spread(mixed, counted).item() == pytest.approx(apart / sum(x * x for row in rows for x in row))
    assert output_spread(mixed, torch.tensor(False)).isnan().all()
