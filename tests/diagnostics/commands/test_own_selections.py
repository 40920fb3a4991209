"""``semdiag selections MODEL``: what it prints, its exit codes, what it refuses."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch

MODEL = """
import torch
from torch import nn


class Router(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return (self.factor * x @ self.weight.T).softmax(-1).topk(2, -1)


class Indexer(nn.Module):
    is_causal = True

    def __init__(self, masked, k):
        super().__init__()
        self.masked, self.k = masked, k

    def forward(self, x):
        scores = x @ x.mT
        if self.masked:
            scores = scores.masked_fill(~torch.ones_like(scores).tril().bool(), -torch.inf)
        return scores.topk(self.k, -1)


class Model(nn.Module):
    def __init__(self, masked=True, k=2, factor=1.0, parts=("router", "indexer")):
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        with torch.no_grad():
            self.embedding.weight.normal_(generator=torch.Generator().manual_seed(1))
        every = {"router": Router(factor), "indexer": Indexer(masked, k)}
        self.layers = nn.ModuleList(nn.ModuleDict({name: every[name] for name in parts}) for _ in range(1))

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        for layer in self.layers:
            for part in layer.values():
                part(x)
        return x


def good():
    return Model()


def looks_ahead():
    return Model(masked=False)


class Stale(Indexer):
    # keeps its first scores, or its first choice
    def __init__(self, keeps):
        super().__init__(True, 2)
        self.keeps, self.first = keeps, None

    def forward(self, x):
        if self.first is None:
            self.first = x
            return super().forward(x)
        return super().forward(self.first) if self.keeps == "scores" else None


def stale():
    model = Model()
    model.layers[0]["indexer"] = Stale("scores")
    return model


def once():
    model = Model()
    model.layers[0]["indexer"] = Stale("choice")
    return model


def inactive():
    return Model(k=6)


def not_numbers():
    return Model(factor=float("nan"))


def nothing():
    return Model(parts=())
"""
MASK = torch.ones(3, 6, dtype=torch.int64)
MASK[1, 4:] = 0


@pytest.fixture
def models(here):
    """A module with models of one's own, and their inputs."""
    (here / "own_models.py").write_text(MODEL, encoding="utf-8")
    ids = torch.arange(18).remainder(16).view(3, 6)
    np.save("ids.npy", ids.numpy())
    torch.save({"input_ids": ids, "attention_mask": MASK}, "padded.pt")
    yield
    sys.modules.pop("own_models", None)


@pytest.mark.usefixtures("models")
def test_it_says_what_routers_and_indexers_choose(run_semdiag, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    outcome = run_semdiag("selections", "own_models:good", "--inputs", "padded.pt")
    assert (outcome.code, outcome.err) == (0, "")
    words = " ".join(outcome.out.split())
    assert "own_models:good: 2 selections, certified for bfloat16" in words
    assert "layers.0.router 2 of 8 16 " in words
    assert "layers.0.indexer 2 of 6 16 10 " in words, "two tokens of each sample have no more than two keys"
    assert "margin and certificate are those of its logits" in words
    assert "Left out: 2 padded rows of each selection." in words
    assert words.startswith("0 of 32 rows are faulty.")


@pytest.mark.usefixtures("models")
def test_json_has_the_numbers_worked_out_by_hand(run_semdiag):
    outcome = run_semdiag(
        "selections", "own_models:good", "--inputs", "padded.pt", "--json", "--format", "fp8-e4m3"
    )
    assert outcome.code == 0
    said = json.loads(outcome.out)
    assert said["schema"] == "semdiag.selections/2"
    assert said["provenance"]["command"][:3] == ["semdiag", "selections", "own_models:good"]
    (entry,) = said["results"]
    assert (entry["model"], entry["format"], entry["passed"]) == ("own_models:good", "float8_e4m3fn", True)
    router = entry["selections"][0]
    table = torch.empty(16, 4).normal_(generator=torch.Generator().manual_seed(1)).double()
    weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double()
    scores = (table[torch.arange(18).remainder(16)] @ weight.T)[MASK.bool().flatten()]
    ordered, chosen = scores.sort(descending=True)
    margin, size = ordered[:, 1] - ordered[:, 2], ordered[:, 1].abs() + ordered[:, 2].abs()
    near = 1e-5  # sums of four products below 10: off by less than 5 · 2^-24 · 40
    assert router["margin_median"] == pytest.approx(float(np.median(margin)), abs=near)
    assert router["margin_p5"] == pytest.approx(float(np.percentile(margin, 5)), abs=near)
    assert router["certified"] == int((margin > size / 16 + 2.0**-9).sum())
    shares = (torch.bincount(chosen[:, :2].flatten(), minlength=8) / 16).tolist()
    assert router["load"]["shares"] == pytest.approx(shares)
    assert router["load"]["unused"] == shares.count(0)
    assert (router["load"]["largest"], router["load"]["even"]) == (max(shares), 0.25)
    assert (router["module"], router["layer"], router["kind"], router["k"]) == ("layers.0.router", 0, "experts", 2)
    assert (router["margin_of"], router["future"], router["first_kept_share"]) == ("logits", None, None)


@pytest.mark.device
@pytest.mark.usefixtures("models")
def test_another_device_says_the_same(run_semdiag, other_device):
    found = []
    for device in ("cpu", other_device):
        outcome = run_semdiag(
            "selections", "own_models:good", "--inputs", "padded.pt", "--json", "--device", device
        )
        assert outcome.code == 0, outcome.err
        found.append(json.loads(outcome.out)["results"][0]["selections"])
    for one, other in zip(*found, strict=True):
        numbers = ("margin_median", "margin_p5")  # float32 sums of four products below 10, in another order
        assert [one.pop(name) for name in numbers] == pytest.approx(
            [other.pop(name) for name in numbers], abs=1e-5
        )
        assert one == other


@pytest.mark.usefixtures("models")
def test_a_future_key_is_a_fault(run_semdiag):
    outcome = run_semdiag("selections", "own_models:looks_ahead", "--inputs", "ids.npy")
    assert outcome.code == 1
    words = " ".join(outcome.out.split())
    assert "layers.0.indexer has faulty rows:" in words
    assert " future." in words


@pytest.mark.usefixtures("models")
def test_a_key_of_padding_is_a_fault(run_semdiag):
    ids = torch.load("padded.pt", weights_only=True)["input_ids"]
    torch.save({"input_ids": ids, "attention_mask": MASK.flip(1)}, "left.pt")  # which the indexer does not look at
    outcome = run_semdiag("selections", "own_models:good", "--inputs", "left.pt", "--json")
    assert outcome.code == 1
    row = json.loads(outcome.out)["results"][0]["selections"][1]
    assert (row["module"], row["padding"], row["future"]) == ("layers.0.indexer", row["faults"], 0)
    assert row["padding"] > 0


@pytest.mark.usefixtures("models")
def test_k_of_all_keys_is_told_to_be_inactive(run_semdiag):
    outcome = run_semdiag("selections", "own_models:inactive", "--inputs", "ids.npy")
    assert outcome.code == 0
    assert "Selection inactive, as no row has more than k to choose from: layers.0.indexer." in outcome.out


@pytest.mark.usefixtures("models")
def test_two_runs_of_one_model_can_be_compared(run_semdiag):
    for name, options in (("one", ()), ("two", ("--batch-size", 1, "--dtype", "float64"))):
        outcome = run_semdiag(
            "selections", "own_models:good", "--inputs", "padded.pt", "--save", f"{name}.npz", *options
        )
        assert outcome.code == 0
        assert f"Written: {name}.npz" in outcome.err
    outcome = run_semdiag("selections", "one.npz", "two.npz", "--json")
    (entry,) = json.loads(outcome.out)["results"]
    assert (outcome.code, entry["rows"], entry["changed"], entry["k"]) == (0, 32, 0, 2)
    assert [row["module"] for row in entry["layers"]] == ["layers.0.router", "layers.0.indexer"]
    outcome = run_semdiag("selections", "one.npz", "--json")
    entries = json.loads(outcome.out)["results"]
    assert (outcome.code, [entry["rows"] for entry in entries]) == (0, [16, 16])


@pytest.mark.usefixtures("models")
def test_every_faulty_row_of_a_model_is_listed(run_semdiag):
    options = ("--inputs", "padded.pt", "--rows", "rows.csv", "--json")
    whole = run_semdiag("selections", "own_models:looks_ahead", *options)
    table = pd.read_csv("rows.csv")
    assert len(table) == json.loads(whole.out)["results"][0]["faults"] > 0
    assert set(table["module"]) == {"layers.0.indexer"}
    run_semdiag("selections", "own_models:looks_ahead", *options, "--batch-size", 1)
    pd.testing.assert_frame_equal(pd.read_csv("rows.csv"), table)
    assert set(table["sample"]) == {0, 1, 2}


@pytest.mark.usefixtures("models")
def test_a_choice_of_the_call_before_is_stale(run_semdiag):
    outcome = run_semdiag("selections", "own_models:stale", "--inputs", "ids.npy", "--batch-size", 1, "--json")
    rows = {row["module"]: row for row in json.loads(outcome.out)["results"][0]["selections"]}
    assert {name: (row["repeats"], row["calls"], row["chose_in"]) for name, row in rows.items()} == {
        "layers.0.router": (0, 3, 3), "layers.0.indexer": (2, 3, 3)
    }  # fmt: skip
    assert "layers.0.indexer chose in 2 of 3 calls what it chose in the call before" in outcome.err
    outcome = run_semdiag("selections", "own_models:once", "--inputs", "ids.npy", "--batch-size", 1)
    assert "layers.0.indexer chose in 1 of 3 calls." in outcome.out


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("own_models:good",), "Name inputs for own_models:good with --inputs FILE: token ids"),
        (("own_models:good", "--inputs", "ids.npy", "--causal"), "--causal applies to files"),
        (("own_models:good", "padded.pt", "--inputs", "ids.npy"), "A second file applies to files"),
        (("own_models:good", "--inputs", "ids.npy", "--format", "int4"), "Unknown number format"),
        (("own_models:good", "--inputs", "none.npy"), "none.npy"),
        (("own_models:not_numbers", "--inputs", "ids.npy"), "layers.0.router: The scores of row 0 hold NaN"),
        (("own_models:nothing", "--inputs", "ids.npy"), "own_models:nothing selects nothing for its tokens"),
        (("ids.npy", "--inputs", "ids.npy"), "--inputs applies to a model (hf:PATH), and ids.npy is not one"),
        (("ids.npy", "--batch-size", 3), "--batch-size applies to a model"),
        (("ids.npy", "--save", "own.npz"), "--save applies to a model"),
        (("own_models:good", "--inputs", "ids.npy", "--save", "own.txt"), "--save takes a file name that ends in"),
    ],
)
def test_what_is_refused(refusal, words, said):
    assert said in refusal("selections", *words)


@pytest.mark.usefixtures("models")
def test_inputs_that_the_model_does_not_take_are_refused(refusal):
    np.save("far.npy", np.full((2, 3), 99))
    assert "cannot be run on these inputs (IndexError" in refusal(
        "selections", "own_models:good", "--inputs", "far.npy"
    )


def test_a_hugging_face_model_is_read_from_disk(run_semdiag, here):
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained("mixtral")
    np.save("ids.npy", np.arange(20).reshape(2, 10))
    outcome = run_semdiag("selections", "hf:mixtral", "--inputs", "ids.npy", "--json")
    assert outcome.code == 0
    (entry,) = json.loads(outcome.out)["results"]
    assert [row["module"] for row in entry["selections"]] == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert [(row["rows"], row["k"], row["choices"]) for row in entry["selections"]] == [(20, 1, 4)] * 2
