"""Two attention calls of every kind, compared: against loops over samples, heads, queries and keys."""

import math
from dataclasses import replace

import pytest
import torch

from semdiag.capturing.attention_call import AttentionCall
from semdiag.questions.compare import measure as module
from semdiag.questions.compare.measure import SUMS, head_changes, mismatch

B, H, HK, LQ, LK, D, DV, TOP = 2, 4, 2, 5, 6, 3, 2, 2
# Sums of at most B · H · LQ · LK · DV = 480 terms, each below 100 and worked out in fewer than 20 roundings.
TOLERANCE = 480 * 100 * 20 * torch.finfo(torch.float64).eps


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def call(seed, **others):
    q, k, v = (
        random(B, H, LQ, D, seed=seed),
        random(B, HK, LK, D, seed=seed + 1),
        random(B, HK, LK, DV, seed=seed + 2),
    )
    plain = {"module": "m", "layer": 0, "q": q, "k": k, "v": v, "scale": 0.7, "allowed": None, "queries": None}
    return AttentionCall(**{**plain, "selected": None, "mixed": torch.zeros(B, H, LQ, DV), **others})


def some(*shape, seed):
    return random(*shape, seed=seed) > -0.5


SELECTED = torch.tensor([[1, 4, 2], [0, -1, -1], [5, 3, 1], [-1, -1, -1], [2, 0, 5]]).expand(B, H, LQ, 3)
KINDS = {
    "plain": {},
    "causal": {"causal": True, "first_query": 1},
    "a mask and causal": {"causal": True, "allowed": some(B, 1, LQ, LK, seed=7)},
    "a mask of keys, some queries without a key": {
        "allowed": some(B, H, 1, LK, seed=8) & some(B, H, LQ, 1, seed=9)
    },
    "padded queries": {"queries": some(B, LQ, seed=10)},
    "a bias and a soft-cap": {"bias": random(1, H, LQ, LK, seed=11), "softcap": 1.5},
    "sinks": {"sinks": random(H, seed=12)},
    "selected keys": {"selected": SELECTED, "causal": True, "first_query": 1},
}  # fmt: skip


def attended(one, b, h, i):
    """Scores and weights by key that a query attends to, and to how many it may attend."""
    seen, may = {}, 0
    for j in range(LK):
        z = sum(one.q[b, h, i, d].item() * one.k[b, h // (H // HK), j, d].item() for d in range(D)) * one.scale
        z = one.softcap * math.tanh(z / one.softcap) if one.softcap else z
        z += 0 if one.bias is None else one.bias.expand(B, H, LQ, LK)[b, h, i, j].item()
        allowed = one.allowed is None or bool(one.allowed.expand(B, H, LQ, LK)[b, h, i, j])
        allowed = allowed and (not one.causal or j <= one.first_query + i)
        may += allowed
        if allowed and (one.selected is None or j in one.selected[b, h, i].tolist()):
            seen[j] = z
    total = sum(map(math.exp, seen.values())) + (0 if one.sinks is None else math.exp(one.sinks[h].item()))
    return seen, may, {j: math.exp(z) / total for j, z in seen.items()}


def by_loops(base, other, top):
    found = {name: torch.zeros(B, H, dtype=torch.float64) for name in SUMS}
    for b, h, i in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(LQ)).tolist():
        (z, may, p), (y, might, q) = (attended(one, b, h, i) for one in (base, other))
        counted = [
            bool(seen) and (one.queries is None or bool(one.queries[b, i]))
            for one, seen in ((base, z), (other, y))
        ]
        found["left_out"][b, h] += counted[0] != counted[1]
        if not all(counted):
            continue
        add = {"queries": 1.0}
        on_keys = sum(abs(q.get(j, 0) - p.get(j, 0)) for j in range(LK))
        add["total_variation"] = (on_keys + abs(sum(q.values()) - sum(p.values()))) / 2
        spans = [max(seen.values()) - min(seen.values()) for seen in (z, y)]
        add |= {"dispersion_base": spans[0], "dispersion": spans[1], "moved": abs(spans[1] - spans[0])}
        tops = [set(sorted(seen, key=lambda j, seen=seen: (-seen[j], j))[:top]) for seen in (z, y)]
        if may > len(tops[0]) or might > len(tops[1]):
            add |= {"top_queries": 1.0, "overlap": len(tops[0] & tops[1]) / max(map(len, tops))}
        v, w = (one.v[b, h // (H // HK)].tolist() for one in (base, other))
        for d in range(DV):
            before, after = sum(p[j] * v[j][d] for j in p), sum(q[j] * w[j][d] for j in q)
            weights = sum((q.get(j, 0) - p.get(j, 0)) * v[j][d] for j in range(LK))
            values = sum(q[j] * (w[j][d] - v[j][d]) for j in q)
            for name, x in (
                ("output", before),
                ("by_weights", weights),
                ("by_values", values),
                ("change", after - before),
            ):
                add[name] = add.get(name, 0) + x * x
        for name, x in add.items():
            found[name][b, h] += x
        found["largest"][b, h] = max(found["largest"][b, h].item(), add["total_variation"])
    return found


@pytest.mark.parametrize("entries", [2**20, 1])  # at once, and query by query
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [TOP, 4, LK + 2, 10**18])
def test_every_number_is_that_of_loops(monkeypatch, kind, top, entries):
    monkeypatch.setattr(module, "_ENTRIES", entries)
    base, other = call(0, **KINDS[kind]), call(20, **KINDS[kind])
    found, expected = head_changes(base, other, top), by_loops(base, other, top)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(
            found[name], values, rtol=0, atol=TOLERANCE, msg=lambda said, n=name: f"{n}: {said}"
        )
    assert found["queries"].sum() > 0 < found["total_variation"].sum()


@pytest.mark.parametrize("first", KINDS)
def test_models_with_different_masks_are_compared_on_queries_that_attend_in_both(first):
    base, other = call(0, **KINDS[first]), call(20, **KINDS["a mask of keys, some queries without a key"])
    found, expected = head_changes(base, other, TOP), by_loops(base, other, TOP)
    for name, values in expected.items():
        torch.testing.assert_close(
            found[name], values, rtol=0, atol=TOLERANCE, msg=lambda said, n=name: f"{n}: {said}"
        )
    assert found["left_out"].sum() > 0 or first.startswith("a mask of keys")


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_compared_with_itself_changes_nothing_at_all(kind):
    base = call(0, **KINDS[kind])
    found = head_changes(base, replace(base), TOP)
    for name in ("total_variation", "largest", "moved", "by_weights", "by_values", "change", "left_out"):
        assert (found[name] == 0).all(), name
    assert torch.equal(found["overlap"], found["top_queries"])
    assert torch.equal(found["dispersion"], found["dispersion_base"])


def test_a_case_by_hand():
    """One query, two keys: weights ½, ½ become 1/5, 4/5; values 1, 3 become 1, 4."""
    one, scores = (
        torch.ones(1, 1, 1, 1, dtype=torch.float64),
        torch.tensor([[[[0.0], [math.log(4)]]]], dtype=torch.float64),
    )
    base = AttentionCall("m", 0, one, 0 * scores, torch.tensor([[[[1.0], [3.0]]]]), 1.0, None, None, None, one)
    other = replace(base, k=scores, v=torch.tensor([[[[1.0], [4.0]]]]))
    found = {name: values.item() for name, values in head_changes(base, other, 1).items()}
    expected = {
        "queries": 1, "total_variation": 0.3, "largest": 0.3, "dispersion_base": 0, "dispersion": math.log(4),
        "moved": math.log(4), "top_queries": 1, "overlap": 0, "output": 4, "by_weights": 0.6**2,
        "by_values": 0.8**2, "change": 1.4**2, "left_out": 0,
    }  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-14)  # float64, fewer than twenty roundings


def test_calls_of_other_sizes_are_told_apart():
    assert mismatch(call(0), call(20)) == ""
    assert mismatch(call(0), replace(call(0), v=random(B, HK, LK, 5, seed=1))) == f"{DV} numbers in a value and 5"
    shorter = replace(call(0), q=random(B, 2, 3, D, seed=1))
    assert mismatch(call(0), shorter) == f"{H} heads and 2, {LQ} queries and 3"
