"""Indexers, and the dense attention behind them, worked out from the weights in float64; without a mask."""

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
COMPRESSED = {
    "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 8,
    "o_groups": 2, "n_routed_experts": 8, "n_shared_experts": 1, "index_topk": 2, "index_n_heads": 2,
    "index_head_dim": 16, "sliding_window": 8, "mlp_layer_types": ["moe"] * 3, "partial_rotary_factor": 0.5,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
}  # fmt: skip


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


def normed(x, norm):
    """Each vector over its root mean square, times the norm's weight if it has one."""
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    found = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return found * norm.weight.detach().double() if hasattr(norm, "weight") else found


def times(x, layer):
    """A linear layer without a bias."""
    return x @ layer.weight.detach().double().T


def latent_scores(attention, hidden, cos, sin):
    """Scores (batch, heads, queries, keys) of multi-head latent attention, nats."""
    hidden, cos, sin = (each.double() for each in (hidden, cos, sin))
    heads, plain, rotary = attention.num_heads, attention.qk_nope_head_dim, attention.qk_rope_head_dim
    queries = times(normed(times(hidden, attention.q_a_proj), attention.q_a_layernorm), attention.q_b_proj)
    queries = queries.unflatten(-1, (heads, plain + rotary))
    latent, turned = times(hidden, attention.kv_a_proj_with_mqa).split([attention.kv_lora_rank, rotary], -1)
    keys = times(normed(latent, attention.kv_a_layernorm), attention.kv_b_proj).unflatten(-1, (heads, -1))
    products = torch.einsum("bqhd,bkhd->bhqk", queries[..., :plain], keys[..., :plain])
    turned_queries = interleaved(queries[..., plain:], cos[:, :, None], sin[:, :, None])
    products += torch.einsum("bqhd,bkd->bhqk", turned_queries, interleaved(turned, cos, sin))
    return products * (plain + rotary) ** -0.5


def trailing(x, positions, rotary):
    """Rotary positions (L,) of the last channels of x (batch, L, …), in pairs, as DeepSeek-V4 has them."""
    angles = positions.double()[:, None] * rotary.compress_inv_freq.double()
    angles = angles.view(1, len(positions), *(1 for _ in x.shape[2:-1]), -1)
    plain, pairs = x[..., : -2 * angles.shape[-1]], x[..., -2 * angles.shape[-1] :].unflatten(-1, (-1, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    cos, sin = angles.cos(), angles.sin()
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([plain, turned.flatten(-2)], -1)


def compressed(part, hidden):
    """Keys (batch, blocks, width) of an indexer or a compressor of DeepSeek-V4: a block after each rate tokens."""
    rate, width, keys = part.compress_rate, part.head_dim, []
    values, gates = times(hidden, part.kv_proj), times(hidden, part.gate_proj)
    bias = part.position_bias.detach().double()
    for block in range(hidden.shape[1] // rate):
        own = slice(block * rate, (block + 1) * rate)
        value, gate = values[:, own, width:], gates[:, own, width:] + bias[:, width:]
        if block:
            before = slice((block - 1) * rate, block * rate)
            value = torch.cat([values[:, before, :width], value], 1)
            gate = torch.cat([gates[:, before, :width] + bias[:, :width], gate], 1)
        keys.append((value * gate.softmax(1)).sum(1))
    found = normed(torch.stack(keys, 1), part.kv_norm)
    return trailing(found, torch.arange(found.shape[1]) * rate, part.rotary_emb)


def block_scores(attention, hidden):
    """Of DeepSeek-V4 the scores of the indexer (batch, queries, blocks), and by head of the dense attention."""
    hidden, indexer = hidden.double(), attention.compressor.indexer
    places = torch.arange(hidden.shape[1])
    residual = normed(times(hidden, attention.q_a_proj), attention.q_a_norm)
    asked = times(residual, indexer.q_b_proj).unflatten(-1, (-1, indexer.head_dim))
    asked = trailing(asked, places, indexer.rotary_emb)
    products = torch.einsum("bqhd,bkd->bqhk", asked, compressed(indexer, hidden)).relu() * indexer.head_dim**-0.5
    weights = times(hidden, indexer.scorer.weights_proj) * indexer.num_heads**-0.5
    queries = times(residual, attention.q_b_proj).unflatten(-1, (-1, attention.head_dim))
    queries = trailing(normed(queries, attention.q_b_norm), places, indexer.rotary_emb)
    dense = torch.einsum("bqhd,bkd->bhqk", queries, compressed(attention.compressor, hidden))
    return torch.einsum("bqh,bqhk->bqk", weights, products), dense * attention.head_dim**-0.5
