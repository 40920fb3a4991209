"""Every measuring command on models that are not semdiag's own: it works, or refuses in one line."""

import json
import re
import sys

import pytest
import torch

from semdiag.capturing import batches as batching
from semdiag.measuring.calls import memory
from semdiag_models import Encoder, TrainingConfig
from semdiag_models.checkpoint import Checkpoint, write_checkpoint

SOURCE = '''
import torch


class Model(torch.nn.Module):
    """Attention written out by hand: 2 heads, 11 tokens."""

    def __init__(self, causal, factor, vocabulary):
        super().__init__()
        self.embedding, self.qkv = torch.nn.Embedding(vocabulary, 8), torch.nn.Linear(8, 24)
        self.head = torch.nn.Linear(8, 2)
        self.causal = causal
        with torch.no_grad():
            self.qkv.weight *= factor

    def forward(self, ids):
        q, k, v = (x.unflatten(2, (2, 4)).transpose(1, 2) for x in self.qkv(self.embedding(ids)).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / 2
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        return self.head((scores.softmax(-1) @ v).transpose(1, 2).flatten(2).mean(1))


def built(causal, factor, vocabulary=3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(causal, factor, vocabulary), torch.randint(0, vocabulary, (4, 11))


def full():
    return built(False, 1, 1000)  # keys of the same token would tie, or not, by the processor's rounding


def infinite():  # q and k are 1e20: no score is a float32, but that of a query with one key spans 0
    return built(True, 1e20)


def not_a_number():
    return built(False, float("nan"))


def long():
    model, _ = built(True, 1)
    return model, torch.randint(0, 3, (1, 1500))
'''

COMMANDS = (
    "dispersion",
    "dispersion --k 3",
    "separation",
    "separation --k 3",
    "separation --k 3 --json",
    "stability",
    "mask-stability",
    "k-sweep",
    "k-sweep --rerun --k 3",
    "report",
    "report --k 3 --noise 0.1",
)
SOME = ("dispersion --k 3", "separation", "mask-stability", "k-sweep", "report")
OF_ENCODERS = ("bounds", "lipschitz", "landscape", "convergence", "check")


@pytest.fixture(autouse=True)
def factories(here):
    """The module ``theirs`` in the current folder."""
    (here / "theirs.py").write_text(SOURCE, encoding="utf-8")
    yield
    sys.modules.pop("theirs", None)


@pytest.fixture
def measured(run_semdiag, here):
    """Call with a command and models: what it says when it has measured them and written its page."""

    def run(command, *models, figures=False):
        name, *words = command.split()
        outcome = run_semdiag(name, *models, *words, "--figures", "svg" if figures else "none", "--out", "page")
        assert outcome.code == 0, outcome
        assert (here / "page" / "index.html").is_file()
        return outcome

    return run


@pytest.mark.slow
@pytest.mark.parametrize("command", ["info", "overlap", *COMMANDS])
def test_every_measuring_command_measures_them(command, measured, run_semdiag):
    if command == "info":
        assert run_semdiag("info", "theirs:full").code == 0
    else:
        measured(command, "theirs:full", figures=command in ("report --k 3 --noise 0.1", "k-sweep --rerun --k 3"))


@pytest.mark.slow
def test_a_k_sweep_runs_them_with_masks_unless_told_otherwise(run_semdiag, tiny_runs):
    """Of runs of semdiag train it does so on request, which an option about such runs is."""

    def masks(*words):
        outcome = run_semdiag("k-sweep", *words, "--figures", "none", "--out", "page", "--json", "--quiet")
        (result,) = json.loads(outcome.out)["results"]
        return {row["mask"] for row in result["rerun"]}

    assert masks("theirs:full") >= {"none", "topk", "topk-layer"}
    assert masks("theirs:full", "--no-rerun") == masks(tiny_runs.full, "--samples", 4) == set()
    assert masks(tiny_runs.full, "--samples", 4, "--kinds", "topk") == {"none", "topk"}


def test_lengths_need_minutes(refusal):
    said = refusal("report", "theirs:full", "--lengths", "8", "--rerun-minutes", 0)
    assert said == "--lengths runs the model with masks, and --rerun-minutes 0 does not: leave one out."


@pytest.mark.parametrize("command", ["k-sweep", "report", "dispersion"])
def test_texts_too_long_for_the_memory_are_refused_with_the_length_that_fits(command, refusal, here, monkeypatch):
    """Before they run: the longest forward pass until then has 256 tokens."""
    lengths = []
    monkeypatch.setattr(memory, "free_memory", lambda device: 0.002 * 2**30)
    real = batching.call
    monkeypatch.setattr(
        batching, "call", lambda model, batch: lengths.append(batch.shape[1]) or real(model, batch)
    )
    said = refusal(command, "theirs:long")
    assert re.search(r"^theirs:long: one sample of 1,500 tokens takes 0\.\d GiB, and 0\.\d GiB are free\.", said)
    fits = int(re.search(r"--max-length (\d+)", said)[1])
    assert 20 < fits < 1500
    assert max(lengths) <= 256
    assert not (here / "page").exists()


@pytest.mark.parametrize("command", OF_ENCODERS)
def test_what_needs_an_encoder_is_refused(command, refusal):
    refusal(command, "theirs:full")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "model"),
    [
        *((command, "infinite") for command in SOME),  # of float32: stability is of float64
        *((command, "not_a_number") for command in ("report", "stability")),
    ],
)
def test_one_whose_scores_are_no_numbers_is_told_of(command, model, measured):
    outcome = measured(command, f"theirs:{model}", figures=command == "report")
    assert f"attention scores of theirs:{model} are NaN or infinite" in " ".join(outcome.err.split())


@pytest.mark.slow
def test_the_report_of_separation_holds_what_k_would_leave(measured, here):
    measured("separation", "theirs:full")
    assert not (here / "page" / "data" / "within.csv").exists()
    measured("separation --k 3", "theirs:full")
    assert (here / "page" / "data" / "within.csv").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "factor"),
    [
        ("report --dtype float32", 1e20),
        *((command, float("nan")) for command in SOME),
    ],
)
def test_an_encoder_whose_scores_are_no_numbers_is_told_of(command, factor, measured, tiny_config, here):
    config = tiny_config("full", None)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        state = Encoder(config).state_dict()
    state |= {name: factor * value for name, value in state.items() if ".attention." in name}
    training = TrainingConfig("even-pairs", config.length, 1, 7, 20, 40)
    write_checkpoint(here / "diverged.pt", Checkpoint(config, training, state, 0, {}))
    outcome = measured(f"{command} --samples 10", "diverged.pt")
    assert "attention scores of diverged.pt are NaN or infinite" in " ".join(outcome.err.split())
