"""Names, views and norms of an encoder's weights."""

import pytest
import torch

from semdiag.measuring.encoders.weights import block_weights, named_tensors, not_finite


def test_every_parameter_has_its_place(wild_encoder):
    encoder = wild_encoder("full")
    found = {tensor.name: tensor.values for tensor in named_tensors(encoder)}
    for name, value in encoder.state_dict().items():
        if ".qkv." in name:
            parts = [found.pop(name.replace(".qkv.", f".{part}.")) for part in "qkv"]
            assert torch.equal(torch.cat(parts), value)
        else:
            assert torch.equal(found.pop(name), value)
    assert not found


def test_values_are_views_and_gradients_are_split_likewise(wild_encoder, padded_tokens):
    encoder = wild_encoder("topk")
    assert all(tensor.gradient is None for tensor in named_tensors(encoder))
    encoder(padded_tokens[0]).sum().backward()
    named = {tensor.name: tensor for tensor in named_tensors(encoder)}
    value = named["blocks.1.attention.v.weight"]
    assert torch.equal(value.gradient, encoder.blocks[1].attention.qkv.weight.grad[32:])
    value.values[0, 0] = 7
    assert encoder.blocks[1].attention.qkv.weight[32, 0] == 7
    assert (value.layer, value.group, value.bound) == (1, "value-output", "block 1 W_v")


def test_norms_are_those_of_whole_matrices(wild_encoder):
    encoder = wild_encoder("full", inverse_temperature=2.0)
    attention, weights = encoder.blocks[0].attention, block_weights(encoder, 0)
    q, k, v = attention.qkv.weight.detach().view(3, 2, 8, 16)
    bias = attention.qkv.bias.detach().view(3, 2, 8)
    out = attention.out.weight.detach().view(16, 2, 8)
    for h in range(2):
        form = 2 / 8**0.5 * torch.cat([q[h], bias[0, h, :, None]], 1).T @ k[h]
        assert weights.gamma[h].item() == pytest.approx(torch.linalg.matrix_norm(form, 2).item())
        value = torch.linalg.matrix_norm(out[:, h] @ v[h], 2)
        assert weights.upsilon[h].item() == pytest.approx(value.item())
    assert weights.whole_output == pytest.approx(torch.linalg.matrix_norm(attention.out.weight.detach(), 2).item())
    assert torch.equal(weights.mlp_out, encoder.blocks[0].contract.weight)


def test_what_is_not_finite_is_named(wild_encoder):
    encoder = wild_encoder("full")
    assert not_finite(encoder) == []
    with torch.no_grad():
        encoder.blocks[0].attention.qkv.bias[-1] = float("inf")
    assert not_finite(encoder) == ["blocks.0.attention.v.bias"]
