"""Constants of blocks at a point: the exact Jacobian against autograd, and one bound above the other."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from semdiag.capturing.attention_calls import watch_blocks
from semdiag.mathematics.bounds.block_bounds import log_input_constant
from semdiag.mathematics.bounds.network_bounds import (
    AttentionAtPoint,
    attention_columns,
    attention_reach,
    covariances,
)
from semdiag.measuring.encoders.network_constants import (
    blocks_at_points,
    log_exact_constant,
    log_point_constant,
    network_forms,
)
from semdiag.measuring.encoders.traces import trace_inputs


def taken_apart(encoder, tokens):
    """By block and sample: the block at its point, what goes in, and which tokens count."""
    calls = []
    with torch.no_grad(), watch_blocks(encoder, calls.append):
        encoder(tokens)
    valid = encoder.valid(tokens)
    for call in calls:
        for sample, at in enumerate(blocks_at_points(encoder, call, valid)):
            counted = torch.ones_like(call.stream[0, :, 0]).bool() if valid is None else valid[sample]
            yield call.layer, sample, at, call.stream[sample], counted


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", pytest.param("gelu", marks=pytest.mark.nightly), "mish"])
def test_the_exact_constant_is_that_of_autograd(kind, wild_encoder, padded_tokens, activation):
    encoder, tokens = wild_encoder(kind, 0.8, activation=activation), padded_tokens[0][:3]
    valid = encoder.valid(tokens)
    for layer, sample, at, stream, counted in taken_apart(encoder, tokens):
        only = None if valid is None else valid[sample : sample + 1]

        def block(x, layer=layer, only=only):
            return encoder.blocks[layer](x[None], only)[0]

        jacobian = torch.autograd.functional.jacobian(block, stream)[counted][:, :, counted]
        norms = torch.linalg.matrix_norm(jacobian.transpose(1, 2), 2)  # output token by input token
        assert log_exact_constant(at) == pytest.approx(math.log(norms.sum(0).max()), abs=1e-9)


@pytest.mark.slow
def test_exact_is_below_closed_is_below_the_sound_form(kind, wild_encoder, padded_tokens):
    for size in (0.2, 0.8, 3.0):
        encoder, (tokens, _) = wild_encoder(kind, size), padded_tokens
        forms = network_forms(encoder, trace_inputs(encoder, tokens))
        for layer, sample, at, *_ in taken_apart(encoder, tokens):
            exact, closed = log_exact_constant(at), log_point_constant(at)
            sound = log_input_constant(forms.blocks[layer].sound)[sample].item()
            assert exact <= closed + 1e-12
            assert closed <= sound + 1e-10  # the reach allows for rounding, some thousand units of 2^-52


def test_an_input_of_nothing_but_padding_moves_nothing(wild_encoder, padded_tokens):
    encoder, tokens = wild_encoder("full"), padded_tokens[0]
    nothing = torch.cat([tokens[:1], torch.full_like(tokens[:1], 2)])
    for _, sample, at, *_ in taken_apart(encoder, nothing):
        found = [log_exact_constant(at), log_point_constant(at)]
        assert found == [-math.inf] * 2 if sample else min(found) > 0


def test_every_derivative_of_the_attention_is_within_its_reach(kind, wild_encoder, padded_tokens):
    encoder, (tokens, _) = wild_encoder(kind, 1.5), padded_tokens
    for _, _, at, _, counted in taken_apart(encoder, tokens):
        reach = attention_reach(at.attention)
        for token in range(int(counted.sum())):
            exact = torch.linalg.matrix_norm(attention_columns(at.attention, token), 2)
            assert (exact <= reach[:, token] * (1 + 1e-12) + 1e-12).all()


@pytest.mark.parametrize("seed", range(30))
def test_the_reach_allows_for_its_own_rounding(seed):
    """With one token nothing is left but W_o W_v: its norm, rounded, was below the true one every other time."""
    draws = np.random.default_rng(seed)
    out, value = (draws.normal(size=64) * 10.0 ** draws.integers(-3, 4, 64) for _ in range(2))
    column, row = (torch.from_numpy(x)[None] for x in (out[None], value[:, None]))
    nothing, one = torch.zeros(1, 1, 64).double(), torch.ones(1, 1, 1).double()
    at = AttentionAtPoint(one, nothing, nothing, nothing, 0 * row, 0 * row, row, column, 1.0)
    exact = abs(sum(Fraction(a) * Fraction(b) for a, b in zip(out.tolist(), value.tolist(), strict=True)))
    assert Fraction(attention_reach(at).item()) >= exact
    assert attention_reach(at).item() <= float(exact) + 1e-11 * np.linalg.norm(out) * np.linalg.norm(value)


class Sizes(TorchDispatchMode):
    """Remember the largest tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, result.numel())
        return result


def test_covariances_of_long_inputs_hold_no_queries_by_keys_by_width():
    """Of ListOps that were 184 MB a head and layer, and most of the time of bounds; the values are by a loop."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(2, 50, 60, generator=generator, dtype=torch.float64).softmax(-1)
    x, y = (torch.randn(2, 60, n, generator=generator, dtype=torch.float64) for n in (6, 5))
    with Sizes() as sizes:
        found = covariances(p, x, y)
    assert sizes.largest <= p.numel()
    for head in range(2):
        for query, weights in enumerate(p[head]):
            apart = x[head] - weights @ x[head]
            torch.testing.assert_close(found[head, query], (weights[:, None] * apart).T @ y[head])
