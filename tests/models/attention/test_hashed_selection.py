"""LSH selection against a naive one; its hashes against 1 − θ/π; and against the Reformer of transformers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semdiag_models.attention.dense_attention import selected_attention
from semdiag_models.attention.selection import bucket_codes, distinct, hash_directions, same_bucket, select_keys

CPU = torch.device("cpu")


def directions(heads=2, rounds=1, bits=3, width=4, seed=0):
    return hash_directions(seed, (1, heads, rounds, bits, width), CPU, torch.float64)[0]


def vectors(batch=2, heads=2, length=10, width=4):
    return torch.randn(2, batch, heads, length, width, dtype=torch.float64)


def naive_code(x, planes):
    return sum(
        2**n for n, plane in enumerate(planes.tolist()) if sum(a * b for a, b in zip(x, plane, strict=True)) < 0
    )


def naive_buckets(q, keys, planes, valid, k):
    """One set of keys per sample, head and valid query, written out."""
    kept = {}
    for b in range(q.shape[0]):
        real = [i for i in range(q.shape[2]) if valid is None or valid[b, i]]
        for h in range(q.shape[1]):
            for own in planes[h]:
                order = [
                    sorted(real, key=lambda i, x=x: (naive_code(x[b, h, i].tolist(), own), i)) for x in (q, keys)
                ]
                for rank, query in enumerate(order[0]):
                    start = max(0, min(rank // k * k, len(real) - k))
                    kept.setdefault((b, h, query), set()).update(order[1][start : start + k])
    return kept


def as_sets(selected, valid=None):
    """The same of a selection; checks that its rows hold no key twice."""
    found = {}
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in selected.shape[:3])).tolist():
        if valid is None or valid[b, i]:
            row = [key for key in selected[b, h, i].tolist() if key >= 0]
            assert len(row) == len(set(row))
            found[b, h, i] = set(row)
    return found


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_query_keeps_the_keys_of_its_buckets(data):
    length, k = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 14))
    rounds, bits = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    q, keys = vectors(length=length)
    valid = torch.rand(2, length) < 0.7 if data.draw(st.booleans()) else None
    planes = directions(rounds=rounds, bits=bits)
    selected = select_keys("lsh", k, q, keys, 1.0, valid, directions=planes)
    assert as_sets(selected, valid) == (naive_buckets(q, keys, planes, valid, k) if length else {})
    assert selected.shape[-1] == min(rounds * min(k, length), length)


def test_in_one_round_every_query_keeps_exactly_k_keys():
    q, keys = vectors(length=11)
    selected = same_bucket(q, keys, directions(), None, 4)
    assert (selected >= 0).all()


def test_no_padded_key_is_kept_and_padding_changes_nothing():
    q, keys = vectors(length=9)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[:, 6:] = False
    short = same_bucket(q[:, :, :6], keys[:, :, :6], directions(rounds=2), None, 4)
    padded = same_bucket(q, keys, directions(rounds=2), valid, 4)[:, :, :6]
    assert as_sets(padded) == as_sets(short)


def test_one_bucket_is_full_attention():
    q, keys = vectors(length=7)
    everything = set(range(7))
    assert all(row == everything for row in as_sets(same_bucket(q, keys, directions(rounds=2), None, 7)).values())


@pytest.mark.parametrize("degrees", [10, 45, 90, 150])
@pytest.mark.parametrize("bits", [1, 3])
def test_two_vectors_share_a_hash_with_probability_one_minus_the_angle_over_pi(degrees, bits):
    rounds, angle = 40_000, math.radians(degrees)
    x = torch.zeros(1, 2, 5, dtype=torch.float64)
    x[0, 0, 0], x[0, 1, 0], x[0, 1, 3] = 2, 0.7 * math.cos(angle), 0.7 * math.sin(angle)
    codes = bucket_codes(x, directions(1, rounds, bits, 5))[0]  # (R, 2)
    expected = (1 - angle / math.pi) ** bits
    share = (codes[:, 0] == codes[:, 1]).double().mean().item()
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / rounds)  # five standard deviations


def test_asymmetric_hashes_are_shared_with_a_probability_that_rises_with_the_score():
    """1 − arccos(q·k / (‖q‖ max ‖k‖)) / π, of the lengthened vectors; and the selection lengthens them so."""
    rounds = 40_000
    q = torch.tensor([[[[3.0, 0.0], [0.0, 0.0]]]], dtype=torch.float64)
    keys = torch.tensor([[[[0.5, 0.0], [0.0, 4.0]]]], dtype=torch.float64)  # the longest: ‖k‖ = 4
    planes = directions(1, rounds, 1, 3)
    long_q = torch.tensor([[[3.0, 0.0, 0.0]]], dtype=torch.float64)
    long_key = torch.tensor([[[0.5, 0.0, math.sqrt(16 - 0.25)]]], dtype=torch.float64)
    codes = [bucket_codes(x, planes)[0, :, 0] for x in (long_q, long_key)]
    expected = 1 - math.acos(3 * 0.5 / (3 * 4)) / math.pi
    share = (codes[0] == codes[1]).double().mean().item()
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / rounds)
    longest = torch.tensor([[[0.0, 4, 0]]], dtype=torch.float64)
    long_keys = torch.cat([long_key, longest], 1)
    own = [bucket_codes(x, planes) for x in (torch.nn.functional.pad(q, (0, 1))[0], long_keys)]
    for at in range(20):  # buckets of one key
        found = same_bucket(q, keys, planes[:, at : at + 1], None, 1)[0, 0, :, 0].tolist()
        order = [sorted(range(2), key=lambda i, c=c, at=at: (int(c[0, at, i]), i)) for c in own]
        assert [found[i] for i in order[0]] == order[1]


def test_shared_hashes_do_not_see_lengths():
    q, keys = vectors()
    one, other = (same_bucket(q * a, keys * b, directions(), None, 3) for a, b in ((1, 1), (7, 0.1)))
    assert torch.equal(one, other)


def test_hash_functions_come_from_the_seed_alone():
    shape = (2, 1, 2, 3, 4)
    one, same, other = (hash_directions(seed, shape, CPU, torch.float64) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])  # every block has its own


def test_selecting_draws_nothing_and_is_not_differentiated():
    q, keys = vectors().requires_grad_()
    before = torch.get_rng_state()
    assert not same_bucket(q, keys, directions(seed=77), None, 3).requires_grad
    assert torch.equal(before, torch.get_rng_state())


@given(st.lists(st.lists(st.integers(-1, 4), min_size=6, max_size=6), min_size=5, max_size=5))
@settings(deadline=None)
def test_distinct_keeps_the_set(rows):
    found = distinct(torch.tensor([[rows]]))[0, 0].tolist()
    for row, kept in zip(rows, found, strict=True):
        wanted = sorted(set(row) - {-1})
        assert kept == wanted + [-1] * (5 - len(wanted))


# The Reformer of transformers. Where its definition coincides: queries that are keys, buckets that do not look at
# neighbours, as many tokens as whole buckets hold. Where it differs: it forbids a token to itself, it normalises
# keys, and it counts a key once for every round that finds it.


@pytest.fixture
def reformer():
    """Call with the number of rounds: transformers' LSH attention in float64, 2 heads of width 6, buckets of 4."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    def make(rounds):
        config = transformers.ReformerConfig(
            hidden_size=10, num_attention_heads=2, attention_head_size=6, lsh_attn_chunk_length=4,
            num_hashes=rounds, num_buckets=[2, 2, 2], lsh_num_chunks_before=0, lsh_num_chunks_after=0, hash_seed=5,
            is_decoder=False, lsh_attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return LSHSelfAttention(config).double().eval()

    return make


def its_parts(layer, x, rounds):
    """Queries (which are its keys), normalised keys, values, each (B, H, L, D), and its hash functions as ours."""
    shared, values = (
        linear(x).view(*x.shape[:2], 2, 6).transpose(1, 2) for linear in (layer.query_key, layer.value)
    )
    torch.manual_seed(5)
    rotations = torch.randn(2, 6, rounds, 3, dtype=torch.float64)  # (H, D, R, bits)
    return shared, layer._len_and_dim_norm(shared, math.sqrt(6)), values, rotations.permute(0, 2, 3, 1)


@pytest.mark.parametrize("rounds", [1, 2])
def test_our_hashes_are_the_reformers(reformer, rounds):
    layer, x = reformer(rounds), torch.randn(3, 24, 10, dtype=torch.float64)
    shared, _, _, planes = its_parts(layer, x, rounds)
    theirs = layer._hash_vectors(shared, rounds, None).view(3, 2, rounds, 24)
    offsets = 8 * torch.arange(rounds)[:, None]  # it tells the rounds apart by them
    assert torch.equal(bucket_codes(shared, planes) + offsets, theirs)


def test_one_round_without_the_token_itself_is_the_reformers_attention_and_gradient(reformer):
    layer, x = reformer(1), torch.randn(3, 24, 10, dtype=torch.float64, requires_grad=True)
    shared, keys, values, planes = its_parts(layer, x, 1)
    selected = same_bucket(shared, shared, planes, None, 4)
    selected = selected.masked_fill(selected == torch.arange(24)[:, None], -1)
    ours = selected_attention(shared, keys, values, 1.0, selected, 0.0)
    theirs = layer(x).hidden_states.view(3, 24, 2, 6).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weight = torch.randn_like(ours)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), x, retain_graph=True)[0] for out in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_of_several_rounds_the_reformer_counts_a_key_once_a_round_and_we_count_it_once(reformer):
    layer, x = reformer(3), torch.randn(3, 24, 10, dtype=torch.float64)
    shared, keys, values, planes = its_parts(layer, x, 3)
    times = torch.zeros(3, 2, 24, 24, dtype=torch.float64)
    for at in range(3):
        found = same_bucket(shared, shared, planes[:, at : at + 1], None, 4)
        times.scatter_add_(-1, found, torch.ones_like(found, dtype=torch.float64))
    times.diagonal(dim1=-2, dim2=-1).zero_()
    weights = times * (shared @ keys.transpose(2, 3)).exp()
    theirs = layer(x).hidden_states.view(3, 24, 2, 6).transpose(1, 2)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True) @ values, theirs, rtol=0, atol=1e-12)
    selected = same_bucket(shared, shared, planes, None, 4)
    selected = selected.masked_fill(selected == torch.arange(24)[:, None], -1)
    ours = selected_attention(shared, keys, values, 1.0, selected, 0.0)
    alike = (times == times.amax(-1, keepdim=True)).logical_or(times == 0).all(-1)
    difference = (ours - theirs).abs().amax(-1)
    assert difference[alike].max() < 1e-12
    assert difference[~alike].min() > 1e-9
