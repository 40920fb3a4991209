"""Score rows of a call against loops over queries and keys."""

import math

import pytest
import torch

from semdiag.capturing.attention_calls import watch_attention
from semdiag.measuring.calls.collector import scored_rows


def calls_of(encoder, tokens):
    found = []
    with torch.inference_mode(), watch_attention(encoder, found.append):
        encoder(tokens)
    return found


def test_rows_are_as_defined(kind, wild_encoder, padded_tokens):
    encoder = wild_encoder(kind)
    ids = encoder.sequence(padded_tokens[0])
    for call in calls_of(encoder, padded_tokens[0]):
        rows = scored_rows(call)
        places = torch.cartesian_prod(torch.arange(7), torch.arange(2), torch.arange(ids.shape[1]))
        for b, h, i in places.tolist():
            valid = [j for j, token in enumerate(ids[b]) if token != 2]
            if i not in valid:
                assert not rows.counted[b, h, i]
                assert not rows.selected[b, h, i].any()
                assert rows.kept[b, h, i] == rows.dispersion[b, h, i] == 0
                assert rows.separation[b, h, i] == math.inf
                continue
            z = {j: call.scale * float(call.q[b, h, i] @ call.k[b, h, j]) for j in valid}
            inside = valid if call.selected is None else [j for j in call.selected[b, h, i].tolist() if j >= 0]
            outside = [z[j] for j in valid if j not in inside]
            scores = [z[j] for j in inside]
            assert rows.selected[b, h, i].nonzero().flatten().tolist() == sorted(inside)
            assert rows.kept[b, h, i] == len(inside)
            assert rows.dispersion[b, h, i].item() == pytest.approx(max(scores) - min(scores), abs=1e-12)
            gap = min(scores) - max(outside) if outside else math.inf
            assert rows.separation[b, h, i].item() == pytest.approx(gap, abs=1e-11)


def test_a_gap_within_rounding_is_a_tie(wild_encoder, padded_tokens):
    """Repeated tokens without positions have equal keys; as computed, their scores differ in the last digit."""
    encoder = wild_encoder("topk")
    encoder.positions.zero_()
    for call in calls_of(encoder, padded_tokens[0][4:6]):
        gap = scored_rows(call).separation
        assert (gap == 0).any()
        assert not ((gap != 0) & (gap.abs() < 1e-12)).any()


def test_halves(wild_encoder, padded_tokens):
    tokens = padded_tokens[0][:6]
    whole = scored_rows(calls_of(wild_encoder("topk"), tokens)[0])
    first, second = whole.halves()
    assert torch.equal(torch.cat([first.dispersion, second.dispersion]), whole.dispersion)
    assert torch.equal(second.selected, whole.selected[3:])
