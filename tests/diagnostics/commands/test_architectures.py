"""Every command on a checkpoint with global tokens, CLS and post-norm blocks."""

import json

import pytest
import torch

from semdiag_models import Encoder, TrainingConfig
from semdiag_models.checkpoint import Checkpoint, write_checkpoint

CONTROL = "even-pairs-bottomk-3"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_config):
    """Untrained checkpoints: full and banded with global tokens (both post-norm with CLS), bottom-k."""
    folder = tmp_path_factory.mktemp("architectures")
    post = {"norm": "post", "pooling": "cls"}
    configs = {
        "full": tiny_config("full", None, **post),
        "global": tiny_config("banded", 3, global_tokens=2, **post),
        CONTROL: tiny_config("bottomk", 3),
    }
    for name, config in configs.items():
        with torch.random.fork_rng():
            torch.manual_seed(3)
            state = {name: 3 * value for name, value in Encoder(config).state_dict().items()}
        training = TrainingConfig("even-pairs", 12, 1, 7, 20, 40)
        write_checkpoint(folder / f"{name}.pt", Checkpoint(config, training, state, 0, {}))
    return folder


def asked(run_semdiag, command, *models):
    outcome = run_semdiag(command, *models, "--samples", 20, "--json", "--figures", "none", "--quiet")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)["results"]


@pytest.mark.slow
def test_dispersion_and_separation_see_every_query(run_semdiag, runs, here):
    for command, name in (("dispersion", None), ("separation", "separation")):
        full, banded = asked(run_semdiag, command, runs / "full.pt", runs / "global.pt")
        found = [result["all"] if name is None else result["all"][name] for result in (full, banded)]
        assert [values["queries"] for values in found] == [20 * 2 * 2 * 13, 20 * 2 * 2 * 15]
    # Three extra tokens are attended to by all 15 queries; none of the others by more than their window.
    load = banded["all"]["load"]
    assert load["p100"] == 15
    assert load["p75"] < 15


@pytest.mark.slow
def test_stability_and_bounds_hold(run_semdiag, runs, here):
    for command in ("stability", "bounds"):
        results = asked(run_semdiag, command, runs / "full.pt", runs / "global.pt")
        for result in results[:2]:
            sound = [v for v in result["verdicts"] if v["form"].startswith("sound")]
            assert sound
            assert {v["verdict"] for v in sound} <= {"holds", "vacuous"}


@pytest.mark.slow
def test_no_form_is_claimed_for_bottom_k(run_semdiag, runs, here):
    (result,) = asked(run_semdiag, "bounds", runs / f"{CONTROL}.pt")
    together = [v for v in result["verdicts"] if v["where"] == "all"]
    # Two forms bound the gradient with the masks as they are, of whatever kind; the others need a theorem.
    assert {v["verdict"] for v in together if v["form"] in ("point", "local")} == {"holds"}
    together = [v for v in together if v["form"] not in ("point", "local")]
    assert {v["verdict"] for v in together} == {"assumption not met"}
    assert all("a bound is known for bottomk attention" in v["note"] for v in together)


@pytest.mark.slow
def test_a_report_names_the_global_tokens(run_semdiag, runs, here):
    outcome = run_semdiag("report", runs, "--samples", 20, "--figures", "svg", "--out", "r", "--quiet")
    assert outcome.code == 0, outcome.err
    page = (here / "r" / "index.html").read_text(encoding="utf-8")
    assert "banded (k = 3 + 2 global)" in page
    assert "norm post, pooling cls" in page
