"""What counts in an attention call, against loops over samples, heads, queries and keys."""

import math
from dataclasses import replace

import pytest
import torch
from measurements_by_hand import k_sweep_tables

from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.measuring.calls.counted_rows import attended_keys, counted_rows
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import measure
from semdiag.questions.heads import head_table

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


def naive_weights(call):
    """(B, H, Lq, Lk) float64 softmax over S_i and the sink, by the definition in AttentionCall."""
    weights, allowed = torch.zeros(B, H, LQ, LK, dtype=torch.float64), seen(call)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (B, H, LQ))).tolist():
        chosen = range(LK) if call.selected is None else call.selected[b, h, i].tolist()
        exps = torch.zeros(LK, dtype=torch.float64)
        for j in (j for j in chosen if j >= 0 and allowed[b, h, i, j]):
            z = call.scale * float(call.q[b, h, i].double() @ call.k[b, 0, j].double())
            exps[j] = math.exp(call.softcap * math.tanh(z / call.softcap) + float(call.bias[0, h, 0, j]))
        sink = 0.0 if call.sinks is None else math.exp(call.sinks[h])
        weights[b, h, i] = exps / (exps.sum() + sink) if exps.any() else torch.nan
    return weights


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "keys", "whole"])
def test_the_weight_on_the_first_key_and_the_entropy_are_those_of_the_softmax(mask, causal, chosen, drawn, sinks):
    for seed in range(3):
        call = attention_call(mask, causal, True, chosen, seed)
        call = replace(call, sinks=torch.tensor([0.5, -1.0])) if sinks else call
        places = torch.tensor([[2, 0, -1], [3, 1, 2]]).expand(B, H, 3) if drawn else None
        rows, weights = counted_rows(call, 2, places), naive_weights(call)
        largest = naive_weights(replace(call, selected=None))
        found, entropy = rows.first_weight(), rows.statistics.entropy
        for b, h, r in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
            i = r if places is None else int(places[b, h, r])
            if i < 0 or not rows.keys[b, h].any():
                continue
            p, first = weights[b, h, i], rows.keys[b, h].tolist().index(True)
            assert found[b, h, r].item() == pytest.approx(p[first].item(), rel=2e-6, abs=1e-7, nan_ok=True)
            assert rows.first_kept()[b, h, r].item() == (p[first].item() > 0)
            for k in (1, 2):
                above = (largest[b, h, i] > largest[b, h, i, first]).sum().item()
                seen_at_all = largest[b, h, i, first].item() > 0
                assert rows.first_kept(k)[b, h, r].item() == (seen_at_all and above < k)
            q = [float(x) for x in p if x > 0] + ([1 - float(p.sum())] if sinks else [])
            want = math.nan if p.isnan().any() else -sum(x * math.log(x) for x in q)
            # z and ln Σ exp z are below 4 here: a few roundings of 6e-8 each
            assert entropy[b, h, r].item() == pytest.approx(want, abs=4e-6, nan_ok=True)


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


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "keys", "whole"])
def test_the_attended_keys_of_some_samples_are_those_of_all_their_queries(mask, causal, padded):
    samples = torch.tensor([0, 2])
    for seed in range(5):
        call = attention_call(mask, causal, padded, False, seed)
        allowed = seen(call) & call.counted[..., None]
        assert torch.equal(attended_keys(call).expand(B, H, LK), allowed.any(2))
        assert torch.equal(attended_keys(call, samples).expand(2, H, LK), allowed.any(2)[samples])


class HidesItsLastKey(torch.nn.Module):
    """Self-attention whose last key nobody may attend to; no argument says so."""

    def forward(self, x):
        hidden = torch.tensor([True, True, True, False])
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=hidden.expand(4, 4))


def test_the_k_sweep_counts_the_keys_that_measurements_count():
    x = torch.randn(1, 1, 4, 3, generator=torch.Generator().manual_seed(0))
    sweep = k_sweep_tables(HidesItsLastKey(), x)["sweep"]
    loads = measure(HidesItsLastKey(), x).loads
    assert set(sweep.loc[(sweep["quantity"] == "load") & (sweep["layer"] == 0), "queries"]) == {len(loads)} == {3}


@pytest.mark.slow
def test_the_table_of_heads_has_the_means_of_its_queries(wild_encoder, padded_tokens):
    """Of our encoder with padding, in batches, and without queries of few keys."""
    for kind in ("full", "topk"):
        encoder, tokens, calls = wild_encoder(kind), padded_tokens[0], []
        found = measure(encoder, tokens, k=2, dtype=torch.float64, batch_size=3, min_keys=4, max_queries=50).heads
        with torch.no_grad(), watch_attention(encoder, calls.append):
            encoder(tokens)
        assert found[["layer", "head"]].values.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
        for row in found.to_dict("records"):
            entropies, firsts, kept, largest = [], [], [], []
            call = calls[row["layer"]]
            for b, i in torch.cartesian_prod(*map(torch.arange, tokens.shape)).tolist():
                real = [j for j in range(tokens.shape[1]) if tokens[b, j] != 2]
                if i not in real or len(real) < 4:
                    continue
                z = call.scale * call.q[b, row["head"], i] @ call.k[b, row["head"]].T
                own = real if call.selected is None else call.selected[b, row["head"], i].tolist()
                own = [j for j in own if j >= 0]
                p = dict(zip(own, z[own].softmax(0).tolist(), strict=True))
                entropies.append(-sum(x * math.log(x) for x in p.values() if x > 0))
                firsts.append(p.get(real[0], 0.0))
                kept.append(real[0] in own)
                largest.append(real[0] in sorted(real, key=lambda j: -float(z[j]))[:2])
            assert row["queries"] == len(firsts)
            assert row["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-9)
            assert row["first_weight"] == pytest.approx(sum(firsts) / len(firsts), rel=1e-9)
            assert row["keeps_first"] == pytest.approx(sum(kept) / len(kept), rel=1e-9)
            assert row["keeps_first_k2"] == pytest.approx(sum(largest) / len(largest), rel=1e-9)


class Padded(torch.nn.Module):
    """Causal attention of sequences that are padded on the left."""

    def forward(self, x, attention_mask):
        allowed = attention_mask[:, None, None].bool() & torch.ones(5, 5, dtype=torch.bool).tril()
        allowed = allowed | torch.eye(5, dtype=torch.bool)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, allowed)


def test_the_share_that_keeps_the_first_key_is_of_the_same_queries_and_looks_past_padding():
    x = torch.ones(2, 1, 5, 2)
    x[0, 0, 0, 0] = x[1, 0, 2, 0] = 9.0  # the first keys that are no padding: nobody's scores are larger
    batch = {"x": x, "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])}
    for least in (1, 3):
        found = measure(Padded(), batch, k=1, min_keys=least)
        assert found.heads["queries"].item() == len(found.queries) == {1: 8, 3: 4}[least]
        assert found.heads[["keeps_first", "keeps_first_k1"]].values.tolist() == [[1.0, 1.0]]
        assert Findings(found)(head_table)["keeps_first"].tolist() == [1.0]


class ChangesItsHeads(torch.nn.Module):
    """One place of attention with another number of heads in each forward."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers = iter(numbers)

    def forward(self, x):
        x = x.unflatten(-1, (next(self.numbers), -1)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("numbers", [(1, 3), (3, 1), (2, 3), (3, 2)])
def test_the_table_of_heads_holds_where_calls_of_a_place_have_other_numbers_of_heads(numbers):
    batches = torch.randn(2, 2, 5, 6, generator=torch.Generator().manual_seed(0)).unbind()
    found = measure(ChangesItsHeads(numbers), batches, dtype=torch.float64).heads
    assert found["head"].tolist() == [0, 1, 2]
    for head, queries, entropy, first in found[["head", "queries", "entropy", "first_weight"]].values.tolist():
        weights = []
        for x, heads in zip(batches, numbers, strict=True):
            q = x.double().unflatten(-1, (heads, -1)).transpose(1, 2)[:, int(head) : int(head) + 1]
            weights += (q @ q.mT / math.sqrt(6 // heads)).softmax(-1).flatten(0, 2)
        weights = torch.stack(weights)
        assert queries == len(weights)
        assert entropy == pytest.approx(-(weights * weights.log()).sum(-1).mean().item(), rel=1e-9)
        assert first == pytest.approx(weights[:, 0].mean().item(), rel=1e-9)
