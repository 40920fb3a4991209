"""Bounds of the gradient in queries and keys: against loops, above the gradient, and near it."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from semdiag.capturing.attention_calls import watch_blocks
from semdiag.measuring.calls.collector import scored_rows
from semdiag.measuring.encoders.traces import BOUNDED_TENSORS, score_gradient_bounds
from semdiag.measuring.encoders.weights import named_tensors


def gradients(encoder, tokens, labels):
    encoder.zero_grad(set_to_none=True)
    F.cross_entropy(encoder(tokens), labels).backward()
    found = {t.name: t.gradient.norm().item() for t in named_tensors(encoder) if t.name.endswith(BOUNDED_TENSORS)}
    encoder.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("size", [0.3, 1.0, 3.0])
def test_no_gradient_is_above_its_bound_and_some_come_near(kind, wild_encoder, padded_tokens, size):
    encoder, (tokens, labels) = wild_encoder(kind, size).requires_grad_(True), padded_tokens
    bounds, measured = score_gradient_bounds(encoder, tokens, labels), gradients(encoder, tokens, labels)
    assert sorted(bounds) == sorted(measured)
    gaps = np.array([bounds[name] - math.log(measured[name]) for name in bounds if measured[name] > 1e-12])
    assert gaps.min() >= -1e-9  # of float64, after a backward pass of some thousand operations
    assert gaps.min() < 1.5 * math.log(10)  # of these encoders: it could have failed


def naive(encoder, tokens, labels):
    """The formula by loops, with the exact spectral norm of every covariance."""
    calls, mixed, handles = [], [], []
    for layer in range(len(encoder.blocks)):
        core = encoder.attention(layer).core
        handles.append(core.register_forward_hook(lambda module, inputs, output: mixed.append(output)))
    with watch_blocks(encoder, calls.append):
        loss = F.cross_entropy(encoder(tokens), labels)
    for handle in handles:
        handle.remove()
    found = {}
    for call, g in zip(calls, torch.autograd.grad(loss, mixed), strict=True):
        q, k, v = (x.detach() for x in (call.attention.q, call.attention.k, call.attention.v))
        p, u = scored_rows(call.attention).weights.detach(), call.tokens.detach()
        sums = torch.zeros(3, q.shape[1], dtype=torch.float64)
        for b, h, i in np.ndindex(*p.shape[:3]):
            row, size = p[b, h, i], abs(call.attention.scale) * g[b, h, i].norm()
            centred = v[b, h] - row @ v[b, h]
            keys, inputs = ((row[:, None] * x).mT @ centred for x in (k[b, h], u[b]))
            one, other = (torch.linalg.matrix_norm(c, 2) * size for c in (keys, inputs))
            sums[:, h] += torch.stack([u[b, i].norm() * one, one, q[b, h, i].norm() * other])
        for name, value in zip(BOUNDED_TENSORS, sums.norm(dim=-1), strict=True):
            found[f"blocks.{call.layer}.{name}"] = value.item()
    return found


@pytest.mark.parametrize("kind", ["full", "topk"])
def test_matches_loops(wild_encoder, padded_tokens, kind):
    encoder, (tokens, labels) = wild_encoder(kind).requires_grad_(True), padded_tokens
    found, expected = score_gradient_bounds(encoder, tokens, labels), naive(encoder, tokens, labels)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        # ‖C Cᵀ‖_F^(1/2) is at least ‖C‖₂ and at most rank^(1/4) times it; heads are 8 wide at most.
        assert -1e-9 <= found[name] - math.log(value) <= math.log(8) / 4 + 1e-9


def test_padding_and_the_size_of_a_pass_change_nothing(wild_encoder, padded_tokens, monkeypatch):
    from semdiag.measuring.encoders import traces as score_gradients

    encoder, (tokens, labels) = wild_encoder("full").requires_grad_(True), padded_tokens
    whole = score_gradient_bounds(encoder, tokens, labels)
    monkeypatch.setattr(score_gradients, "_SCORES", 1)
    one_by_one = score_gradient_bounds(encoder, tokens, labels)
    assert all(one_by_one[name] == pytest.approx(value, abs=1e-9) for name, value in whole.items())
    further = torch.cat([tokens, torch.full_like(tokens[:, :2], 2)], 1)  # PAD
    assert all(parameter.grad is None for parameter in encoder.parameters())
    if further.shape[1] <= encoder.config.length:
        longer = score_gradient_bounds(encoder, further, labels)
        assert all(longer[name] == pytest.approx(value, abs=1e-9) for name, value in whole.items())
