"""Keys by hashes and by clusters against loops, and against the Reformer."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_keys import select_keys, vectors

from semdiag_models.fast_attention import selected_attention
from semdiag_models.selection import (
    bucket_codes,
    cosines_to,
    distinct,
    first_centroids,
    hash_directions,
    move_centroids,
)

CPU = torch.device("cpu")


# --- hashes


def directions(heads=2, rounds=1, bits=3, width=4, seed=0):
    return hash_directions(seed, (1, heads, rounds, bits, width), CPU, torch.float64)[0]


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
    q, keys = vectors(2, length=length)
    valid = torch.rand(2, length) < 0.7 if data.draw(st.booleans()) else None
    planes = directions(rounds=rounds, bits=bits)
    selected = select_keys("lsh", k, q, keys, 1.0, valid, planes=planes)
    assert as_sets(selected, valid) == (naive_buckets(q, keys, planes, valid, k) if length else {})
    assert selected.shape[-1] == min(rounds * min(k, length), length)


def test_no_padded_key_is_kept_and_padding_changes_nothing():
    q, keys = vectors(2, length=9)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[:, 6:] = False
    short = select_keys("lsh", 4, q[:, :, :6], keys[:, :, :6], 1.0, None, planes=directions(rounds=2))
    padded = select_keys("lsh", 4, q, keys, 1.0, valid, planes=directions(rounds=2))[:, :, :6]
    assert as_sets(padded) == as_sets(short)


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
        found = select_keys("lsh", 1, q, keys, 1.0, None, planes=planes[:, at : at + 1])[0, 0, :, 0].tolist()
        order = [sorted(range(2), key=lambda i, c=c, at=at: (int(c[0, at, i]), i)) for c in own]
        assert [found[i] for i in order[0]] == order[1]


def test_hash_functions_come_from_the_seed_alone():
    shape = (2, 1, 2, 3, 4)
    one, same, other = (hash_directions(seed, shape, CPU, torch.float64) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])  # every block has its own


@given(st.lists(st.lists(st.integers(-1, 4), min_size=6, max_size=6), min_size=5, max_size=5))
@settings(deadline=None)
def test_distinct_keeps_the_set(rows):
    found = distinct(torch.tensor([[rows]]))[0, 0].tolist()
    for row, kept in zip(rows, found, strict=True):
        wanted = sorted(set(row) - {-1})
        assert kept == wanted + [-1] * (5 - len(wanted))


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
    selected = select_keys("lsh", 4, shared, shared, 1.0, None, planes=planes)
    selected = selected.masked_fill(selected == torch.arange(24)[:, None], -1)
    ours = selected_attention(shared, keys, values, 1.0, selected, 0.0)
    theirs = layer(x).hidden_states.view(3, 24, 2, 6).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weight = torch.randn_like(ours)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), x, retain_graph=True)[0] for out in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


# --- clusters


def centres(heads=2, clusters=3, width=4, seed=0):
    return first_centroids(seed, 0, (heads, clusters, width)).double()


def naive_clusters(q, keys, centroids, valid, k):
    """One set of keys per sample, head and query, written out."""
    kept = {}
    for b in range(q.shape[0]):
        real = [i for i in range(q.shape[2]) if valid is None or valid[b, i]]
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                kept[b, h, i] = set()
            for centre in centroids[h]:
                nearest = [
                    sorted(real, key=lambda i, x=x: -float(x[b, h, i] @ centre / x[b, h, i].norm()))[:k]
                    for x in (q, keys)
                ]
                for query in nearest[0]:
                    kept[b, h, query].update(nearest[1])
    return kept


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_query_keeps_the_keys_of_all_its_clusters(data):
    length, k, clusters = (data.draw(st.integers(1, most)) for most in (11, 13, 5))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    q, keys = vectors(2, length=length)
    valid = torch.rand(2, length) < 0.7 if data.draw(st.booleans()) else None
    centroids = centres(clusters=clusters)
    selected = select_keys("routing", k, q, keys, 1.0, valid, centroids=centroids)
    assert as_sets(selected) == naive_clusters(q, keys, centroids, valid, k)


def test_a_query_in_no_cluster_attends_to_nothing_and_one_in_two_to_the_keys_of_both():
    """Two centroids, on the axes; windows of two; token 2 lies between them, 0 and 1 beside one, 3 opposite."""
    q = torch.tensor([[1.0, 0.1], [0.1, 1], [1, 1], [-1, -1]], dtype=torch.float64)[None, None]
    keys = torch.tensor([[1.0, 0.1], [0.1, 1], [-1, -1], [1, 1]], dtype=torch.float64)[None, None]
    centroids = torch.eye(2, dtype=torch.float64)[None]
    selected = select_keys("routing", 2, q, keys, 1.0, None, centroids=centroids)
    assert as_sets(selected) == {(0, 0, 0): {0, 3}, (0, 0, 1): {1, 3}, (0, 0, 2): {0, 1, 3}, (0, 0, 3): set()}
    v = torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True)
    mixed = selected_attention(q, keys, v, 1.0, selected, 0.0)
    assert not mixed[0, 0, 3].any()
    (grad,) = torch.autograd.grad(mixed[0, 0, :3].sum(), v)
    assert not grad[0, 0, 2].any()  # the key that no cluster has
    assert grad.sum().item() == pytest.approx(3 * 2)  # weights of three queries sum to one each, two entries


def planted(clusters=4, each=6, batch=3, noise=0.05, width=8):
    """Unit directions, orthogonal, and queries and keys around them; which cluster every token is of."""
    directions = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q[:clusters]
    of = torch.stack([torch.randperm(clusters * each) % clusters for _ in range(batch)])  # (B, L)
    around = directions[of][:, None]  # (B, 1, L, D)
    lengths = torch.rand(2, batch, 1, clusters * each, 1, dtype=torch.float64) + 0.5
    q, keys = lengths * (around + noise * torch.randn(2, *around.shape, dtype=torch.float64))
    return directions, of, q, keys


def test_planted_clusters_are_recovered():
    """From centroids that each plant draws one of, however far: then every query keeps its own cluster's keys."""
    directions, of, q, keys = planted()
    centroids = F.normalize(directions + 0.2 * torch.randn_like(directions), dim=-1)[None].clone()
    assert (cosines_to(centroids, directions[None]).argmax(-1) == torch.arange(4)).all()
    for _ in range(200):
        move_centroids(centroids, q, keys, None, 0.9)
    both = F.normalize(torch.cat([q, keys], 2), dim=-1)[:, 0]  # (B, 2L, D)
    for cluster in range(4):
        own = both[of.repeat(1, 2) == cluster]
        mean = F.normalize(own.sum(0), dim=-1)
        # The distance to the mean direction shrinks by 0.9 a step and more: 2 · 0.9^200 < 2e-9.
        assert (centroids[0, cluster] - mean).norm() < 2 * 0.9**200
    selected = as_sets(select_keys("routing", 6, q, keys, 1.0, None, centroids=centroids))
    for (b, _, i), kept in selected.items():
        assert kept == {j for j in range(24) if of[b, j] == of[b, i]}


def test_a_step_moves_every_centroid_to_its_own_and_leaves_one_without_any():
    centroids = F.normalize(torch.tensor([[[1.0, 0.2], [0.1, 1.0], [-1.0, -1.0]]], dtype=torch.float64), dim=-1)
    before = centroids.clone()
    q = torch.tensor([[[[5.0, 0.0], [0.0, 2.0]]]], dtype=torch.float64)
    keys = torch.tensor([[[[3.0, 4.0], [9.0, 9.0]]]], dtype=torch.float64)
    valid = torch.tensor([[True, True]])
    move_centroids(centroids, q, keys, valid, 0.75)
    unit = [(1.0, 0.0), (0.0, 1.0), (0.6, 0.8), (0.5**0.5, 0.5**0.5)]
    own = {
        0: [unit[0], unit[3]],
        1: [unit[1], unit[2]],
    }  # cosines of (1, 1): 0.832 and 0.774
    for at, members in own.items():
        mean = F.normalize(torch.tensor(members, dtype=torch.float64).sum(0), dim=-1)
        wanted = F.normalize(0.75 * before[0, at] + 0.25 * mean, dim=-1)
        torch.testing.assert_close(centroids[0, at], wanted, rtol=0, atol=1e-15)
    assert torch.equal(centroids[0, 2], before[0, 2])


def test_padding_does_not_move_centroids():
    q, keys = vectors(2, length=7)
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[0, 4:] = False
    other_q, other_keys = q.clone(), keys.clone()
    other_q[0, :, 4:], other_keys[0, :, 4:] = 9, -9
    one, other = centres(), centres()
    move_centroids(one, q, keys, valid, 0.5)
    move_centroids(other, other_q, other_keys, valid, 0.5)
    assert torch.equal(one, other)


def test_first_centroids_are_unit_vectors_of_seed_and_block():
    size = (2, 3, 5)
    one, again, block, seed = (first_centroids(s, layer, size) for s, layer in ((1, 0), (1, 0), (1, 1), (2, 0)))
    torch.testing.assert_close(one.norm(dim=-1), torch.ones(2, 3))
    assert torch.equal(one, again)
    assert not torch.equal(one, block)
    assert not torch.equal(one, seed)
    with torch.device("meta"):
        assert first_centroids(1, 0, (10**5, 10**5, 10**5)).is_meta  # of a file that lies, nothing is made
