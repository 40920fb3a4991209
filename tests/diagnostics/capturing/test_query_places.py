"""Which tokens queries are, where keys hold more than the tokens' own, or an indexer hides a query's own key."""

import inspect
import warnings

import pytest
import torch

import semdiag
from semdiag.capturing.adapters.hugging_face import first_query

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    pytest.mark.skipif(
        not hasattr(transformers, "DeepseekV4Config"), reason="this transformers has no DeepSeek-V4"
    ),
]
LENGTH = 24
LAYERS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
SHAPE = {
    "vocab_size": 60, "hidden_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 4, "head_dim": 16,
    "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "hc_mult": 2, "partial_rotary_factor": 0.5,
    "num_hidden_layers": 3, "layer_types": LAYERS, "mlp_layer_types": ["moe"] * 3, "initializer_range": 0.5,
}  # fmt: skip


def deepseek(window=8, rate=4, topk=3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rates = dict(zip(LAYERS[1:], (rate, 2 * rate), strict=True))
        config = transformers.DeepseekV4Config(
            **SHAPE, sliding_window=window, compress_rates=rates, index_topk=topk
        )
        return transformers.DeepseekV4Model(config).eval()


def tokens():
    return torch.randint(60, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def captured(model, *, cuts=(), **options):
    """The capture of tokens given at once, or in parts that end at some cuts and go through a cache."""
    cache = transformers.DynamicCache(config=model.config) if cuts else None
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad(), semdiag.capture(model, k=2) as calls:
        for start, end in zip((0, *cuts), (*cuts, LENGTH), strict=True):
            model(tokens()[:, start:end], **{name: cache}, use_cache=bool(cuts), **options)
    return calls


def remarks(calls):
    audit = calls.audit.query("what == 'remark'")
    assert audit["reason"].str.startswith("after its tokens' keys come others").all()
    return audit["module"].tolist()


@pytest.mark.parametrize(("window", "rate"), [(8, 4), (4, 2), (64, 3), (64, 12)])
def test_queries_are_numbered_as_their_tokens_without_a_cache(window, rate):
    """They were 6 to 29 and 3 to 26, and a cache that does not exist was remarked on."""
    calls = captured(deepseek(window, rate))
    found = calls.dispersion().groupby(["layer", "sample", "head"])["query"].agg(list)
    assert found.tolist() == [[*range(LENGTH)]] * 3 * 2 * 4
    assert remarks(calls) == ["layers.1.self_attn", "layers.2.self_attn"]


def test_padding_is_that_of_the_tokens():
    """Padded queries counted in layers with more keys than tokens."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :5] = 0
    rows = captured(deepseek(), attention_mask=mask).dispersion()
    assert rows.groupby(["layer", "sample"])["query"].agg(["min", "max"]).to_numpy().tolist() == [
        *[[0, LENGTH - 1], [5, LENGTH - 1]] * 3
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(13,), (11, 13, 19), (1, 2, 3, 23), (*range(9, LENGTH),)])
@pytest.mark.parametrize(("window", "rate"), [(8, 4), pytest.param(4, 2, marks=pytest.mark.nightly), (64, 3)])
def test_rows_of_tokens_behind_a_cache_are_those_of_one_forward_without_it(cuts, window, rate):
    model = deepseek(window, rate, LENGTH)  # its indexer keeps all: with fewer, it chooses others behind a cache
    calls, reference = captured(model, cuts=cuts), captured(model)
    place = ["layer", "sample", "head", "query"]
    both = calls.dispersion().merge(reference.dispersion(), on=place, how="outer", validate="one_to_one")
    assert both["keys_x"].tolist() == both["keys_y"].tolist()
    # Scores are below 10 nats, in float32 through three layers: the outputs differ by rounding of 2e-5.
    assert both["dispersion_x"].to_numpy() == pytest.approx(both["dispersion_y"].to_numpy(), abs=1e-3)
    assert remarks(calls) == remarks(reference)


@pytest.mark.slow
def test_an_indexer_behind_a_cache_moves_no_queries():
    calls = captured(deepseek(8, 2), cuts=(11, 13, 19))
    found = calls.dispersion().groupby(["layer", "sample", "head"])["query"].agg(list)
    assert found.tolist() == [[*range(LENGTH)]] * 3 * 2 * 4


LATENT = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "index_topk": 3, "index_head_dim": 8, "index_n_heads": 2, "mlp_layer_types": ["dense"] * 3,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(11, 13, 19), (*range(9, LENGTH),)])
@pytest.mark.parametrize("static", [False, True])
def test_a_query_whose_own_key_an_indexer_hides_stands_at_its_token(static, cuts):
    """It stood at the last key that it sees: 3, 10, 10, 10, 11 behind a prompt of 9. The cache holds latents."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.DeepseekV32Model(transformers.DeepseekV32Config(**LATENT)).eval()
    cache = transformers.DynamicCache(config=model.config)
    if static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 9)
    with torch.no_grad(), semdiag.capture(model, k=2) as calls:
        for start, end in zip((0, *cuts), (*cuts, LENGTH), strict=True):
            model(tokens()[:, start:end], past_key_values=cache, use_cache=True)
    found = calls.dispersion().groupby(["layer", "sample", "head"])["query"].agg(list)
    assert found.tolist() == [[*range(LENGTH)]] * 3 * 2 * 4


@pytest.mark.slow
def test_a_decoder_that_puts_the_encoders_keys_behind_its_own_stands_at_its_tokens():
    """T5Gemma 2 calls this no causal attention: the queries of each step were 0."""
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text = {
        **sizes, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    image = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = {"text_config": text, "vision_config": {**image, "image_size": 16, "patch_size": 8}}
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=text, image_token_index=59)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.T5Gemma2ForConditionalGeneration(config).eval()
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "decoder_start_token_id": 1}
    with torch.no_grad(), semdiag.capture(model, k=2) as calls:
        model.generate(torch.randint(5, 50, (1, 9)), **how)
    rows = calls.dispersion()
    found = rows[rows["module"].str.contains("decoder")].groupby(["module", "head"])["query"].agg(list)
    assert found.tolist() == [[*range(6)]] * 2 * 4


def test_keys_that_some_queries_see_first_tell_where_these_stand():
    causal = torch.ones(4, 9, dtype=torch.bool).tril(3)
    assert first_query(causal[None, None], 4, 9) == 3  # a cache that has room for two more
    window = causal & torch.ones(4, 9, dtype=torch.bool).triu(2)
    assert first_query(window[None, None], 4, 9) == 3
    block = torch.ones(4, 9, dtype=torch.bool).tril(6)
    block[:, 7:] = False  # the tokens of an image see each other
    block[:, :7] = True
    assert first_query(block[None, None], 4, 9) == 3
    padded = torch.stack([causal, causal])
    padded[1, :3] = False
    assert first_query(padded[:, None], 4, 9) == 3
    alone = causal.clone()
    alone[:3] = False
    assert first_query(alone[None, None], 4, 9) == 3
