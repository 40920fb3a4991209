"""``semdiag info``."""

import torch

from semdiag.measuring.words import percent
from semdiag_models import sha256


def test_a_table_shows_what_is_in_a_checkpoint(run_semdiag, tiny_runs):
    outcome = run_semdiag("info", tiny_runs.topk)
    assert (outcome.code, outcome.err) == (0, "")
    for words in (
        "sha256",
        "even-pairs",
        "topk",
        "learning_rate",
        "holdout_accuracy",
        "made by the tests",
        "last epoch",
    ):
        assert words in outcome.out


def test_json_holds_everything(run_semdiag, strict, tiny_runs, tiny_models):
    outcome = run_semdiag("info", tiny_runs.topk / "best.pt", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = strict(outcome.out)
    assert list(found) == ["schema", "results", "checkpoint", "model", "training", "last epoch", "provenance"]
    assert found["schema"] == "semdiag.info/2"
    assert found["checkpoint"]["sha256"] == sha256(tiny_runs.topk / "best.pt")
    assert (found["checkpoint"]["snapshot"], found["checkpoint"]["task"]) == ("best", "even-pairs")
    assert (found["model"]["attention"], found["model"]["k"], found["model"]["heads"]) == ("topk", 3, 2)
    assert found["model"]["parameters"] == sum(p.numel() for p in tiny_models[1].module.parameters())
    assert (found["training"]["seed"], found["training"]["epochs"]) == (7, tiny_runs.epochs)
    assert 0 <= found["last epoch"]["holdout_accuracy"] <= 1
    assert found["provenance"]["command"] == "made by the tests"


def test_an_initialisation_has_no_last_epoch(run_semdiag, strict, tiny_runs):
    assert strict(run_semdiag("info", tiny_runs.full / "epoch-0.pt", "--json").out)["last epoch"] == {}
    assert "last epoch: not in this file" in run_semdiag("info", tiny_runs.full / "epoch-0.pt").out


def test_a_checkpoint_of_the_papers_code_takes_a_configuration(run_semdiag, strict, paper_code):
    outcome = run_semdiag("info", paper_code.checkpoint, "--config", paper_code.config_file, "--json")
    found = strict(outcome.out)
    assert (found["checkpoint"]["source"], found["model"]["attention"]) == ("paper code", "banded")
    assert (found["training"], found["last epoch"]) == ({}, {})


def test_what_a_file_says_is_shown_as_it_is(run_semdiag, strict, tiny_runs, tmp_path):
    content = torch.load(tiny_runs.full / "last.pt", weights_only=True)
    content["provenance"] = {"command": "[bold]not bold[/bold] [/] [/red]", "loss": float("nan")}
    torch.save(content, tmp_path / "odd.pt")
    outcome = run_semdiag("info", tmp_path / "odd.pt")
    assert outcome.code == 0
    assert "[bold]not bold[/bold] [/] [/red]" in outcome.out
    assert strict(run_semdiag("info", tmp_path / "odd.pt", "--json").out)["provenance"]["loss"] is None


def test_it_opens_with_what_the_model_is(run_semdiag, tiny_runs, tiny_models):
    parameters = sum(p.numel() for p in tiny_models[1].module.parameters())
    config = tiny_models[1].encoder.config
    (accuracy,) = tiny_models[1].history["holdout_accuracy"][-1:]
    first = run_semdiag("info", tiny_runs.topk).out.splitlines()[0]
    expected = f"even-pairs, top-3, {config.blocks} blocks of {config.width}, {parameters:,} parameters, "
    assert expected in first.replace("1 block of", "1 blocks of")
    assert first.endswith(f"{percent(accuracy, '.0f', strict=True)} held out.")


def test_weights_without_a_model_are_listed_with_names_and_shapes(run_semdiag, strict, here):
    weights = {"layer.weight": torch.zeros(3, 4, dtype=torch.bfloat16), "bias": torch.zeros(())}
    torch.save(weights, here / "weights.pt")
    done = run_semdiag("info", "weights.pt")
    assert (done.code, done.err) == (0, "")
    for words in ("2 tensors of 13 numbers", "layer.weight", "3 × 4", "bfloat16", "mymodel:build"):
        assert words in done.out
    listed = strict(run_semdiag("info", "weights.pt", "--json").out)
    assert listed["weights"][0] == {"name": "layer.weight", "shape": [3, 4], "dtype": "bfloat16"}
    assert listed["parameters"] == 13


def test_a_file_of_no_weights_is_refused_as_before(refusal, here):
    torch.save({}, here / "empty.pt")
    torch.save({"a": 1}, here / "other.pt")
    assert "is not a semdiag checkpoint" in refusal("info", "empty.pt")
    assert "is not a semdiag checkpoint" in refusal("info", "other.pt")
