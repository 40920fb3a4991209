"""Every command on runs with hashed, clustered and redrawn attention: it works, and says what it cannot claim."""

import json

import pytest
import torch

from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
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


def results(outcome):
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["results"]


@pytest.mark.slow
def test_dispersion_shows_recall_where_largest_scores_are_looked_for(runs, run_semdiag, here):
    outcome = run_semdiag("dispersion", *runs, "--samples", 8, "--figures", "none", "--out", "page", "--json")
    found = results(outcome)
    assert all(one["all"]["p50"] > 0 for one in found)
    assert ["recall" in one["all"] for one in found] == [True, True, False]
    tables = outcome.err.split("dispersion δ (nats)")[1:]
    assert [("recall" in table, "no key" in table) for table in tables] == [
        (True, True),
        (True, True),
        (False, False),
    ]
    page = (here / "page" / "index.html").read_text("utf-8")
    for one in found[:2]:
        assert f"that a query keeps hold {one['all']['recall']:.0%} of its 3 largest scores" in page


@pytest.mark.slow
@pytest.mark.parametrize("command", ["separation", "overlap", "k-sweep", "stability", "mask-stability", "bounds"])
def test_commands_give_numbers_or_say_that_there_are_none(command, runs, run_semdiag, here):
    everything = ["--all"] if command in ("stability", "bounds") else []  # otherwise at most 30 lines
    outcome = run_semdiag(command, *runs, "--samples", 5, "--figures", "none", "--json", *everything)
    assert results(outcome)
    assert " nan" not in outcome.err.lower()
    said = {
        "k-sweep": ["inconclusive: its mask does not rank keys by their scores."],
        "stability": [f"no ξ is known for {kind} attention" for kind in KINDS],
        "bounds": [f"assumption not met: a bound is known for {kind} attention" for kind in KINDS],
        "mask-stability": ["does not depend on the input"]
        + [f"do not say which keys {kind} attention keeps" for kind in ("lsh", "routing")],
    }.get(command, [])
    text = " ".join(outcome.err.split())
    assert [words for words in said if words not in text] == []


@pytest.mark.slow
def test_a_report_of_all_together_with_full_and_top_k_is_written(runs, run_semdiag, tiny_runs, here):
    words = ("--samples", 10, "--figures", "svg", "--out", here / "report")
    outcome = run_semdiag("report", tiny_runs.full, tiny_runs.topk, *runs, *words)
    assert outcome.code == 0, outcome.err
    page = (here / "report" / "index.html").read_text(encoding="utf-8")
    assert ">nan" not in page
    assert " nan " not in page
    assert page.count("draws new random keys in every forward pass; measured with those of seed 0") == 1


@pytest.mark.slow
def test_a_redrawn_model_is_measured_with_the_draws_of_a_seed(runs):
    first, again, other = (
        [
            group["dispersion"].mean()
            for _, group in survey(runs, Conditions(samples=5, seed=seed)).queries.groupby("model", sort=False)
        ]
        for seed in (0, 0, 1)
    )
    assert first == again
    assert [a != b for a, b in zip(first, other, strict=True)] == [False, False, True]


@pytest.mark.slow
def test_check_passes_its_invariants(runs, run_semdiag, tiny_runs, here):
    outcome = run_semdiag("check", tiny_runs.full, tiny_runs.topk, *runs, "--samples", 5, "--exit-zero", "--json")
    assert outcome.code == 0, outcome.err
    assert "certified" in outcome.out


@pytest.mark.slow
def test_planes_of_the_loss(runs, run_semdiag, here):
    outcome = run_semdiag("landscape", *runs, "--samples", 4, "--grid", 3, "--figures", "none")
    assert outcome.code == 0, outcome.err


@pytest.mark.slow
def test_slopes_of_the_loss(runs, run_semdiag, here):
    routing = next(run for run in runs if run.name == "routing")
    few = ("--planes", 2, "--directions", 2, "--draws", 5)
    outcome = run_semdiag("lipschitz", routing, "--samples", 1, *few, "--figures", "none")
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
