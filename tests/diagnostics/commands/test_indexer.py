"""``semdiag indexer``: what it prints, how it goes on after an interruption, what it refuses."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from semdiag.questions.indexer import measure
from semdiag.questions.indexer.answer import converged
from semdiag.selections.learned import IndexerFit

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Small(nn.Module):
    def __init__(self, seed=0, factor=1.0, classes=11):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.tokens, self.positions = nn.Embedding(11, 16), nn.Embedding(24, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.head = nn.Linear(16, classes)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.5, generator=draw)
            self.layers[1].weight.mul_(factor)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            q, k, v = (t.view(*ids.shape, 4, 4).transpose(1, 2) for t in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.head(x)


def good():
    return Small()


def other():
    return Small(seed=1)


def not_finite():
    return Small(factor=float("nan"))


def headless():
    return Small(classes=7)


def fails():
    model = Small()
    model.head = nn.Linear(3, 11)
    return model
"""
WORDS = ("--inputs", "ids.npy", "--k", 4, "--width", 4, "--passes", 3)


@pytest.fixture
def models(here):
    """A module with models of one's own; ids.npy: twelve texts, one of which stands there twice."""
    (here / "own_models.py").write_text(MODEL, encoding="utf-8")
    ids = np.random.default_rng(0).integers(0, 11, (12, 20))
    np.save("ids.npy", np.concatenate([ids, ids[:1]]))
    np.save("others.npy", np.random.default_rng(1).integers(0, 11, (5, 20)))
    yield here
    sys.modules.pop("own_models", None)


def result_of(outcome):
    assert outcome.code == 0, outcome.err
    (result,) = json.loads(outcome.out)["results"]
    return result


@pytest.mark.usefixtures("models")
def test_it_says_what_an_indexer_keeps_and_costs_on_texts_it_was_not_fitted_to(run_semdiag):
    outcome = run_semdiag("indexer", "own_models:good", *WORDS)
    assert outcome.code == 0, outcome.err
    first, second, *table = outcome.out.splitlines()
    result = result_of(run_semdiag("indexer", "own_models:good", *WORDS, "--json"))
    counts = ("fitted_texts", "held_out_texts", "repeated_texts", "short_texts", "tokens")
    assert [result[name] for name in counts] == [9, 3, 1, 0, 3 * 19]
    assert (result["k"], result["width"], result["heads"], result["passes"]) == (4, 4, 4, 3)
    masks = {row["mask"]: row for row in result["masks"]}
    assert masks["topk"]["recall"] == 1
    assert masks["topk"]["kept"] == max(row["kept"] for row in masks.values())
    assert masks["topk-layer"]["kept"] >= masks["indexer"]["kept"] > masks["random"]["kept"]
    assert result["share"] == pytest.approx(masks["indexer"]["kept"] / masks["topk"]["kept"])
    for row in masks.values():
        assert row["perplexity_change"] == pytest.approx(np.expm1(row["loss"] - result["loss"]))
        assert row["loss_change"] == pytest.approx(row["loss"] - result["loss"])
    assert f"{100 * result['share']:.0f}%" in first
    assert f"{100 * masks['indexer']['perplexity_change']:.0f}%" in first  # 122%
    assert "3 held-out texts, 57 tokens" in first
    half_way, end = result["divergence_in_fit"]
    assert (end == result["divergence"], result["converged"]) == (True, converged([half_way, end]))
    assert f"{end:.3f}" in second
    assert sum(line.strip().startswith(("indexer", "exact", "newest", "random")) for line in table) == 5
    assert [layer["module"] for layer in result["layers"]] == ["", "#1"]


def test_a_fit_has_converged_if_the_second_half_brought_two_percent_or_less():
    assert converged([1.0, 0.97]) is False
    assert converged([1.0, 0.99]) is True
    assert converged([1.0, 1.2]) is True
    assert converged([]) is None


@pytest.mark.usefixtures("models")
def test_an_interrupted_fit_goes_on_and_is_loaded_again(run_semdiag, refusal, monkeypatch):
    monkeypatch.setattr(measure, "_SAVE_EVERY", -1.0)
    words = ("indexer", "own_models:good", *WORDS)
    whole = result_of(run_semdiag(*words, "--json"))
    add = IndexerFit.add

    def interrupted(fit, model, batch):
        if fit.texts == 6:
            raise KeyboardInterrupt
        add(fit, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(IndexerFit, "add", interrupted)
        assert run_semdiag(*words, "--save", "fit.safetensors").code == 130
    saved = ("--save", "fit.safetensors")
    assert result_of(run_semdiag(*words, *saved, "--json")) == whole
    assert result_of(run_semdiag(*words, *saved, "--json")) == whole  # nothing is left to fit
    assert "seed = 0, not 1" in refusal(*words, *saved, "--seed", 1)
    assert "fitted to other texts" in refusal(*words, *saved, "--samples", 11)
    load = ("indexer", "own_models:good", "--load", "fit.safetensors", "--k", 4)
    loaded = result_of(run_semdiag(*load, "--inputs", "ids.npy", "--json"))
    assert loaded["held_out_texts"] == 3
    assert loaded["divergence_in_fit"] == whole["divergence_in_fit"]
    for row, same in zip(loaded["masks"], whole["masks"], strict=True):
        assert row["kept"] == pytest.approx(same["kept"])
        assert row["loss"] == pytest.approx(same["loss"])
    others = result_of(run_semdiag(*load[:-1], 6, "--inputs", "others.npy", "--json"))
    assert (others["held_out_texts"], others["k"]) == (5, 6)
    assert "another model" in refusal("indexer", "own_models:other", *load[2:], "--inputs", "ids.npy")
    fitted = IndexerFit.load(Path("fit.safetensors"))
    held_out = [
        row for row in np.load("ids.npy")[:12] if measure.digest_of(torch.tensor(row[None])) in fitted.digests
    ]
    np.save("read.npy", np.stack(held_out))
    assert "all these texts" in refusal(*load, "--inputs", "read.npy")


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("model", "words", "part"),
    [
        ("own_models:good", ("--inputs", "ids.npy", "--k", 20), "longest 20"),
        ("own_models:good", ("--inputs", "one.npy", "--k", 4), "two texts"),
        ("own_models:good", ("--k", 4), "--inputs"),
        ("own_models:good", (*WORDS, "--load", "fit.safetensors"), "--width"),
        ("own_models:good", ("--inputs", "ids.npy", "--k", 4, "--load", "none.safetensors"), "none.safetensors"),
        (
            "own_models:good",
            ("--inputs", "ids.npy", "--k", 4, "--load", "other.safetensors"),
            "no fitted indexers",
        ),
        ("own_models:good", ("--inputs", "ids.npy", "--k", 4, "--load", "ids.npy"), ".npz"),
        (
            "own_models:good",
            ("--inputs", "ids.npy", "--k", 4, "--load", "broken.safetensors"),
            "broken.safetensors",
        ),
        ("own_models:good", (*WORDS, "--save", "fit.pt"), ".safetensors"),
        ("own_models:good", (*WORDS, "--save", "other.safetensors"), "no fitted indexers"),
        ("own_models:not_finite", WORDS, "not finite"),
        ("own_models:headless", WORDS, "language model"),
        ("own_models:fails", WORDS, "cannot read"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_fitted(refusal, monkeypatch, model, words, part):
    from safetensors.torch import save_file

    np.save("one.npy", np.arange(10).reshape(1, 10))
    save_file({"weight": torch.zeros(3)}, "other.safetensors")
    Path("broken.safetensors").write_bytes(bytes(range(40)))
    monkeypatch.setattr(IndexerFit, "add", None)
    assert part in refusal("indexer", model, *words)


def test_an_encoder_of_semdiag_is_refused(refusal, tiny_runs, here):
    np.save("ids.npy", np.zeros((4, 12), dtype=int))
    assert "encoder" in refusal("indexer", tiny_runs.full, "--inputs", "ids.npy", "--k", 3)
