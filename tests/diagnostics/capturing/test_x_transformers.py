"""Every softmax of x-transformers, whose options change attention in every way that papers have thought of."""

import pytest
import torch
from recorded_softmaxes import found_in

x_transformers = pytest.importorskip("x_transformers", reason="not installed (extra test-hf)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CAPTURED = (
    {}, {"attn_flash": True}, {"attn_one_kv_head": True}, {"attn_kv_heads": 2}, {"attn_softclamp_logits": True},
    {"attn_num_mem_kv": 2}, {"attn_num_mem_kv": 2, "attn_flash": True}, {"attn_pre_talking_heads": True},
    {"attn_sparse_topk": 4}, {"alibi_pos_bias": True}, {"rel_pos_bias": True},
    {"attn_qk_norm": True}, {"attn_head_scale": True}, {"attn_gate_values": True}, {"attn_on_attn": True},
    {"attn_add_zero_kv": True}, {"attn_head_learned_sink": True},
    {"attn_selective": True}, {"attn_data_dependent_alibi": True}, {"macaron": True},
    {"rotary_pos_emb": True}, {"attn_laser": True},
)  # fmt: skip
# Weights that are mixed or changed between softmax and values.
AUDITED = ({"attn_hard": True}, {"attn_cog_signed": True})


def found(options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = x_transformers.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        model = x_transformers.TransformerWrapper(num_tokens=30, max_seq_len=32, attn_layers=layers).eval()
        tokens = torch.randint(30, (2, 16))
    return found_in(model, lambda model: model(tokens))


def named(options):
    return ", ".join(options) or "plain"


@pytest.mark.parametrize("options", CAPTURED, ids=named)
def test_every_attention_is_captured_and_right(options):
    here = found(options)
    assert (here.captured, here.wrong, here.audited, here.met_values, here.same) == (2, 0, 0, 0, True)


@pytest.mark.parametrize("options", AUDITED, ids=named)
def test_what_cannot_be_followed_is_in_the_audit(options):
    here = found(options)
    assert (here.captured, here.wrong, here.audited, here.same) == (0, 0, 2, True)
