"""What goes with learning, from runs made by hand: what is planted is found, chance is not."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.runs.tables import PREDICTORS, RUNS
from semdiag.questions.predictors.answer.mask_cells import (
    OUTCOMES,
    STAGES,
    UNSHARED,
    left_out_runs,
    mask_cells,
    run_outcomes,
)
from semdiag.questions.predictors.answer.prediction import held_out_tasks, predictor_table, rank_candidates
from semdiag.questions.predictors.words import predictor_sentences, predictors_in_short

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
        runs=pd.DataFrame(runs)[[*RUNS.columns]], predictors=PREDICTORS.of_rows(predictors),
    )  # fmt: skip
    return Findings(measurements)


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
    study = Findings(whole.measurements.replace(runs=whole.measurements.runs.assign(state=state)))
    found = mask_cells(study)
    assert set(found["seeds"]) == {1}
    assert found["loss_area"].nunique() == 1
    left_out = left_out_runs(study).set_index("model")["why"]
    assert left_out.pop("parity-topk-5-2") == "unfinished"
    assert set(left_out) == {UNSHARED}
    assert len(left_out) == len(MASKS) - 1
    assert left_out_runs(whole).empty
    said = (
        "Left out of 16 runs: 7 of a seed that another mask of the task lacks; "
        "1 unfinished (stopped, or diverged)."
    )
    assert predictors_in_short(study)[-1] == predictor_sentences(study)[-1] == said


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


def test_every_outcome_has_words():
    assert [*OUTCOMES] == ["loss_area", "epochs"]
