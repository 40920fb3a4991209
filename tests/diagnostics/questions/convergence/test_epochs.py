"""Arrivals and speed-ups: hand-made histories, censored runs, several seeds, and real tiny runs."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from semdiag.capturing.loading import load
from semdiag.measuring import training_runs as training_runs
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.training_runs import RUNS
from semdiag.questions.convergence import answer as convergence
from semdiag.questions.convergence.answer import arrivals, over_seeds, speed_up, speed_ups
from semdiag_files import InputError

SETTING = json.dumps({"task": "even-pairs", "width": 16})


def measured(*runs, target=0.95):
    """Runs as (model, kind, seed, arrival or None, epochs, setting): accuracy jumps to 1 at the arrival."""
    rows, histories = [], []
    for model, kind, seed, arrival, epochs, setting in runs:
        label = kind if kind == "full" else f"{kind}-5"
        rows.append((model, json.loads(setting)["task"], label, kind, seed, setting, epochs, 100, "finished"))
        epoch = np.arange(1, epochs + 1)
        accuracy = np.where(epoch >= (arrival or math.inf), 1.0, 0.5)
        histories.append(
            pd.DataFrame(
                {"model": model, "epoch": epoch, "train_accuracy": accuracy, "holdout_accuracy": accuracy / 2}
            )
        )
    table = pd.DataFrame(rows, columns=[*RUNS.columns])
    nothing = pd.DataFrame({"model": []})
    return Measurements(
        models=nothing, queries=nothing, loads=nothing, history=pd.concat(histories), non_finite=nothing,
        provenance={"target": target}, runs=table,
    )  # fmt: skip


def test_arrival_accuracies_and_gap():
    found = arrivals(Findings(measured(("f", "full", 1, 35, 100, SETTING), ("t", "topk", 1, 5, 50, SETTING))))
    assert found["arrival"].tolist() == [35, 5]
    assert found["holdout_accuracy"].tolist() == [0.5, 0.5]
    assert found["best_epoch"].tolist() == [35, 5]
    assert found["gap"].tolist() == [0.5, 0.5]


def test_the_target_counts():
    assert arrivals(Findings(measured(("f", "full", 1, 35, 100, SETTING), target=0.5)))["arrival"].tolist() == [1]


def test_a_task_can_have_a_target_of_its_own():
    runs = measured(("f", "full", 1, 35, 100, SETTING), ("t", "topk", 1, 5, 100, SETTING))
    task = runs.runs["task"].iloc[0]
    eased = runs.replace({"target": 0.95, "targets": {task: 0.5, "another": 0.1}})
    found = arrivals(Findings(eased))
    assert found["arrival"].tolist() == [1, 1]
    assert found["target"].tolist() == [0.5, 0.5]


def test_a_run_that_never_arrives_stays_and_bounds_the_speed_up():
    runs = measured(
        ("f", "full", 1, 40, 100, SETTING),
        ("b", "block", 1, None, 80, SETTING),
        ("t", "topk", 1, 5, 9, SETTING),
    )
    found = arrivals(Findings(runs))
    assert found["arrival"].isna().tolist() == [False, True, False]
    pairs = speed_ups(found).set_index("model")
    assert pairs.loc["b", ["low", "high", "known"]].tolist() == [0.0, 0.5, "below"]
    assert pairs.loc["t", ["low", "high", "known"]].tolist() == [8.0, 8.0, "exactly"]
    seeds = over_seeds(found, speed_ups(found)).set_index("attention")
    assert seeds.loc["block-5", "median_epochs"] == math.inf
    assert seeds.loc["block-5", "arrived"] == 0


@pytest.mark.parametrize("full", [None, 40])
@pytest.mark.parametrize("other", [None, 7])
@pytest.mark.parametrize("later", [0, 1, 1000])
def test_whenever_a_censored_run_would_have_arrived_its_speed_up_lies_in_the_range(full, other, later):
    low, high, _ = speed_up(full, 100, other, 60)
    truth = (full or 101 + later) / (other or 61 + later)
    assert low <= truth <= high


def test_full_attention_of_another_seed_or_setting_is_no_partner():
    other = json.dumps({"task": "even-pairs", "width": 32})
    runs = ("f", "full", 1, 40, 100, SETTING), ("t", "topk", 2, 5, 9, SETTING), ("u", "topk", 1, 5, 9, other)
    assert speed_ups(arrivals(Findings(measured(*runs)))).empty


def test_copies_and_earlier_snapshots_of_a_run_count_once():
    runs = ("early", "full", 1, None, 10, SETTING), ("last", "full", 1, 40, 100, SETTING)
    assert arrivals(Findings(measured(*runs)))["model"].tolist() == ["last"]


def test_settings_are_named_by_what_they_do_not_share():
    wide = json.dumps({"task": "even-pairs", "width": 32})
    found = arrivals(Findings(measured(("f", "full", 1, 40, 100, SETTING), ("g", "full", 1, 40, 100, wide))))
    assert found["group"].tolist() == ["even-pairs, width 16", "even-pairs, width 32"]


def test_over_seeds_the_median_carries_its_bounds_and_says_its_confidence():
    runs = [(f"f{seed}", "full", seed, at, 100, SETTING) for seed, at in enumerate((30, 40, 50))]
    runs += [(f"t{seed}", "topk", seed, at, 100, SETTING) for seed, at in enumerate((3, 8, None))]
    found = arrivals(Findings(measured(*runs)))
    row = over_seeds(found, speed_ups(found)).set_index("attention").loc["topk-5"]
    assert (row["seeds"], row["arrived"], row["median_epochs"]) == (3, 2, 8)
    assert (row["speed_up_low"], row["speed_up_high"]) == (5.0, 5.0)  # 10, 5, below 0.5
    assert (row["interval_low"], row["interval_high"], row["interval_coverage"]) == (0.0, 10.0, 0.75)


def test_a_speed_up_of_few_epochs_is_known_to_one_epoch_only():
    """35 and 46 epochs against 3 and 4: 11.6; one epoch off 34/4 or 45/5 at least, 36/2 or 47/3 at most."""
    runs = [(f"f{seed}", "full", seed, at, 100, SETTING) for seed, at in enumerate((35, 46))]
    runs += [(f"t{seed}", "topk", seed, at, 100, SETTING) for seed, at in enumerate((3, 4))]
    found = arrivals(Findings(measured(*runs)))
    row = over_seeds(found, speed_ups(found)).set_index("attention").loc["topk-5"]
    assert row["speed_up_low"] == row["speed_up_high"] == pytest.approx((35 / 3 + 46 / 4) / 2)
    assert row["epoch_low"] == pytest.approx(8.75)
    assert row["epoch_high"] == pytest.approx((18 + 47 / 3) / 2)


def test_one_epoch_off_moves_the_bounds_of_censored_pairs_too():
    runs = [("f1", "full", 1, 35, 100, SETTING), ("t1", "topk", 1, None, 100, SETTING)]
    runs += [("f2", "full", 2, None, 100, SETTING), ("t2", "topk", 2, 5, 100, SETTING)]
    pairs = speed_ups(arrivals(Findings(measured(*runs)))).set_index("seed")
    assert pairs.loc[1, ["low", "high", "epoch_low", "epoch_high"]].tolist() == [0, 0.35, 0, 0.36]
    assert pairs.loc[2, ["low", "high"]].tolist() == [20, math.inf]
    assert pairs.loc[2, ["epoch_low", "epoch_high"]].tolist() == [100 / 6, math.inf]


def test_one_seed_has_no_interval():
    found = arrivals(Findings(measured(("f", "full", 1, 30, 100, SETTING), ("t", "topk", 1, 3, 100, SETTING))))
    row = over_seeds(found, speed_ups(found)).set_index("attention").loc["topk-5"]
    assert row["interval_coverage"] == 0
    assert math.isnan(row["interval_low"])


def test_a_real_run_knows_its_setting_and_that_it_is_finished(tiny_runs):
    table = training_runs.run_table([load(tiny_runs.full), load(tiny_runs.topk)])
    assert table["state"].tolist() == ["finished", "finished"]
    assert table["attention"].tolist() == ["full", "topk-3"]
    assert table["setting"].nunique() == 1
    assert "seed" not in json.loads(table["setting"][0])


@pytest.mark.parametrize(
    ("changes", "state"),
    [({"epochs": 5}, "unfinished"), ({"until": 0.01}, "stopped at --until"), ({"epochs": 2}, "finished")],
)
def test_a_run_that_has_not_ended_is_said_to_be_so(tiny_runs, changes, state):
    model = load(tiny_runs.full)
    table = training_runs.run_table([replace(model, training=replace(model.training, **changes))])
    assert table["state"].tolist() == [state]


def test_an_initialisation_is_a_snapshot_and_a_target_is_an_accuracy(tiny_runs):
    from semdiag.questions.convergence.measure import ConvergencePlan

    assert training_runs.run_table([load(tiny_runs.full / "epoch-0.pt")])["state"].tolist() == ["snapshot"]
    for target in (0, 1.5, float("nan")):
        with pytest.raises(InputError, match="training accuracy"):
            ConvergencePlan((("", target),))
    assert convergence.TARGET == 0.95
