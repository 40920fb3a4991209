"""The studies of robustness and of lengths: their runs as registered, and planted answers found again."""

import math
from collections import Counter
from pathlib import Path

import lengths
import numpy as np
import pandas as pd
import pytest
import robustness

from semdiag_models.sweep import read_sweep

pytestmark = pytest.mark.slow  # of a finished study

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def test_the_runs_of_robustness_are_those_registered():
    runs = read_sweep(robustness.SWEEP)
    levels = Counter(robustness.level_of(run) for run in runs)
    assert len(runs) == 468
    assert set(levels.values()) == {36}
    assert len(levels) == 13
    assert {run.training.seed for run in runs} == {42101, 42102, 42103}


def planted(advantage, level_advantage, left_out=0):
    """Outcomes in which top-5 has an advantage in the recipe, and another with dropout 0.1."""
    rows, rng = [], np.random.default_rng(0)
    for run in read_sweep(robustness.SWEEP):
        level, attention = robustness.level_of(run), run.model.attention_label
        gain = 0.0 if attention != "topk-5" else level_advantage if level == "dropout 0.1" else advantage
        area = -gain + 0.05 * rng.standard_normal()
        if left_out and (level, attention) == ("norm post", "full"):
            area = math.nan
        rows.append((run.training.task_label, level, attention, run.training.seed, area))
    return pd.DataFrame(rows, columns=["task", "level", "attention", "seed", "loss_area"])


@pytest.mark.parametrize(
    ("advantage", "level_advantage", "answer"),
    [
        (1.0, 0.8, "robust"),
        (1.0, -1.0, "not robust: reversed by dropout 0.1"),
        (-1.0, 1.0, "not robust: reversed"),
    ],
)
def test_a_planted_reversal_is_found_and_nothing_else(advantage, level_advantage, answer):
    table = robustness.advantages(planted(advantage, level_advantage))
    found = robustness.verdicts(table)
    top = found[found["attention"] == "topk-5"]
    assert len(top) == 4
    assert all(said.startswith(answer) for said in top["answer"])


def test_a_level_with_a_missing_run_has_no_conclusion():
    table = robustness.advantages(planted(1.0, 0.8, left_out=1))
    post = table[table["level"] == "norm post"]
    assert (post["missing"] == 3).all()
    assert post["advantage"].isna().all()
    found = robustness.verdicts(table)
    assert set(found[found["attention"] == "topk-5"]["answer"]) == {"no reversal so far"}


def test_the_runs_of_lengths_are_those_registered():
    runs = read_sweep(lengths.SWEEP)
    assert len(runs) == 36
    assert {(run.training.least_length, run.training.length, run.training.epochs) for run in runs} == {
        (5, 20, 200)
    }


def test_a_planted_difference_counts_where_the_task_was_learned():
    rows = []
    for task, learned in (("even-pairs", 0.99), ("parity", 0.5)):
        for attention, loss in (("full", 0.3), ("topk-5", 0.1), ("banded-5-global-1", 0.3)):
            for seed in (1, 2, 3):
                for length in lengths.LENGTHS:
                    accuracy = learned - (loss + 0.001 * seed * (attention == "topk-5")) * (length > 20)
                    rows.append((task, attention, seed, length, accuracy, 1.0, 1.0))
    table = pd.DataFrame(rows, columns=list(lengths.COLUMNS))
    found = lengths.differences(table).set_index(["task", "attention", "length"])
    row = found.loc["even-pairs", "topk-5", 80]
    assert row["seeds"] == 3
    assert row["difference"] == pytest.approx(0.198)
    assert row["low"] > 0
    said = lengths.sentences(table, found.reset_index())
    assert any(line.startswith("parity: these runs cannot tell (0 of 3") for line in said)
    assert any("topk-5 less full, 3 seeds: +19.8% at 30" in line for line in said)


def test_the_result_of_lengths_is_what_its_table_says():
    table = pd.read_csv(EXPERIMENTS / "lengths" / "accuracy.csv")
    *said, missing = lengths.sentences(table, lengths.differences(table))
    text = (EXPERIMENTS / "lengths.md").read_text(encoding="utf-8")
    assert [line for line in said if f"- {line}" not in text] == []
    assert missing == "0 of 36 runs are missing."
    pairs = table[table["task"] == "even-pairs"].groupby(["attention", "length"])["accuracy"].agg(["min", "max"])
    assert (pairs.loc[("full", 20), "min"].round(2), pairs.loc[("topk-5", 20), "min"]) == (0.92, 1.0)
    both = pairs.loc[[("full", 30), ("topk-5", 30)]]
    assert (both["min"].min().round(2), both["max"].max().round(2)) == (0.51, 0.57)
