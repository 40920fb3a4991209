"""The tables of a measurement against loops over samples, layers, heads and queries."""

import dataclasses
import math
import re

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from residuals import recomputation_residual
from torch import nn

from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.measuring.measure import measure
from semdiag_files import InputError
from semdiag_models import Encoder

PAD = 2
KINDS = [("full", None, {}), ("topk", 3, {}), ("banded", 3, {}), ("block", 5, {}), ("bottomk", 3, {})]
KINDS += [
    ("banded", 3, {"global_tokens": 2, "pooling": "cls"}),
    ("block", 5, {"global_tokens": 1, "norm": "post"}),
]


def make(config, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = Encoder(config)
        for block in encoder.blocks:  # scores of the size that trained models have
            nn.init.normal_(block.attention.qkv.weight, std=1.0)
        return encoder.eval()


@pytest.fixture(params=KINDS, ids=str)
def encoder(request, tiny_config):
    attention, k, others = request.param
    return make(tiny_config(attention, k, **others))


@pytest.fixture
def full(tiny_config):
    return make(tiny_config())


@pytest.fixture
def tokens():
    """Seven samples of length 12; PAD in the first, third, fourth and last."""
    found = torch.randint(2, (7, 12), generator=torch.Generator().manual_seed(2))
    for sample, length in ((0, 9), (2, 4), (3, 1), (6, 11)):
        found[sample, length:] = PAD
    return found


def selected_keys(config, i, z):
    """Keys of query i among the valid ones, whose scores are z; CLS, 12 tokens, global tokens."""
    order = sorted(z, key=lambda j: (-z[j], j))
    if config.attention in ("topk", "bottomk"):
        return order[: config.k] if config.attention == "topk" else order[-config.k :]
    first = int(config.pooling == "cls")
    inner = range(first, first + 12)
    if config.attention == "full" or i not in inner:
        return list(z)
    start = min(max(i - first - (config.k - 1) // 2, 0), 12 - config.k)
    start = first + (start if config.attention == "banded" else (i - first) // 5 * 5)
    return [j for j in z if j not in inner or start <= j < start + config.k]


def range_and_gap(z, inside):
    kept, dropped = [z[j] for j in inside], [z[j] for j in z if j not in inside]
    if not kept:
        return math.nan, math.nan
    return max(kept) - min(kept), min(kept) - max(dropped) if dropped else math.inf


def naive(encoder, tokens, ks=()):
    """Queries {(sample, layer, head, query): columns} and loads {(sample, layer, head, key): columns}."""
    config, seen = encoder.config, []
    copy = make(config)
    copy.load_state_dict(encoder.state_dict())
    for block in copy.double().blocks:
        block.attention.register_forward_pre_hook(lambda module, inputs: seen.append((module, inputs[0])))
    queries, loads = {}, {}
    for sample, row in enumerate(tokens):
        seen.clear()
        with torch.no_grad():
            copy(row[None])
        ids = encoder.sequence(row[None])[0]
        valid = [j for j, token in enumerate(ids) if token != PAD]
        for layer, (attention, x) in enumerate(seen):
            weight, bias = attention.qkv.weight.detach(), attention.qkv.bias.detach()
            q, k, _ = (x[0] @ weight.T + bias).view(len(ids), 3, config.heads, 8).unbind(1)
            for h in range(config.heads):
                for j in valid:
                    loads[sample, layer, h, j] = dict.fromkeys(
                        ("load", *(f"load_k{n}" for n in ks), "received"), 0
                    )
                for i in valid:
                    z = {j: float(q[i, h] @ k[j, h]) / math.sqrt(8) for j in valid}
                    inside = {"": selected_keys(config, i, z)}
                    inside |= {f"_k{n}": sorted(z, key=lambda j: -z[j])[:n] for n in ks}
                    columns = {"keys": len(z), "kept": len(inside[""])}
                    for suffix, chosen in inside.items():
                        columns[f"dispersion{suffix}"], columns[f"separation{suffix}"] = range_and_gap(z, chosen)
                        if not suffix:
                            mass = sum(math.exp(z[j] - z[max(chosen, key=z.get)]) for j in chosen)
                            columns["largest_weight"] = 1 / mass
                            for j in chosen:
                                weight = math.exp(z[j] - z[max(chosen, key=z.get)]) / mass
                                loads[sample, layer, h, j]["received"] += weight
                        else:
                            columns[f"weight_kept{suffix}"] = sum(map(math.exp, (z[j] for j in chosen))) / sum(
                                map(math.exp, z.values())
                            )
                        for j in chosen:
                            loads[sample, layer, h, j][f"load{suffix}"] += 1
                    queries[sample, layer, h, i] = columns
    return queries, loads


def assert_is(table, expected, place):
    names = list(next(iter(expected.values())))
    assert sorted(table.columns) == sorted(["model", *place, *names])
    found = table.set_index(place)[names].sort_index()
    wanted = pd.DataFrame.from_dict(expected, orient="index").sort_index()
    assert found.index.is_unique
    assert list(found.index) == list(wanted.index)
    np.testing.assert_allclose(found.to_numpy(float), wanted.to_numpy(float), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ks", [(), (2, 5)])
def test_the_tables_are_as_defined(encoder, tokens, ks):
    found = measure(encoder, tokens, k=ks, dtype=torch.float64, batch_size=3)
    queries, loads = naive(encoder, tokens, ks)
    assert_is(found.queries, queries, ["sample", "layer", "head", "query"])
    assert_is(found.loads, loads, ["sample", "layer", "head", "key"])


def test_padded_queries_and_keys_are_left_out(encoder, tokens):
    found = measure(encoder, tokens)
    ids = encoder.sequence(tokens)
    lengths = (ids != PAD).sum(1)
    per_sample = found.queries.groupby("sample").size()
    assert per_sample.tolist() == (lengths * 4).tolist()
    assert (found.queries["keys"] == found.queries["sample"].map(lambda s: int(lengths[s]))).all()
    for table, place in ((found.queries, "query"), (found.loads, "key")):
        assert (ids.numpy()[table["sample"], table[place]] != PAD).all()
    assert found.loads["load"].sum() == found.queries["kept"].sum()


@pytest.mark.processor
@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_the_batch_size_does_not_matter(encoder, tokens, batch_size):
    def sorted_by_place(table, last):
        return table.sort_values(["sample", "layer", "head", last], ignore_index=True)

    expected = measure(encoder, tokens, k=(2,), dtype=torch.float64, batch_size=3)
    found = measure(encoder, tokens, k=(2,), dtype=torch.float64, batch_size=batch_size)
    for name, last in (("queries", "query"), ("loads", "key")):
        tables = (sorted_by_place(getattr(m, name), last) for m in (found, expected))
        pd.testing.assert_frame_equal(*tables, rtol=1e-10)
    assert set(found.queries["sample"]) == set(range(7))
    assert found.models["samples"].tolist() == [7]


def test_batches_may_come_one_by_one_in_any_length(full, tokens):
    batches = [tokens[:2], tokens[:0], tokens[2:5, :7], tokens[5:6]]
    done = []
    found = measure(full, iter(batches), after_batch=done.append)
    assert done == [2, 3, 1]
    assert sorted(set(found.queries["sample"])) == [0, 1, 2, 3, 4, 5]
    alone = measure(full, tokens[2:5, :7])
    part = found.queries[found.queries["sample"].between(2, 4)]["dispersion"]
    np.testing.assert_allclose(part, alone.queries["dispersion"], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
def test_token_ids_may_be_whole_numbers_of_any_kind(full, tokens, dtype):
    found, expected = (measure(full, t).queries["dispersion"] for t in (tokens.to(dtype), tokens))
    assert found.equals(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_come_in_the_precision_they_were_computed_in(full, tokens, dtype):
    found = measure(full, tokens, dtype=dtype, k=(2,))
    name = str(dtype).removeprefix("torch.")
    assert found.provenance["dtype"] == name
    assert {str(found.queries[c].dtype) for c in ("dispersion", "separation", "dispersion_k2")} == {name}


def test_facts_about_the_model_and_the_run_are_kept(tiny_models, tokens):
    found = measure(tiny_models[1], tokens, inputs="somewhere", labels=torch.zeros(7, dtype=torch.int64))
    row = found.models.iloc[0]
    with torch.no_grad():
        accuracy = (tiny_models[1].module(tokens).argmax(1) == 0).double().mean().item()
    assert row["accuracy"] == pytest.approx(accuracy)
    assert (row["attention"], row["k"], row["task"], row["seed"], row["epoch"]) == ("topk", 3, "even-pairs", 7, 2)
    assert (row["snapshot"], row["source"], row["inputs"]) == ("last", "semdiag", "somewhere")
    assert (row["blocks"], row["heads"], row["width"], row["length"], row["samples"]) == (2, 2, 16, 12, 7)
    assert (row["attention_found"], row["attention_captured"]) == (2, 2)
    assert row["parameters"] == sum(p.numel() for p in tiny_models[1].module.parameters())
    assert row["sha256"] == tiny_models[1].sha256
    assert found.history["epoch"].tolist() == [1, 2]
    assert found.history["model"].tolist() == [tiny_models[1].path] * 2
    assert found.provenance["device"] == "cpu"


def test_what_is_unknown_about_an_encoder_is_missing(full, tokens):
    found = measure(full, tokens)
    assert found.models[["task", "seed", "epoch", "k", "accuracy"]].isna().all(axis=None)
    assert found.history.empty


@pytest.mark.processor
def test_nothing_in_the_model_changes(encoder, tokens):
    encoder.train()
    before = {name: t.clone() for name, t in encoder.state_dict().items()}
    state = torch.get_rng_state()
    in_training = measure(encoder, tokens, dtype=torch.float64)
    assert encoder.training
    assert all(module.training for module in encoder.modules())
    assert all(torch.equal(t, before[name]) for name, t in encoder.state_dict().items())
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}
    assert not any(m._forward_hooks for m in encoder.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert in_training.queries.equals(measure(encoder.eval(), tokens, dtype=torch.float64).queries)


def calls_of(encoder, tokens):
    calls = []
    with torch.inference_mode(), watch_attention(encoder, calls.append):
        encoder(tokens)
    return calls


@pytest.mark.processor
def test_the_residual_is_rounding_if_everything_was_captured(encoder, tokens):
    assert 0 < measure(encoder, tokens).models["residual"].item() < 2e-6
    assert measure(encoder, tokens, dtype=torch.float64).models["residual"].item() < 1e-14


@pytest.mark.parametrize("batch", [slice(0, 2), slice(1, 2)])
def test_the_residual_shows_a_wrong_scale(encoder, tokens, batch):
    for call in calls_of(encoder, tokens[batch]):
        assert recomputation_residual(call).residual < 2e-6
        assert recomputation_residual(dataclasses.replace(call, scale=1.1 * call.scale)).residual > 1e-3


def test_the_residual_shows_a_missed_mask(tiny_config, tokens):
    call = calls_of(make(tiny_config("topk", 3)), tokens[1:2])[0]
    assert recomputation_residual(dataclasses.replace(call, selected=None)).residual > 1e-2
    call = calls_of(make(tiny_config()), tokens[:1])[0]
    assert recomputation_residual(dataclasses.replace(call, allowed=None)).residual > 1e-2


def test_the_residual_in_the_table_is_the_worst_of_all_layers(full, tokens):
    core = full.blocks[0].attention.core
    whole = core.forward
    core.forward = lambda q, k, v, scale, valid, selected: whole(q, k, v, 1.1 * scale, valid, selected)
    assert measure(full, tokens).models["residual"].item() > 1e-3


def causal_call(length=20):
    q, k, v = torch.randn(3, 2, 2, length, 4, generator=torch.Generator().manual_seed(0)).unbind()
    allowed = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    mixed = F.scaled_dot_product_attention(q, k, v, allowed, scale=0.5)
    return AttentionCall("attention", 0, q, k, v, 0.5, allowed, None, None, mixed)


def test_the_residual_holds_for_masks_that_differ_from_query_to_query():
    call = causal_call()
    assert recomputation_residual(call).residual < 1e-6
    assert recomputation_residual(dataclasses.replace(call, allowed=None)).residual > 1e-2


def test_the_residual_of_outputs_that_are_all_zero_is_zero():
    call = causal_call()
    nothing = torch.zeros_like(call.v)
    assert recomputation_residual(dataclasses.replace(call, v=nothing, mixed=nothing)).residual == 0


def test_scores_that_are_not_finite_are_reported_with_layer_head_and_sample(encoder, tokens):
    with torch.no_grad():
        encoder.blocks[1].attention.qkv.bias[8] = torch.nan  # of the queries of head 1
    found = measure(encoder, tokens, batch_size=3)
    lengths = (tokens != PAD).sum(1)
    assert found.non_finite.drop(columns="model").to_dict("list") == {
        "sample": list(range(7)),
        "layer": [1] * 7,
        "head": [1] * 7,
        "scores": ((lengths + encoder.config.extra_tokens) ** 2).tolist(),
    }
    assert math.isnan(found.models["residual"].item())


def test_only_samples_with_a_broken_token_are_reported(full):
    tokens = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, PAD], [1, 0, 0, PAD]])
    with torch.no_grad():
        full.embedding.weight[1, 0] = torch.inf
    found = measure(full, tokens, batch_size=2).non_finite
    first = found[found["layer"] == 0]
    assert first[["sample", "head", "scores"]].to_numpy().tolist() == [
        [1, 0, 12],
        [1, 1, 12],
        [3, 0, 5],
        [3, 1, 5],
    ]
    assert sorted(set(found["sample"])) == [1, 3]


def test_a_sound_model_has_no_rows_of_non_finite_scores(encoder, tokens):
    found = measure(encoder, tokens).non_finite
    assert list(found.columns) == ["model", "sample", "layer", "head", "scores"]
    assert found.empty


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.tensor([[0, 3]]), "Token id 3 is out of range: the model knows 0 to 2."),
        (torch.tensor([[0, -1]]), "Token id -1 is out of range: the model knows 0 to 2."),
        (torch.zeros(1, 13, dtype=torch.int64), "The model takes inputs of length 1 to 12. Got length 13."),
        (torch.zeros(3, 0, dtype=torch.int64), "The model takes inputs of length 1 to 12. Got length 0."),
        (torch.zeros(0, 5, dtype=torch.int64), "There are no inputs to measure on: the number of samples is 0."),
        ([], "There are no inputs to measure on: the number of samples is 0."),
        (torch.zeros(2, 5), "Inputs must be whole token ids of shape (N, L). Got torch.float32 (2, 5)."),
        (
            torch.zeros(2, 5, dtype=torch.bool),
            "Inputs must be whole token ids of shape (N, L). Got torch.bool (2, 5).",
        ),
        (
            torch.zeros(5, dtype=torch.int64),
            "Inputs must be whole token ids of shape (N, L). Got torch.int64 (5,).",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(full, wrong, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        measure(full, wrong)


@pytest.mark.parametrize("k", [0, -2, 13])
def test_a_k_that_the_inputs_have_no_room_for_is_refused(full, tokens, k):
    with pytest.raises(InputError, match=rf"^k must lie in 1 … 12, the length of the inputs\. Got k={k}\.$"):
        measure(full, tokens, k=(k,))
    assert "dispersion_k12" in measure(full, tokens, k=(12,)).queries
