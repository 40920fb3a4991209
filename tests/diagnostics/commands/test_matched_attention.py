"""Every command on runs with hashed, clustered and redrawn attention: it works, and says what it cannot claim."""

import json

import pandas as pd
import pytest
import torch

from semdiag_models import TrainingConfig, open_run, train_run

KINDS = {"lsh": {"hash_rounds": 2}, "routing": {"clusters": 3}, "redrawn": {}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_config):
    """A run of each kind, named like it, beside those of tiny_runs: same task, length and seed."""
    folder = tmp_path_factory.mktemp("matched")
    training = TrainingConfig("even-pairs", 12, 2, 7, 100, 40, snapshots=(0, 1))
    for kind, fields in KINDS.items():
        with torch.random.fork_rng():
            trainer = open_run(
                folder / kind, tiny_config(kind, 3, **fields), training, torch.device("cpu"),
                resume=False, overwrite=False,
            )  # fmt: skip
            train_run(folder / kind, trainer, {})
    return [folder / kind for kind in KINDS]


@pytest.fixture(params=range(len(KINDS)), ids=list(KINDS))
def run(request, runs):
    """The runs in turn."""
    return runs[request.param]


def results(outcome):
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["results"]


def test_dispersion_shows_recall_where_largest_scores_are_looked_for(run, run_semdiag, here):
    (found,) = results(run_semdiag("dispersion", run, "--samples", 20, "--json"))
    assert found["all"]["p50"] > 0
    assert ("recall" in found["all"]) == (run.name != "redrawn")
    outcome = run_semdiag("dispersion", run, "--samples", 20)
    assert ("recall" in outcome.out, "no key" in outcome.out) == (run.name != "redrawn",) * 2
    table = here / "reports" / f"dispersion-{run.name}" / "data" / "recall.csv"
    assert table.exists() == (run.name != "redrawn")
    if table.exists():
        by_head = pd.read_csv(table)
        pooled = by_head[by_head["layer"] == "all"].iloc[0]
        assert pooled["recall"] == pytest.approx(found["all"]["recall"])
        page = (table.parents[1] / "index.html").read_text("utf-8")
        assert f"that a query keeps hold {pooled['recall']:.0%} of its 3 largest scores" in page


@pytest.mark.parametrize("command", ["separation", "overlap", "k-sweep", "stability", "mask-stability", "bounds"])
def test_commands_give_numbers_or_say_that_there_are_none(command, run, run_semdiag, here):
    outcome = run_semdiag(command, run, "--samples", 10, "--json")
    assert results(outcome)
    table = run_semdiag(command, run, "--samples", 10)
    assert table.code == 0
    assert " nan" not in table.out.lower()
    said = {
        "k-sweep": "cannot tell: its mask does not rank keys by their scores.",
        "stability": f"no ξ is known for {run.name} attention",
        "bounds": f"these assumptions do not hold here: a bound is known for {run.name} attention",
        "mask-stability": "does not depend on the input"
        if run.name == "redrawn"
        else f"no certificate is known for {run.name} attention",
    }.get(command, "")
    assert said in " ".join(table.out.split())


def test_a_report_of_all_together_with_full_and_top_k_is_written(runs, run_semdiag, tiny_runs, here):
    outcome = run_semdiag(
        "report", tiny_runs.full, tiny_runs.topk, *runs, "--samples", 10, "--out", here / "report"
    )
    assert outcome.code == 0, outcome.err
    page = (here / "report" / "index.html").read_text(encoding="utf-8")
    assert ">nan" not in page
    assert " nan " not in page
    assert page.count("draws new random keys in every forward pass; measured with those of seed 0") == 1


def test_a_redrawn_model_is_measured_with_the_draws_of_a_seed(run, run_semdiag, here):
    numbers = [
        results(run_semdiag("dispersion", run, "--samples", 10, "--seed", seed, "--json"))[0]["all"]["mean"]
        for seed in (0, 0, 1)
    ]
    assert numbers[0] == numbers[1]
    assert (numbers[0] != numbers[2]) == (run.name == "redrawn")


def test_check_passes_its_invariants(runs, run_semdiag, tiny_runs, here):
    outcome = run_semdiag("check", tiny_runs.full, tiny_runs.topk, *runs, "--samples", 10, "--exit-zero", "--json")
    assert outcome.code == 0, outcome.err
    assert "certified" in outcome.out


def test_planes_of_the_loss(run, run_semdiag, here):
    outcome = run_semdiag("landscape", run, "--samples", 4, "--grid", 3)
    assert outcome.code == 0, outcome.err


def test_slopes_of_the_loss(runs, run_semdiag, here):
    routing = next(run for run in runs if run.name == "routing")
    outcome = run_semdiag("lipschitz", routing, "--samples", 2, "--directions", 2)
    assert outcome.code == 0, outcome.err


def test_training_takes_every_option_of_the_kinds(run_semdiag, here):
    small = ("--length", 10, "--blocks", 1, "--width", 8, "--mlp-width", 8, "--head-width", 4, "--heads", 2)
    small += ("--train-samples", 20, "--holdout-samples", 20, "--epochs", 1, "--quiet")
    chosen = {
        "lsh-4-rounds-2-bits-2-asymmetric": "lsh --hash-rounds 2 --hash-bits 2 --hashes asymmetric",
        "routing-4-clusters-2-decay-0.9": "routing --clusters 2 --centroid-decay 0.9 --pooling cls",
        "redrawn-4": "redrawn",
    }
    for label, words in chosen.items():
        outcome = run_semdiag("train", "even-pairs", *small, "--k", 4, "--attention", *words.split(), "--seed", 3)
        assert outcome.code == 0, outcome.err
        assert (here / "checkpoints" / f"even-pairs-{label}-seed-3" / "last.pt").exists()
