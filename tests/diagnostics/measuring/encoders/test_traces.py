"""Everything that the evaluated inputs show, against loops over samples, queries and keys."""

import math

import numpy as np
import pytest
import torch

from semdiag.capturing.attention_calls import watch_blocks
from semdiag.measuring.encoders import traces as input_traces
from semdiag.measuring.encoders.traces import trace_inputs
from semdiag.measuring.encoders.weights import block_weights


def swap_cost(delta, gap, k):
    """Largest 2p̄(d, k)/(2Δ + d) over 0 ≤ d ≤ δ, on a grid that closes in on it three times."""
    low, high = 0.0, delta
    for _ in range(3):
        heights = np.linspace(low, high, 201)
        costs = 2 / (1 + (k - 1) * np.exp(-heights)) / (2 * gap + heights)
        best = int(costs.argmax())
        low, high = heights[max(best - 1, 0)], heights[min(best + 1, 200)]
    return float(costs.max())


def stabilities(delta, gap, k, heavy):
    """p̄, ξ, min(s ξ, row) and min(s ξ, split) of docs/theory.md, in plain floats."""
    if k == 1 and not heavy:
        return 1.0, 0.0, 0.0, 0.0
    p = 1 / (1 + (k - 1) * math.exp(-delta))
    xi = 0.0 if k == 1 else 2 * p * (1 - p) if p < 0.5 else 0.5
    if not heavy:
        return p, xi, min(k * xi, 1.0), min(k * xi, 1.0)
    xi += swap_cost(delta, gap, k)
    return p, xi, min(2 * k * xi, max(1, 2 / gap)), min(2 * k * xi, 1 + 2 / gap)


def valid_of(encoder, row):
    """Positions of a sample's tokens that are not PAD, CLS and global ones among them."""
    return [j for j, token in enumerate(encoder.sequence(row[None])[0]) if token != 2]


def naive(call, weights, encoder, tokens):
    """Per sample: Ξ, smallest deviations, and per head λ_A and λ_M by loops over tokens."""
    heavy, found = encoder.config.attention == "topk", []
    for b, row in enumerate(tokens):
        valid = valid_of(encoder, row)
        xi_norm = max(call.tokens[b, j].norm().item() for j in valid)
        query_norm = math.sqrt(xi_norm**2 + 1)
        per_head = []
        for h in range(2):
            gamma, upsilon = weights.gamma[h].item(), weights.upsilon[h].item()
            rows = {i: one_row(call.attention, b, h, i, valid, heavy) for i in valid}
            per_token = []
            for token in valid:
                users = [i for i in valid if token in rows[i][0]]
                times = 2 if heavy else 1  # the union of two masks
                value = times * sum(rows[i][1] for i in users)
                key = gamma * query_norm * times * sum(rows[i][2] for i in users)
                per_token.append(value + xi_norm * (gamma * xi_norm * rows[token][4] + key))
            form = upsilon * xi_norm**2 * query_norm * sum(rows[i][3] for i in valid)
            load = max(sum(token in rows[i][0] for i in valid) for token in valid)
            per_head.append((max(per_token), form, load))
        found.append((xi_norm, per_head))
    return found


def one_row(call, b, h, i, valid, heavy):
    z = {j: call.scale * float(call.q[b, h, i] @ call.k[b, h, j]) for j in valid}
    inside = valid if call.selected is None else [j for j in call.selected[b, h, i].tolist() if j >= 0]
    delta = max(z[j] for j in inside) - min(z[j] for j in inside)
    gap = min(z[j] for j in inside) - max((z[j] for j in valid if j not in inside), default=-math.inf)
    if heavy and gap == math.inf:  # nothing is masked
        return (inside, *stabilities(delta, 1.0, len(inside), False))
    return (inside, *stabilities(delta, gap, len(inside), heavy))


@pytest.mark.parametrize("per_pass", [2**22, 1])
def test_the_constants_of_the_attention_are_as_defined(kind, wild_encoder, padded_tokens, monkeypatch, per_pass):
    monkeypatch.setattr(input_traces, "_SCORES", per_pass)
    encoder, (tokens, _) = wild_encoder(kind), padded_tokens
    calls = []
    with torch.inference_mode(), watch_blocks(encoder, calls.append):
        encoder(tokens)
    traces = trace_inputs(encoder, tokens)
    for call, trace in zip(calls, traces.layers, strict=True):
        for b, (xi_norm, heads) in enumerate(naive(call, block_weights(encoder, call.layer), encoder, tokens)):
            assert trace.token_norm[b].item() == pytest.approx(xi_norm)
            for h, (log_map, form, load) in enumerate(heads):
                assert trace.log_map[b, h].item() == pytest.approx(math.log(log_map), abs=1e-9)
                assert trace.log_form[b, h].item() == pytest.approx(
                    math.log(form) if form else -math.inf, abs=1e-9
                )
                assert trace.load[b, h] == load


def test_norms_counts_and_deviations_leave_padding_out(kind, wild_encoder, padded_tokens):
    encoder, (tokens, _) = wild_encoder(kind), padded_tokens
    ids, config = encoder.sequence(tokens), encoder.config
    calls = []
    with torch.inference_mode(), watch_blocks(encoder, calls.append):
        encoder(tokens)
    traces = trace_inputs(encoder, tokens)
    for b, row in enumerate(tokens):
        valid = valid_of(encoder, row)
        assert len(valid) == (row != 2).sum() + config.extra_tokens
        assert traces.tokens[b] == len(valid)
        assert traces.counts[b].tolist() == [(ids[b, valid] == v).sum() for v in range(3 + config.extra_tokens)]
        for call, trace in zip(calls, traces.layers, strict=True):
            before = (call.stream, call.middle) if config.norm == "pre" else (call.middle, call.end)
            for x, std in zip(before, (trace.attention_std, trace.mlp_std), strict=True):
                smallest = min(math.sqrt(x[b, j].var(unbiased=False).item() + 1e-5) for j in valid)
                assert std[b].item() == pytest.approx(smallest)
            for x, norm in ((call.mlp_tokens, trace.mlp_token_norm), (call.hidden, trace.hidden_norm)):
                assert norm[b].item() == pytest.approx(max(x[b, j].norm().item() for j in valid))
    pooled = [encoder.head.weight.new_tensor(0)]
    handle = encoder.head.register_forward_pre_hook(lambda head, inputs: pooled.append(inputs[0].norm(dim=-1)))
    encoder(tokens)
    handle.remove()
    torch.testing.assert_close(traces.pooled_norm, pooled[-1])


def test_hooks_go_after_an_exception(wild_encoder, padded_tokens, untouched):
    encoder = wild_encoder("topk")
    check = untouched(encoder)
    with pytest.raises(RuntimeError):
        trace_inputs(encoder, torch.full((1, 12), 3))
    check()


def test_a_kind_that_no_bound_covers_has_no_constant(wild_encoder, padded_tokens):
    encoder = wild_encoder("bottomk")
    trace = trace_inputs(encoder, padded_tokens[0]).layers[0]
    assert (trace.log_map == math.inf).all()
    assert (trace.log_form == math.inf).all()
    assert trace.token_norm.isfinite().all()
