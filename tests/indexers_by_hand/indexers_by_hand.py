"""Indexers, worked out from the weights in float64; without a mask."""

import torch
from torch import nn

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_shared_experts": 1,
}  # fmt: skip
INDEXED = {
    **LATENT, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "index_topk": 6,
    "index_n_heads": 2, "index_head_dim": 16,
}  # fmt: skip
LENGTH = 20


def inputs_of(model, names):
    """What the named modules are first called with; hooks stay on the model."""
    given = {}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, kwargs, name=name: given.setdefault(name, (args, kwargs)) and None,
            with_kwargs=True,
        )
    return given


def margin(scores, k):
    """k-th minus next score, of the rows of a float64 tensor, and the chosen."""
    ordered = scores.sort(-1, descending=True)
    return ordered.values[:, k - 1] - ordered.values[:, k], ordered.indices[:, :k]


def half_split(x, cos, sin):
    """Rotary positions of the two halves."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def interleaved(x, cos, sin):
    """Rotary positions of pairs, the first of each pair before all the second ones."""
    cos, sin = (each[..., : each.shape[-1] // 2] for each in (cos, sin))
    return torch.cat([x[..., ::2] * cos - x[..., 1::2] * sin, x[..., 1::2] * cos + x[..., ::2] * sin], -1)


def index_scores(indexer, hidden, residual, cos, sin, rotate):
    """Scores (batch, queries, keys) of an indexer in float64, without a mask."""
    hidden, residual, cos, sin = (each.double() for each in (hidden, residual, cos, sin))
    weight = {name: value.detach().double() for name, value in indexer.named_parameters()}
    width, rotary = indexer.head_dim, indexer.qk_rope_head_dim
    queries = (residual @ weight["wq_b.weight"].T).unflatten(-1, (-1, width))
    keys = hidden @ weight["wk.weight"].T
    keys = nn.functional.layer_norm(keys, (width,), weight["k_norm.weight"], weight["k_norm.bias"], 1e-6)
    queries = torch.cat(
        [rotate(queries[..., :rotary], cos[:, :, None], sin[:, :, None]), queries[..., rotary:]], -1
    )
    keys = torch.cat([rotate(keys[..., :rotary], cos, sin), keys[..., rotary:]], -1)
    products = torch.einsum("bqhd,bkd->bqhk", queries, keys).relu() * width**-0.5
    heads = hidden @ weight["weights_proj.weight"].T * indexer.n_heads**-0.5
    return torch.einsum("bqh,bqhk->bqk", heads, products)
