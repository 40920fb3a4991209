"""The registered analysis reads records and initialisations for what they are; tried on the pilot alone."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import read_speed as reading
import torch
from pack_records import read_history
from predictors import candidates_at

from semdiag.capturing.loading import load
from semdiag.measuring.measure import Conditions
from semdiag_files import InputError
from semdiag_models.run_folder import open_run, train_run
from semdiag_models.sweep import SweepRun, read_sweep

pytestmark = pytest.mark.slow  # of a finished study

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pilot():
    folder = ROOT / "experiments" / "pilot"
    found = {run: read_history(folder, run) for run in read_sweep(ROOT / "experiments" / "pilot.toml")}
    return {run: history for run, history in found.items() if history is not None}


@pytest.mark.nightly
def test_the_initialisation_is_that_of_the_run(pilot, tmp_path):
    for run in list(pilot)[:2]:
        with torch.random.fork_rng():
            trainer = open_run(
                tmp_path / run.name, run.model, run.training, torch.device("cpu"), resume=False, overwrite=False
            )
            trainer.run = lambda *_: None  # the initialisation is saved, and no step made
            train_run(tmp_path / run.name, trainer, {})
        written = load(tmp_path / run.name / "epoch-0.pt")
        built = reading.initialisation(run)
        for name, value in written.module.state_dict().items():
            assert torch.equal(value, built.module.state_dict()[name]), name
        wanted = ("dispersion", "xi_sound")
        assert candidates_at(built, Conditions(), wanted) == candidates_at(written, Conditions(), wanted)


def test_a_missing_run_is_not_read_over():
    with pytest.raises(InputError, match=r"lacks \d+ of \d+ runs"):
        reading.recorded(ROOT / "experiments" / "pilot.toml", ROOT / "experiments" / "none")


def test_outcomes_are_the_logarithms_of_mean_losses(pilot):
    few = dict(list(pilot.items())[:3])
    findings = reading.study(few, ("dispersion",))
    outcomes = findings(reading.run_outcomes).set_index("model")["loss_area"]
    for run, history in few.items():
        assert outcomes[run.name] == pytest.approx(np.log(np.mean(history["train_loss"])), rel=1e-12)


def test_tasks_that_nobody_learns_have_no_order(pilot):
    guessing = {
        run: {**history, "train_accuracy": [0.2]} if run.training.task == "cycle-navigation" else history
        for run, history in pilot.items()
    }
    assert "cycle-navigation" in reading.without_order(guessing)
    solved = {run: {**history, "train_accuracy": [1.0]} for run, history in pilot.items()}
    assert reading.without_order(solved) == []


def cells(sign):
    """Seven tasks × twelve masks whose outcome is the first candidate, times a sign."""
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {"group": f"task {t}", "attention": f"mask {m}", "kind": "full", "stage": "initialisation",
         "candidate": name, "seeds": 3, "loss_area": sign * m + 0.01 * t, "epochs": float(m),
         "ln_value": float(m) if name == "dispersion" else rng.normal()}
        for t in range(7) for m in range(12) for name in reading.CANDIDATES
    )  # fmt: skip


def test_verdicts_of_a_planted_predictor_and_of_noise():
    found = reading.registered_tests(cells(1))
    first = found[(found["outcome"] == "loss_area") & (found["masks"] == "of which all are known")]
    verdicts = first.set_index("candidate")["verdict"]
    assert verdicts["dispersion"] == "predicts"
    assert "predicts" not in {verdicts["xi_sound"], verdicts["lambda_sound"]}
    assert reading.by_task(cells(-1))["dispersion"].to_numpy() == pytest.approx(-1)


def doses(slopes):
    """Runs whose loss area follows a planted slope of its arm."""
    return pd.DataFrame(
        {"task": f"task {t}", "attention": attention, "arm": arm, "factor": factor, "seed": seed,
         "loss_area": (slopes[arm] + 0.01 * t) * np.log(factor) + 0.001 * seed}
        for t in range(7) for attention in ("full", "random-5") for arm in slopes
        for factor in (0.25, 0.5, 1, 2, 4) for seed in range(3)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("slopes", "said"),
    [
        ({"for good": 0.3, "at first": 0.2}, "δ drives speed"),
        ({"for good": 0.3, "at first": -0.2}, "The two arms disagree in sign (full, random-5)"),
        ({"for good": -0.3, "at first": -0.2}, "Not all intervals lie above 0"),
    ],
)
def test_dose_response_finds_the_planted_slopes(slopes, said):
    found = reading.dose_slopes(doses(slopes))
    for t in range(7):
        own = found[(found["task"] == f"task {t}") & (found["arm"] == "at first")]["slope"]
        assert own.to_numpy() == pytest.approx(slopes["at first"] + 0.01 * t)
    means = reading.dose_means(found)
    assert means.set_index(["attention", "arm"])["mean"]["full", "for good"] == pytest.approx(
        slopes["for good"] + 0.03
    )
    assert reading.dose_verdict(means).startswith(said)


def test_arms_share_the_runs_that_are_not_moved():
    runs = [run for run in read_sweep(ROOT / "experiments" / "dose.toml") if isinstance(run, SweepRun)]
    history = {"train_loss": [0.5, 0.25]}
    found = reading.dose_runs(dict.fromkeys(runs, history))
    assert len(found) == 420  # 7 tasks × 2 attentions × 3 seeds × 5 factors × 2 arms
    assert set(found["factor"]) == {0.25, 0.5, 1.0, 2.0, 4.0}
    assert (found.groupby(["task", "attention", "arm"]).size() == 15).all()
