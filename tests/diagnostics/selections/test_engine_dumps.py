"""Dumps of engines, rebuilt as small files in the layouts that their sources name."""

import base64
import json
import math
import os

import numpy as np
import pytest
import torch

import semdiag
from semdiag.selections.engine_dumps import read_queries_and_keys, read_routed_experts
from semdiag_files import InputError

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "head_dim": 8}


def hook_dump(**changes):
    """What vLLM-Hook saves of two requests of 5 and 3 tokens, in three layers."""
    generator = torch.Generator().manual_seed(0)
    cache = {
        f"model.layers.{n}.self_attn.attn": {
            "q": [torch.randn(length, 32, generator=generator) for length in (5, 3)],
            "k_all": [torch.randn(length, 16, generator=generator) for length in (5, 3)],
            "layer_num": n,
        }
        for n in range(3)
    }
    return {"config": CONFIG | {"attention_multiplier": 0.25}, "qk_cache": cache, **changes}


def test_queries_and_keys_of_vllm_hook_give_the_statistics_of_a_loop(tmp_path):
    dump = hook_dump()
    torch.save(dump, tmp_path / "qk.pt")
    read = read_queries_and_keys(tmp_path / "qk.pt")
    assert [(each.layer, each.q.shape[2]) for each in read] == [(0, 5), (0, 3), (1, 5), (1, 3), (2, 5), (2, 3)]
    one = read[2]
    rows = semdiag.row_statistics(one.q, one.k, one.scale, causal=True, first_query=one.first_query)
    entry = dump["qk_cache"]["model.layers.1.self_attn.attn"]
    for head in range(4):
        q, k = entry["q"][0][3, 8 * head : 8 * head + 8], entry["k_all"][0][:4, 8 * (head // 2) :][:, :8]
        scores = [0.25 * float(q @ key) for key in k]
        assert rows.dispersion()[0, head, 3] == pytest.approx(max(scores) - min(scores), rel=1e-5)


def test_the_last_token_alone_stands_behind_its_keys(tmp_path):
    dump = hook_dump()
    for entry in dump["qk_cache"].values():
        entry["q"] = [rows[-1] for rows in entry["q"]]
    torch.save(dump, tmp_path / "qk.pt")
    assert [each.first_query for each in read_queries_and_keys(tmp_path / "qk.pt")[:2]] == [4, 2]


def without(layer):
    dump = hook_dump()
    del dump["qk_cache"][f"model.layers.{layer}.self_attn.attn"]
    dump["qk_cache"]["model.layers.3.self_attn.attn"] = hook_dump()["qk_cache"][
        "model.layers.0.self_attn.attn"
    ] | {"layer_num": 3}
    return dump


def swapped():
    dump = hook_dump()
    for entry in dump["qk_cache"].values():
        entry["q"], entry["k_all"] = entry["k_all"], entry["q"]
    return dump


def turned():
    dump = hook_dump()
    for entry in dump["qk_cache"].values():
        entry["q"] = [rows.T for rows in entry["q"]]
    return dump


def with_rows(change):
    dump = hook_dump()
    entry = dump["qk_cache"]["model.layers.0.self_attn.attn"]
    entry["q"] = [change(rows) for rows in entry["q"]]
    return dump


def twice():
    dump = hook_dump()
    dump["qk_cache"]["model.layers.2.self_attn.attn"]["layer_num"] = 1
    return dump


def in_layers(*numbers):
    dump = hook_dump()
    entry = dump["qk_cache"]["model.layers.0.self_attn.attn"]
    return dump | {"qk_cache": {str(number): entry | {"layer_num": number} for number in numbers}}


class Code:
    def __reduce__(self):
        return os.system, ("touch harm",)


@pytest.mark.parametrize(
    ("dump", "said"),
    [
        (without(2), "lacks layer 2 between 0 and 3"),
        (hook_dump(config=CONFIG | {"num_attention_heads": 8}), r"8 heads of width 8 need tensors \(tokens, 64\)"),
        (swapped(), r"Got \(5, 16\)"),
        (turned(), r"Got \(32, 5\)"),
        (hook_dump(qk_cache={}), "holds no layer"),
        (hook_dump(config={}), "num_attention_heads"),
        (hook_dump(config=CONFIG | {"head_dim": 0}), "head_dim must be at least 1"),
        (hook_dump(config=CONFIG | {"num_attention_heads": 4.7}), "must be a whole number. Got 4.7"),
        (hook_dump(config=CONFIG | {"num_attention_heads": torch.tensor(1j)}), "must be a whole number"),
        (hook_dump(config=CONFIG | {"attention_multiplier": torch.ones(2)}), "must be a number. Got Tensor"),
        (hook_dump(config=CONFIG | {"head_dim": 10**400}), "need tensors"),
        (hook_dump(config=torch.ones(3)), "config is no table but Tensor"),
        (hook_dump(qk_cache={"a": torch.ones(3)}), "a is no table but Tensor"),
        (torch.ones(3), "where config should be, there is Tensor"),
        (in_layers(0, 1, 10**18), "lacks layer 2 between 0 and 1000000000000000000"),
        (in_layers(0, 1.5), "layer_num must be a whole number. Got 1.5"),
        (in_layers(-3), "layer_num must be at least 0. Got -3"),
        (in_layers(torch.ones(2)), "layer_num must be a whole number"),
        (hook_dump(config=CONFIG | {"attention_multiplier": math.nan}), "holds no layer"),
        ([1, 2], "no dump of vLLM-Hook"),
        (hook_dump(config=CONFIG | {"head_dim": math.inf}), "whole number. Got inf"),
        (
            with_rows(lambda rows: rows.masked_fill(rows > 1, math.nan)),
            "layers.0.self_attn.attn: .* NaN or infinite",
        ),
        (with_rows(lambda rows: rows.long()), "floating-point numbers. Got int64"),
        (with_rows(lambda rows: rows.to(torch.complex64)), "floating-point numbers. Got complex64"),
        (with_rows(lambda rows: rows[:1].expand(10**11, -1)), "larger than what the file holds"),
        (twice(), "layers.1.self_attn.attn and model.layers.2.self_attn.attn are both layer 1"),
        (Code(), "refused"),
    ],
)
def test_other_dumps_are_refused_in_one_line_and_run_nothing(tmp_path, monkeypatch, dump, said):
    monkeypatch.chdir(tmp_path)
    torch.save(dump, "qk.pt")
    with pytest.raises(InputError, match=said) as error:
        read_queries_and_keys("qk.pt")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "harm").exists()


EXPERTS = torch.arange(24).view(4, 3, 2).int()  # tokens, layers, k


def test_routed_experts_of_three_engines_are_the_same(tmp_path):
    np.savez(tmp_path / "vllm.npz", routed_experts=EXPERTS.numpy())
    text = base64.b64encode(EXPERTS.numpy().tobytes()).decode()
    (tmp_path / "sglang.json").write_text(json.dumps({"text": "…", "meta_info": {"routed_experts": text}}))
    torch.save(list(EXPERTS.unbind(1)), tmp_path / "megatron.pt")
    for name, shape in (("vllm.npz", ()), ("sglang.json", (3, 2)), ("megatron.pt", (3, 2))):
        assert torch.equal(read_routed_experts(tmp_path / name, *shape), EXPERTS.long())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([EXPERTS[:, 0], None], "layer 1 was not recorded"),
        ([EXPERTS[:, 0], EXPERTS[:3, 1]], "differ in size"),
        ([], "there are none"),
        (EXPERTS.transpose(0, 1).contiguous(), r"shape \(3, 4, 2\), not \(tokens, 3, 2\): are axes swapped"),
        (EXPERTS.float(), "whole numbers"),
        (EXPERTS.to(torch.complex64), "whole numbers"),
        (EXPERTS > 3, "whole numbers"),
        (EXPERTS[:1].expand(10**12, -1, -1), "larger than what the file holds"),
        (EXPERTS - 7, "names the expert -7"),
    ],
)
def test_other_experts_are_refused(tmp_path, content, said):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(InputError, match=said):
        read_routed_experts(tmp_path / "a.pt", 3, 2)


@pytest.mark.parametrize(
    ("text", "layers", "said"),
    [("AAAA", 3, "no int32"), ("!", 3, "no int32"), (None, 3, "base64"), ("AAAA", None, "named")],
)
def test_other_responses_are_refused(tmp_path, text, layers, said):
    (tmp_path / "a.json").write_text(json.dumps({"meta_info": {"routed_experts": text}}))
    with pytest.raises(InputError, match=said):
        read_routed_experts(tmp_path / "a.json", layers, 2)


def response(path, experts, layers, k, **meta):
    """Read a response of SGLang."""
    text = base64.b64encode(experts.to(torch.int32).numpy().tobytes()).decode()
    path.write_text(json.dumps({"meta_info": {"routed_experts": text, **meta}}))
    return read_routed_experts(path, layers, k, **({"start": meta["start"]} if "start" in meta else {}))


def chosen_experts(tokens, layers, k, n):
    draw = torch.Generator().manual_seed(0)
    return torch.rand(tokens, layers, n, generator=draw).argsort(-1)[..., :k]


def test_a_response_has_as_many_rows_as_tokens_that_were_run(tmp_path):
    experts = chosen_experts(12, 6, 4, 16)
    counts = {"prompt_tokens": 8, "completion_tokens": 5}  # the last token is not run
    assert torch.equal(response(tmp_path / "a.json", experts, 6, 4, **counts), experts)
    assert len(response(tmp_path / "a.json", experts[3:], 6, 4, **counts, start=3)) == 9
    for layers, k in ((3, 4), (12, 4), (6, 2), (2, 4)):
        with pytest.raises(InputError, match="but the response has 12"):
            response(tmp_path / "a.json", experts, layers, k, **counts)


@pytest.mark.parametrize(("layers", "k", "n"), [(6, 4, 16), (58, 8, 256), (8, 64, 512), (48, 8, 128)])
def test_layers_and_k_that_are_swapped_are_refused(tmp_path, layers, k, n):
    experts = chosen_experts(40, layers, k, n)
    assert torch.equal(response(tmp_path / "a.json", experts, layers, k), experts)
    with pytest.raises(InputError, match="Are layers and k swapped"):
        response(tmp_path / "a.json", experts, k, layers)


@pytest.mark.parametrize(("layers", "k"), [(24, 1), (12, 2), (8, 3), (4, 6), (3, 8), (2, 12), (1, 24)])
def test_so_are_other_layers_and_k_of_the_same_product(tmp_path, layers, k):
    experts = chosen_experts(40, 6, 4, 16)
    with pytest.raises(InputError, match="Are layers and k swapped"):
        response(tmp_path / "a.json", experts, layers, k)


def test_a_response_without_tokens_has_none(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"routed_experts": ""}))
    assert read_routed_experts(tmp_path / "a.json", 3, 2).shape == (0, 3, 2)


@pytest.mark.parametrize(("layers", "k", "start"), [(3.0, 2, 0), (3, 2, -2), (0, 2, 0), (3, True, 0)])
def test_layers_k_and_start_are_whole_numbers(tmp_path, layers, k, start):
    (tmp_path / "a.json").write_text(json.dumps({"routed_experts": ""}))
    with pytest.raises(InputError, match=r"must be (a whole number|at least)"):
        read_routed_experts(tmp_path / "a.json", layers, k, start)


def test_few_rows_without_repeats_are_no_proof_of_a_swap(tmp_path):
    experts = torch.arange(24).view(4, 3, 2)
    assert torch.equal(response(tmp_path / "a.json", experts, 3, 2), experts)


@pytest.mark.parametrize("content", [{"meta_info": 5}, {"meta_info": None}, [], 5, {"meta_info": [1]}])
def test_responses_of_other_forms_are_refused(tmp_path, content):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="base64"):
        read_routed_experts(tmp_path / "a.json", 3, 2)
