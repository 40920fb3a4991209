"""Rank correlations with speed-up, from runs made by hand: what is planted is found, chance is not."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from semdiag.findings.findings import Findings
from semdiag.findings.prediction import held_out_tasks, prediction_cells, predictor_table
from semdiag.mathematics.censored import rank_agreement
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.runs.predictors import CANDIDATES, STAGES
from semdiag.measurement.runs.tables import PREDICTORS, RUNS

KINDS = ("full", "topk", "banded", "block", "bottomk", "random")


def made(arrivals, values, epochs=50):
    """Findings of runs that hold nothing but histories and predictors.

    Args:
        arrivals: by task, attention and seed: the epoch of 95 %, None if never.
        values: ln of every candidate from (task, attention, seed, stage, candidate).
        epochs: trained, by the runs that never arrive.
    """
    runs, history, predictors = [], [], []
    for (task, kind, seed), arrival in arrivals.items():
        name = f"{task}-{kind}-{seed}"
        trained = arrival or epochs
        facts = {"model": name, "task": task, "attention": kind, "kind": kind, "seed": seed, "state": "finished"}
        runs.append({**facts, "setting": json.dumps({"task": task}), "epochs": trained, "planned": epochs})
        for epoch in range(1, trained + 1):
            there = 0.96 if epoch == arrival else 0.5
            history.append({"model": name, "epoch": epoch, "train_accuracy": there, "holdout_accuracy": 0.5})
        for stage in STAGES:
            for candidate in CANDIDATES:
                number = values(task, kind, seed, stage, candidate)
                facts = {"model": name, "stage": stage, "epoch": 0}
                predictors.append({**facts, "candidate": candidate, "ln_value": number})
    none = pd.DataFrame({"model": []})
    measurements = Measurements(
        none, none, none, pd.DataFrame(history), none, {"target": 0.95},
        runs=pd.DataFrame(runs)[[*RUNS.columns]], predictors=PREDICTORS.of_rows(predictors),
    )  # fmt: skip
    return Findings(measurements)


def random_arrivals(rng, tasks=4, seeds=2):
    """Full attention at 20; the others anywhere, a third of them never."""
    return {
        (f"task-{t}", kind, s): 20 if kind == "full" else int(rng.integers(1, 50)) if rng.random() < 0.7 else None
        for t in range(tasks) for kind in KINDS for s in range(seeds)
    }  # fmt: skip


def noise(rng):
    return lambda *_: float(rng.normal())


@pytest.fixture(scope="module")
def planted():
    """Four tasks: the response at the initialisation falls with speed; all else is noise."""
    rng = np.random.default_rng(0)
    arrivals, anything = random_arrivals(rng), noise(rng)

    def values(task, kind, seed, stage, candidate):
        if (stage, candidate) == ("initialisation", "response"):
            return math.log(arrivals[task, kind, seed] or 60)
        return math.nan if candidate == "xi_paper" else anything()

    return made(arrivals, values)


@pytest.fixture(scope="module")
def table(planted):
    return predictor_table(planted, permutations=400, resamples=100).set_index(["stage", "candidate"])


def test_what_was_planted_is_found_and_nothing_else(table):
    row = table.loc[("initialisation", "response")]
    assert (row["tau"], row["low"], row["high"]) == (-1, -1, -1)
    assert row["p_corrected"] <= 0.01
    others = table.drop([("initialisation", "response")])["p_corrected"].dropna()
    assert (others > 0.05).all()


def test_every_correlation_is_that_of_its_runs_taken_alone(planted, table):
    for name, rows in prediction_cells(planted).groupby(["stage", "candidate"]):
        known = rows.dropna(subset="ln_ratio")
        tau, comparable = rank_agreement(known["ln_ratio"].tolist(), known["low"].tolist(), known["high"].tolist())
        row = table.loc[name]
        assert row["comparable"] == comparable
        assert row["cells"] == len(known)
        assert row["tau"] == pytest.approx(tau, nan_ok=True)


def test_what_is_nowhere_known_has_no_correlation(table):
    row = table.loc[("end", "xi_paper")]
    assert row["cells"] == 0
    assert row[["tau", "low", "high", "p", "p_corrected"]].isna().all()


def test_ratios_are_to_full_attention_of_the_same_task_and_seed(planted):
    rows = prediction_cells(planted)
    rows = rows[(rows["stage"] == "initialisation") & (rows["candidate"] == "response")]
    assert len(rows) == 4 * 6 * 2
    for row in rows[rows["known"] == "exactly"].to_dict("records"):
        assert row["ln_ratio"] == pytest.approx(-math.log(row["low"]))  # ln of arrival / 20
    itself = rows[rows["kind"] == "full"]
    assert (itself["ln_ratio"] == 0).all()
    assert (itself["low"] == 1).all()


@pytest.mark.slow
def test_corrected_p_values_of_chance_are_rarely_small():
    """40 studies in which nothing predicts anything: about one in ten has a p of at most 0.1.

    The arrivals stay, the candidates are drawn anew: what is not known to depend on them is exchangeable. More
    than 13 of 40 has a probability of 2e-5 (binomial); corrected for nothing, nearly all would.
    """
    rng = np.random.default_rng(100)
    cells = prediction_cells(made(random_arrivals(rng), noise(rng)))
    runs, full = (cells[name].astype("category").cat.codes.to_numpy() for name in ("model", "full"))
    quantity = cells.groupby(["stage", "candidate"], sort=False).ngroup().to_numpy()
    smallest = []
    for seed in range(40):
        drawn = np.random.default_rng(seed).normal(size=(1 + runs.max(), 1 + quantity.max()))
        itself = np.random.default_rng(1000 + seed).normal(size=(1 + full.max(), 1 + quantity.max()))
        ratios = np.where(cells["kind"] == "full", 0.0, drawn[runs, quantity] - itself[full, quantity])
        answer = cells.assign(ln_ratio=ratios)
        table = predictor_table(lambda question, answer=answer: answer, seed, 99, 1)
        smallest.append(table["p_corrected"].min())
    assert sum(p <= 0.1 for p in smallest) <= 13
    assert min(smallest) >= 0.01


def test_seeds_do_not_count_as_independent():
    """Two sparse attentions that differ in every seed: however many seeds, one exchange in two does as well."""
    speeds = {"full": 20, "topk": 4, "block": 10}
    arrivals = {("task", kind, seed): speeds[kind] for kind in speeds for seed in range(8)}
    study = made(arrivals, lambda task, kind, *_: float(-speeds[kind]))
    row = predictor_table(study, permutations=400, resamples=1).iloc[0]
    assert row["tau"] == 1
    assert row["p"] > 0.3
    assert math.isnan(row["low"])  # and of other tasks nothing is known


def test_a_task_is_predicted_by_what_was_strongest_on_the_others(planted):
    found = held_out_tasks(planted)
    assert found["group"].tolist() == [f"task-{t}" for t in range(4) for _ in range(2)]
    assert set(found["candidate"]) == {"response"}
    assert found["tau"].tolist() == [1] * 8  # with the sign it has elsewhere


def test_a_rule_that_turns_round_on_one_task_is_wrong_there():
    rng = np.random.default_rng(5)
    arrivals = random_arrivals(rng, tasks=3)

    def values(task, kind, seed, stage, candidate):
        sign = -1 if task == "task-2" else 1
        return sign * math.log(arrivals[task, kind, seed] or 60)

    found = held_out_tasks(made(arrivals, values)).set_index(["group", "choice"])
    assert found.loc[("task-2", "initialisation"), "tau"] == -1


def test_without_speed_ups_there_is_nothing_to_correlate():
    study = made({("task", "topk", 0): 3, ("task", "block", 0): None}, lambda *_: 0.0)
    assert predictor_table(study).empty
    assert held_out_tasks(study).empty
