"""Hugging Face models: caches, masks, and what the interface is told."""

import warnings

import pytest
import torch
from residuals import recomputation_residual

import semdiag
from semdiag.capturing.adapters.hugging_face import _NO_PLACE
from semdiag.capturing.attention_calls import watch_attention
from semdiag_files import InputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")

PROMPT, NEW = 4, 3
SHAPE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
}

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def llama(implementation):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SHAPE, pad_token_id=0)
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation)
    return model.eval()


def prompt():
    return torch.randint(5, 50, (2, PROMPT), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache_attributes_queries_to_their_positions(implementation, padded, cache):
    model, calls = llama(implementation), []
    mask = torch.ones(2, PROMPT, dtype=torch.int64)
    mask[1, : 2 if padded else 0] = 0
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "cache_implementation": cache}
    options["disable_compile"] = True
    before = model.generate(prompt(), **options)
    with watch_attention(model, calls.append) as audit:
        during = model.generate(prompt(), **options)
    assert torch.equal(before, during)
    assert [(c.layer, c.occurrence, c.q.shape[2]) for c in calls] == [
        (layer, 0, length) for length in (PROMPT, *[1] * (NEW - 1)) for layer in (0, 1)
    ]
    assert [c.first_query for c in calls] == [p for p in (0, *range(PROMPT, PROMPT + NEW - 1)) for _ in (0, 1)]
    assert all(c.k.shape[1] == 2 for c in calls)
    for call in calls:
        seen = torch.zeros(2, 1, call.q.shape[2], call.k.shape[2], dtype=torch.bool)
        for i in range(call.q.shape[2]):
            seen[..., i, : call.first_query + i + 1] = True
        allowed = call.part().allowed
        if padded:
            seen[1, ..., :2] = False
        some = seen.any(-1, keepdim=True)  # a padded query may be allowed whatever the model likes
        assert torch.equal(seen, seen if allowed is None else allowed & some)
        assert allowed is not None or bool(seen.all())
        assert recomputation_residual(call).residual < 1e-5
    assert not audit.skipped


def test_without_padding_a_causal_rule_costs_no_mask():
    model, calls = llama("sdpa"), []
    with torch.no_grad(), watch_attention(model, calls.append):
        model(prompt())
    assert [(c.causal, c.allowed, c.first_query) for c in calls] == [(True, None, 0)] * 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_bool_mask_is_what_the_implementation_makes_of_it(implementation):
    """Eager attention adds it to the scores as 0 and 1, so that no key is forbidden, and the audit says so."""
    model, calls = llama(implementation), []
    mask = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    with torch.no_grad(), watch_attention(model, calls.append) as audit:
        model(prompt(), attention_mask=mask)
    adds = implementation == "eager"
    assert [call.allowed is None for call in calls] == [adds] * 2
    assert all(recomputation_residual(call).residual < 1e-5 for call in calls)
    assert sum("forbids nothing" in remark.text for remark in audit.remarks) == 2 * adds
    with torch.no_grad(), semdiag.sparsify(model, semdiag.TopK(1)):
        one = model(prompt(), attention_mask=mask).logits
    with torch.no_grad():
        every = model(prompt(), attention_mask=mask).logits
    assert not torch.equal(one, every)


def test_the_interface_is_as_it_was_afterwards_also_after_an_exception():
    interface = transformers.modeling_utils.AttentionInterface
    before, model = interface.get_interface, llama("eager")

    def fail(call):
        raise KeyError

    with watch_attention(model, fail):
        assert interface.get_interface is not before
    with pytest.raises(KeyError), watch_attention(model, fail):
        model(prompt())
    assert interface.get_interface is before


def test_watches_may_be_nested_and_other_models_are_left_alone():
    model, other, outer, inner = llama("eager"), llama("eager"), [], []
    with torch.no_grad(), watch_attention(model, outer.append), watch_attention(other, inner.append):
        model(prompt())
        other(prompt())
        other(prompt())
    assert (len(outer), len(inner)) == (2, 4)


def test_an_implementation_whose_mask_is_not_understood_is_listed_with_what_would_work():
    model, calls = llama("sdpa"), []

    def attend(module, query, key, value, attention_mask, **options):
        forward = transformers.integrations.sdpa_attention.sdpa_attention_forward
        return forward(module, query, key, value, attention_mask, **options)

    transformers.AttentionInterface.register("semdiag_test", attend)
    transformers.AttentionMaskInterface.register("semdiag_test", transformers.masking_utils.sdpa_mask)
    model.set_attn_implementation("semdiag_test")
    with torch.no_grad(), watch_attention(model, calls.append) as audit:
        model(prompt())
    assert not calls
    assert {(s.module, s.operation, "attn_implementation='sdpa'" in s.reason) for s in audit.skipped} == {
        (f"model.layers.{layer}.self_attn", "semdiag_test", True) for layer in (0, 1)
    }


def test_soft_cap_and_sinks_are_captured_as_what_they_are():
    grouped = {**SHAPE, "head_dim": 8, "sliding_window": 4}
    gemma = transformers.Gemma2Model(transformers.Gemma2Config(**grouped, attn_logit_softcapping=2.0)).eval()
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    gpt_oss = transformers.GptOssModel(transformers.GptOssConfig(**grouped, **experts)).eval()
    gemma.set_attn_implementation("eager")
    gpt_oss.set_attn_implementation("eager")
    for model, expected in ((gemma, (2.0, None)), (gpt_oss, (None, 4))):
        calls = []
        with torch.no_grad(), watch_attention(model, calls.append):
            model(prompt())
        assert [(c.softcap, None if c.sinks is None else len(c.sinks)) for c in calls] == [expected] * 2


def test_gradients_in_training_mode_are_the_same_to_the_bit():
    model, gradients = llama("sdpa").train(), []
    for watch in (False, True):
        model.zero_grad()
        if watch:
            with watch_attention(model, lambda call: None):
                model(prompt(), labels=prompt()).loss.backward()
        else:
            model(prompt(), labels=prompt()).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_rows_of_a_generation_are_those_of_one_eager_forward_without_a_cache(implementation, padded, cache):
    model = llama(implementation)
    mask = torch.ones(2, PROMPT, dtype=torch.int64)
    mask[1, : 2 if padded else 0] = 0
    options = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    with torch.no_grad(), semdiag.capture(model, k=2) as calls:
        ids = model.generate(prompt(), attention_mask=mask, **options)
    eager = llama("eager")
    whole = torch.nn.functional.pad(mask, (0, NEW - 1), value=1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)  # as generate counts them
    with torch.no_grad(), semdiag.capture(eager, k=2) as reference:
        eager(ids[:, :-1], attention_mask=whole, position_ids=positions)
    place = ["layer", "sample", "head", "query"]
    for table, other in zip(_rows(calls), _rows(reference), strict=True):
        both = table.merge(other, on=place, how="outer", validate="one_to_one")
        if padded:  # padded queries of the prompt are the reference's affair, and generate's
            both = both[(both["sample"] == 0) | (both["query"] >= 2)]
        assert both["keys_x"].tolist() == both["keys_y"].tolist()
        name = table.columns[-1]
        assert both[f"{name}_x"].to_numpy() == pytest.approx(both[f"{name}_y"].to_numpy(), abs=1e-4)


WINDOWED = {
    "Mistral": {"sliding_window": 4},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Gemma2": {"sliding_window": 4, "head_dim": 8},
    "GptOss": {"sliding_window": 4, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def windowed(name, implementation):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SHAPE, **WINDOWED[name], pad_token_id=0)
        model = getattr(transformers, f"{name}ForCausalLM")
        return model._from_config(config, attn_implementation=implementation).eval()


def generated(model, padded, cache="dynamic", **options):
    """Ids of a prompt of 9 and 6 more, and the capture of them."""
    ids = torch.randint(5, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, : 3 if padded else 0] = 0
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "disable_compile": True}
    with torch.no_grad(), semdiag.capture(model, k=2, **options) as calls:
        found = model.generate(ids, attention_mask=mask, cache_implementation=cache, **how)
    return found, torch.nn.functional.pad(mask, (0, 5), value=1), calls


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "implementation", "cache"),
    [
        ("Mistral", "sdpa", "dynamic"), ("Mistral", "eager", "static"), ("Mistral", "flex_attention", "dynamic"),
        ("Qwen2", "sdpa", "static"), ("Gemma2", "eager", "dynamic"), ("GptOss", "eager", "dynamic"),
    ],
)  # fmt: skip
def test_queries_and_keys_of_a_sliding_window_stand_at_their_positions_among_all_tokens(
    name, implementation, cache, padded
):
    """They were counted from the first key that is left in the cache: 3, 3, 3, … behind a prompt of 9."""
    if implementation == "flex_attention" and torch.__version__ < (2, 11):
        pytest.skip("with torch 2.7 flex attention of Hugging Face's models is named as not captured")
    ids, whole, calls = generated(windowed(name, implementation), padded, cache)
    model, positions = windowed(name, "eager"), (whole.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), semdiag.capture(model, k=2) as reference:
        model(ids[:, :-1], attention_mask=whole, position_ids=positions)
    place = ["layer", "sample", "head", "query"]
    for table, other in zip(_rows(calls), _rows(reference), strict=True):
        both = table.merge(other, on=place, how="outer", validate="one_to_one")
        assert both["keys_x"].tolist() == both["keys_y"].tolist()
        column = table.columns[-1]
        assert both[f"{column}_x"].to_numpy() == pytest.approx(both[f"{column}_y"].to_numpy(), abs=1e-4)
    place[-1] = "key"
    loads = [found.loads(k=1).query("load > 0").groupby(place)["load"].sum() for found in (calls, reference)]
    assert loads[0].to_dict() == loads[1].to_dict()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_mask_of_the_prompt_fits_a_generation_behind_a_window(cache):
    real = torch.arange(9) >= torch.tensor([[0], [3]])
    _, _, calls = generated(windowed("Mistral", "sdpa"), True, cache, real=real)
    assert calls.audit.empty
    rows = calls.dispersion().groupby(["sample", "layer", "head"]).size().groupby("sample").agg(set)
    assert rows.to_dict() == {0: {14}, 1: {11}}


def test_a_cache_with_a_window_that_does_not_count_its_tokens_is_named(monkeypatch):
    from transformers.cache_utils import DynamicSlidingWindowLayer

    length = property(lambda layer: lambda: torch.tensor(layer.cumulative_length))
    monkeypatch.setattr(DynamicSlidingWindowLayer, "get_seq_length", length)
    _, _, calls = generated(windowed("Mistral", "sdpa"), False)
    assert set(calls.audit["reason"]) == {_NO_PLACE}
    assert calls.audit["times"].tolist() == [5, 5]  # not of the prompt


def test_a_cache_without_a_window_holds_every_key():
    model, cache = windowed("Mistral", "sdpa"), transformers.DynamicCache()
    with torch.no_grad(), semdiag.capture(model, k=2) as calls:
        for at in range(7):
            model(torch.full((1, 1), 5 + at), past_key_values=cache)
    assert calls.dispersion().query("layer == 0 and head == 0")["query"].tolist() == [*range(7)]
    assert calls.audit.empty


def test_caches_are_left_as_they_were():
    before = transformers.Cache.update
    generated(windowed("Mistral", "sdpa"), False)
    assert transformers.Cache.update is before


def _rows(calls):
    return calls.dispersion(), calls.dispersion(k=2), calls.separation(k=2)


@pytest.mark.slow
def test_a_function_that_ignores_its_mask_is_refused_by_sparsify():
    """V-JEPA 2's eager attention takes a mask and never looks at it: the model would run as it is."""
    # A head's width is 16: the rotation of transformers 5.1 fails on 8.
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "pred_hidden_size": 32, "pred_num_attention_heads": 2}
    shape = {"patch_size": 8, "crop_size": 16, "frames_per_clip": 4, "mlp_ratio": 1}
    shape |= {"num_hidden_layers": 1, "pred_num_hidden_layers": 1}
    videos = torch.randn(2, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = {
            kind: transformers.VJEPA2Model._from_config(
                transformers.VJEPA2Config(**sizes, **shape), attn_implementation=kind
            ).eval()
            for kind in ("eager", "sdpa")
        }
    for training in (False, True):
        model = models["eager"].train(training)
        with (
            torch.no_grad(),
            pytest.raises(InputError, match=r"encoder.layer.0.attention: eager .its function ignores"),
            semdiag.sparsify(model, semdiag.TopK(1)),
        ):
            model(pixel_values_videos=videos)
        with torch.no_grad(), semdiag.sparsify(model, semdiag.TopK(1), partial=True) as masked:
            model(pixel_values_videos=videos)
        assert len(masked.unmasked) == 2
    with torch.no_grad(), semdiag.sparsify(models["sdpa"], semdiag.TopK(1)) as masked:
        models["sdpa"](pixel_values_videos=videos)
    assert set(masked.kept["most"]) == {1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("kind", "k"), [("Llama", 1), ("Llama", 11), ("GptOss", 2), ("Gemma2", 2)])
def test_a_mask_that_is_applied_is_never_taken_for_an_ignored_one(kind, k, dropout, dtype):
    implementations = ("eager",) if kind != "Llama" else ("eager", "sdpa")
    ids = torch.randint(5, 50, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[1, :4] = 0
    for implementation in implementations:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = getattr(transformers, f"{kind}Config")(
                **SHAPE, head_dim=8, pad_token_id=0, attention_dropout=dropout
            )
            model = getattr(transformers, f"{kind}ForCausalLM")._from_config(
                config, attn_implementation=implementation
            )
        model = model.to(dtype).train(dropout > 0)
        with torch.no_grad(), semdiag.sparsify(model, semdiag.TopK(k)) as masked:
            model(input_ids=ids, attention_mask=mask, use_cache=False)
        assert masked.calls == 2
        assert set(masked.kept["most"]) == {k}


def inkling():
    module = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
    heads = {"head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
    routed = {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    layers = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.Inkling2TextConfig(**SHAPE, **heads, **routed, **layers, **ends)
        return module.Inkling2TextModel._from_config(config, attn_implementation="eager").eval()


def test_sinks_of_each_query_are_read():
    model, calls = inkling(), []
    ids = torch.randint(5, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), watch_attention(model, calls.append):
        model(input_ids=ids, use_cache=False)
    found = [call for call in calls if call.mechanism == "transformers attention interface"]
    # From transformers 5.24 on it attends over the outputs of earlier layers, too, and there without sinks.
    of_tokens = [call for call in found if call.module.endswith("self_attn")]
    assert [call.sinks.tolist() for call in of_tokens] == [[0.0] * 4] * 2
    assert all(recomputation_residual(call).residual < 1e-5 for call in found)
    with torch.no_grad(), semdiag.sparsify(model, semdiag.TopK(1)) as masked:
        model(input_ids=ids, use_cache=False)
    assert set(masked.kept["most"]) == {1}


def test_sinks_of_an_unknown_form_are_in_the_audit():
    model = inkling()
    for layer in model.layers:
        layer.self_attn.sink_proj.register_forward_hook(
            lambda module, given, out: out.masked_fill(out > 0, -torch.inf)
        )
    ids = torch.randint(5, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), watch_attention(model, lambda call: None) as audit:
        model(input_ids=ids, use_cache=False)
    assert {seen.reason for seen in audit.skipped} == {"its sinks have an unknown form"}
    assert sum(audit.skipped.values()) == 2
