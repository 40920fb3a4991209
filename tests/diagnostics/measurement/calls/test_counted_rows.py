"""What counts in an attention call, against loops over samples, heads, queries and keys."""

from dataclasses import replace

import pytest
import torch

from semdiag.capturing.attention_calls import AttentionCall
from semdiag.measurement.calls.counted_rows import counted_rows
from semdiag.measurement.measure import measure
from semdiag.measurement.probes.k_sweep import k_sweep

B, H, LQ, LK = 3, 2, 4, 6


def attention_call(mask, causal, padded, chosen, seed):
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, heads, length, 5, generator=draw) for heads, length in ((H, LQ), (1, LK)))
    shape = {"none": None, "keys": (B, 1, 1, LK), "whole": (B, H, LQ, LK)}[mask]
    allowed = None if shape is None else torch.rand(shape, generator=draw) < 0.6
    bias = torch.randn(1, H, 1, LK, generator=draw)
    queries = torch.rand(B, LQ, generator=draw) < 0.6 if padded else None
    call = AttentionCall("", 0, q, k, k, 0.7, allowed, queries, None, q, bias, 2.0, None, causal, 2)
    if chosen:  # two keys of each query, -1 where they are not allowed
        picked = torch.randint(LK, (B, H, LQ, 1), generator=draw)
        pair = torch.cat([picked, (picked + 1) % LK], -1)
        call = replace(call, selected=pair.where(seen(call).gather(-1, pair), -1))
    return call


def seen(call):
    """A_i: (B, H, Lq, Lk) bool, by the definition in AttentionCall."""
    allowed = torch.ones(B, H, LQ, LK, dtype=torch.bool)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (B, H, LQ, LK))).tolist():
        if call.allowed is not None:
            allowed[b, h, i, j] = call.allowed.expand(B, H, LQ, LK)[b, h, i, j]
        if call.causal and j > call.first_query + i:
            allowed[b, h, i, j] = False
    return allowed


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "keys", "whole"])
def test_queries_and_keys_count_as_defined(mask, causal, padded, chosen):
    for seed in range(5):
        call = attention_call(mask, causal, padded, chosen, seed)
        rows = counted_rows(call)
        allowed = seen(call)
        real = torch.ones(B, LQ, dtype=torch.bool) if call.queries is None else call.queries
        for b, h in torch.cartesian_prod(torch.arange(B), torch.arange(H)).tolist():
            assert torch.equal(rows.queries[b, h], real[b])
            reached = [any(real[b, i] and allowed[b, h, i, j] for i in range(LQ)) for j in range(LK)]
            assert rows.keys[b, h].tolist() == reached
            for i in range(LQ):
                kept = allowed[b, h, i] if call.selected is None else call.selected[b, h, i] >= 0
                assert rows.attending[b, h, i] == bool(real[b, i] and kept.any())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "keys", "whole"])
def test_a_part_has_the_rows_of_the_whole(mask, causal):
    call = attention_call(mask, causal, True, True, 0)
    b, r = torch.tensor([0, 2]), torch.tensor([1, 3])
    whole, allowed = counted_rows(call, top=2), seen(call)
    for part in (call.part(b, r), call.part(slice(0, 3, 2), slice(1, 4, 2))):
        rows = counted_rows(part, top=2)
        assert torch.equal(part.scores(torch.float64), call.scores(torch.float64)[b][:, :, r])
        if part.allowed is not None:
            assert torch.equal(part.allowed.expand(2, H, 2, LK), allowed[b][:, :, r])
        for name in ("keys", "kept", "maximum", "kept_minimum", "log_sum_exp", "top"):
            ours, theirs = getattr(rows.statistics, name), getattr(whole.statistics, name)[b][:, :, r]
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert torch.equal(rows.queries, whole.queries[b][:, :, r])


class HidesItsLastKey(torch.nn.Module):
    """Self-attention whose last key nobody may attend to; no argument says so."""

    def forward(self, x):
        hidden = torch.tensor([True, True, True, False])
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=hidden.expand(4, 4))


def test_the_k_sweep_counts_the_keys_that_measurements_count():
    x = torch.randn(1, 1, 4, 3, generator=torch.Generator().manual_seed(0))
    sweep = k_sweep(HidesItsLastKey(), x)
    loads = measure(HidesItsLastKey(), x).loads
    assert set(sweep.loc[(sweep["quantity"] == "load") & (sweep["layer"] == 0), "queries"]) == {len(loads)} == {3}
