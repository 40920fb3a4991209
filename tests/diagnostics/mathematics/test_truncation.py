"""What truncation changes: τ (μ_kept − μ_dropped), row by row, against the softmax over fewer keys."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag.mathematics import paper_stability as module
from semdiag.mathematics import score_strips
from semdiag.mathematics.paper_stability import truncations
from semdiag.mathematics.row_statistics import row_statistics
from semdiag.mathematics.score_strips import Scores

BATCH, HEADS, LENGTH, WIDTH, STREAM = 2, 4, 9, 3, 5
EPS = torch.finfo(torch.float64).eps
KS = (1, 2, 4, 7)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(key_heads=HEADS, keys=LENGTH, **more):
    """A call as keywords; every test may add to it."""
    q, k = 2 * normal(BATCH, HEADS, LENGTH, WIDTH), normal(BATCH, key_heads, keys, WIDTH, seed=1)
    return {"q": q, "k": k, "values": normal(BATCH, key_heads, keys, 4, seed=2), **more}


ALLOWED = normal(BATCH, 1, LENGTH, LENGTH, seed=3) > -0.8
CASES = {
    "plain": case(),
    "grouped heads": case(key_heads=2),
    "masked": case(allowed=ALLOWED),
    "causal": case(causal=True),
    "causal, after a cache": case(keys=LENGTH + 2, causal=True, first_query=2),
    "causal and masked": case(causal=True, allowed=ALLOWED),
    "bias": case(bias=normal(1, HEADS, LENGTH, LENGTH, seed=4)),
    "soft-cap": case(softcap=1.5),
    "sinks": case(sinks=normal(HEADS, seed=5)),
}


def found_of(q, k, values, sinks=None, places=None, first=None, projection=None, ks=KS, **more):
    rows = row_statistics(q, k, 0.6, top=max(ks), sinks=sinks, places=places, **more)
    first = torch.zeros(q.shape[:2], dtype=torch.int64) if first is None else first
    top = rows.top, rows.top_keys
    scores = Scores(q, k, 0.6, places=places, **more)
    return rows, truncations(scores, values, top, rows.log_sum_exp, ks, first, sinks, projection)


def naive(q, k, values, row, sinks=None, allowed=None, causal=False, first_query=0, bias=None, softcap=None):
    """Scores of the keys of one row by position, their values, and the sink's weight before the softmax."""
    b, h, i = row
    own = h // (q.shape[1] // k.shape[1])
    z = 0.6 * (k[b, own] @ q[b, h, i])
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z if bias is None else z + bias.expand(*q.shape[:3], -1)[b, h, i]
    open_to = torch.ones(len(z), dtype=torch.bool)
    if allowed is not None:
        open_to = open_to & allowed.expand(*q.shape[:3], -1)[b, h, i]
    if causal:
        open_to = open_to & (torch.arange(len(z)) <= first_query + i)
    sink = 0.0 if sinks is None else math.exp(sinks[h])
    return {j: float(z[j]) for j in open_to.nonzero()[:, 0].tolist()}, values[b, own], sink


def mixed(z, values, sink):
    """Softmax over some keys and the sink, times their values."""
    total = sum(map(math.exp, z.values())) + sink
    return sum(math.exp(score) / total * values[j] for j, score in z.items())


def by_the_identity(z, kept, values, sink):
    """τ (μ_kept − μ_dropped), the sink among the kept with value 0."""
    weight = {j: math.exp(score) for j, score in z.items()}
    total = sum(weight.values()) + sink
    dropped = [j for j in z if j not in kept]
    tau = sum(weight[j] for j in dropped) / total
    mean_kept = sum(weight[j] * values[j] for j in kept) / (sum(weight[j] for j in kept) + sink)
    mean_dropped = sum(weight[j] * values[j] for j in dropped) / sum(weight[j] for j in dropped)
    return tau * (mean_kept - mean_dropped)


def tolerance(q, k, values):
    """What rounding in float64 can do to an output.

    A score of WIDTH products, scaled, bent and biased, is off by (WIDTH + 6) eps of its size, at most that of
    |q| |k| and 4 more for the bias; a weight by e to twice that; an output by that share of the longest value, and
    by one eps for each key summed. Both sides round: twice.
    """
    size = 4 + 0.6 * float(q.norm(dim=-1).max() * k.norm(dim=-1).max())
    return 2 * EPS * (2 * (WIDTH + 6) * size + 2 * k.shape[2]) * float(values.norm(dim=-1).max())


@pytest.mark.parametrize("most", [1, 2**19])
@pytest.mark.parametrize("name", CASES)
def test_changes_are_those_of_the_identity_and_of_the_softmax_over_fewer_keys(name, most, monkeypatch):
    monkeypatch.setattr(module, "_MOST", most)
    monkeypatch.setattr(score_strips, "_LONG", 1)
    given_call, compared = CASES[name], 0
    close = tolerance(*(given_call[x] for x in ("q", "k", "values")))
    projection = normal(HEADS, 4, STREAM, seed=6)
    longest = float(torch.linalg.matrix_norm(projection, 2).max())
    rows, found = found_of(**given_call, projection=projection)
    for b, h, i in torch.ones(BATCH, HEADS, LENGTH).nonzero().tolist():
        z, values, sink = naive(**given_call, row=(b, h, i))
        assert rows.keys[b, h, i] == len(z)
        if not z:
            continue
        whole = mixed(z, values, sink)
        assert float(found.size[b, h, i]) == pytest.approx(float(whole.norm()), rel=0, abs=close)
        order = sorted(z, key=lambda j, z=z: -z[j])
        for at, k in enumerate(KS):
            if k >= len(z):
                assert abs(float(found.change[b, h, i, at])) <= close  # nothing is dropped
                continue
            kept, compared = order[:k], compared + 1
            moved = mixed({j: z[j] for j in kept}, values, sink) - whole
            again = by_the_identity(z, kept, values, sink)
            assert float((moved - again).norm()) <= close
            assert float(found.change[b, h, i, at]) == pytest.approx(float(moved.norm()), rel=0, abs=close)
            into = float((moved @ projection[h]).norm())
            assert float(found.projected[b, h, i, at]) == pytest.approx(into, rel=0, abs=longest * close)
    assert compared > BATCH * HEADS * LENGTH


@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=12),
    st.integers(1, 11),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_the_identity_holds_for_any_scores_and_kept_keys(scores, k, sink, seed):
    """Also where next to nothing, or nearly all, of the weight is dropped: an eps for each sum and quotient."""
    z, values = dict(enumerate(scores)), normal(len(scores), 3, seed=seed)
    kept = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))[: min(k, len(z) - 1)].tolist()
    extra = float(sink)
    moved = mixed({j: z[j] for j in kept}, values, extra) - mixed(z, values, extra)
    close = 8 * (len(z) + 4) * EPS * float(values.norm(dim=-1).max())
    assert float((moved - by_the_identity(z, kept, values, extra)).norm()) <= close


def test_a_case_by_hand():
    """Weights 1/2, 1/3, 1/6 on 6, 0, -6: o = 2; one key gives 6, two give 6 · 3/5. The "first" key is the last."""
    scores = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64).log().view(1, 1, 1, 3)
    k = torch.zeros(1, 1, 3, 1, dtype=torch.float64)
    call = {"q": torch.ones(1, 1, 1, 1, dtype=torch.float64), "k": k, "bias": scores}
    values = torch.tensor([6.0, 0, -6], dtype=torch.float64).view(1, 1, 3, 1)
    _, found = found_of(**call, values=values, ks=(1, 2), first=torch.tensor([[2]]))
    assert found.size.item() == pytest.approx(2)
    assert found.change.flatten().tolist() == pytest.approx([4, 1.6])
    assert found.log_other_keys.exp().item() == pytest.approx(3 + 2)


@pytest.mark.parametrize("name", CASES)
def test_the_first_key_is_left_out_of_the_sum_of_the_others(name):
    given_call = CASES[name]
    first = torch.randint(LENGTH, (BATCH, HEADS), generator=torch.Generator().manual_seed(7))
    _, found = found_of(**given_call, first=first)  # the scores are of single digits: e to them keeps 13
    for b, h, i in torch.ones(BATCH, HEADS, LENGTH).nonzero().tolist():
        z, _, sink = naive(**given_call, row=(b, h, i))
        others = sum(math.exp(score) for j, score in z.items() if j != first[b, h]) + sink
        assert float(found.log_other_keys[b, h, i].exp()) == pytest.approx(others, rel=1e-13)


def test_what_a_first_key_of_nearly_all_weight_leaves_is_not_lost():
    """e^-200 of the weight, far below the smallest weight in single precision."""
    scores = torch.tensor([200.0, 1.0, 0.0]).view(1, 1, 1, 3)
    q, k = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 3, 1)
    _, found = found_of(q, k, torch.ones(1, 1, 3, 2), bias=scores, ks=(1, 2))
    assert found.log_other_keys.item() == pytest.approx(math.log(math.e + 1), rel=1e-6)


def test_some_queries_of_every_head_have_the_changes_of_the_whole():
    given_call = CASES["causal and masked"]
    places = normal(BATCH, HEADS, LENGTH, seed=8).argsort(-1)[..., :4]
    places[0, 0, 3] = -1
    _, whole = found_of(**given_call)
    _, some = found_of(**given_call, places=places)
    there = places >= 0
    expected = whole.change.gather(2, places.clamp(min=0)[..., None].expand(*places.shape, len(KS)))
    torch.testing.assert_close(some.change[there], expected[there], rtol=1e-12, atol=1e-14, equal_nan=True)


def test_values_in_half_precision_are_summed_in_single():
    given_call = {name: x.float() for name, x in CASES["plain"].items()}
    rounded = given_call | {"values": given_call["values"].half()}
    exact = given_call | {"values": rounded["values"].float()}
    assert torch.equal(found_of(**rounded)[1].change, found_of(**exact)[1].change)
