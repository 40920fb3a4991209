"""Routing selection against a naive one; centroids follow planted clusters; queries in no cluster or several."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from semdiag_models.attention.dense_attention import selected_attention
from semdiag_models.attention.selection import cosines_to, first_centroids, follow, same_clusters, select_keys


def vectors(batch=2, heads=2, length=10, width=4):
    return torch.randn(2, batch, heads, length, width, dtype=torch.float64)


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


def as_sets(selected):
    found = {}
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in selected.shape[:3])).tolist():
        row = [key for key in selected[b, h, i].tolist() if key >= 0]
        assert len(row) == len(set(row))
        found[b, h, i] = set(row)
    return found


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_query_keeps_the_keys_of_all_its_clusters(data):
    length, k, clusters = (data.draw(st.integers(1, most)) for most in (11, 13, 5))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    q, keys = vectors(length=length)
    valid = torch.rand(2, length) < 0.7 if data.draw(st.booleans()) else None
    centroids = centres(clusters=clusters)
    selected = select_keys("routing", k, q, keys, 1.0, valid, centroids=centroids)
    assert as_sets(selected) == naive_clusters(q, keys, centroids, valid, k)


def test_one_cluster_as_wide_as_the_input_is_full_attention():
    q, keys = vectors(length=6)
    found = as_sets(same_clusters(q, keys, centres(clusters=1), None, 6))
    assert set(map(frozenset, found.values())) == {frozenset(range(6))}


def test_a_query_in_no_cluster_attends_to_nothing_and_one_in_two_to_the_keys_of_both():
    """Two centroids, on the axes; windows of two; token 2 lies between them, 0 and 1 beside one, 3 opposite."""
    q = torch.tensor([[1.0, 0.1], [0.1, 1], [1, 1], [-1, -1]], dtype=torch.float64)[None, None]
    keys = torch.tensor([[1.0, 0.1], [0.1, 1], [-1, -1], [1, 1]], dtype=torch.float64)[None, None]
    centroids = torch.eye(2, dtype=torch.float64)[None]
    selected = same_clusters(q, keys, centroids, None, 2)
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
        follow(centroids, q, keys, None, 0.9)
    both = F.normalize(torch.cat([q, keys], 2), dim=-1)[:, 0]  # (B, 2L, D)
    for cluster in range(4):
        own = both[of.repeat(1, 2) == cluster]
        mean = F.normalize(own.sum(0), dim=-1)
        # The distance to the mean direction shrinks by 0.9 a step and more: 2 · 0.9^200 < 2e-9.
        assert (centroids[0, cluster] - mean).norm() < 2 * 0.9**200
    selected = as_sets(same_clusters(q, keys, centroids, None, 6))
    for (b, _, i), kept in selected.items():
        assert kept == {j for j in range(24) if of[b, j] == of[b, i]}


def test_a_step_moves_every_centroid_to_its_own_and_leaves_one_without_any():
    centroids = F.normalize(torch.tensor([[[1.0, 0.2], [0.1, 1.0], [-1.0, -1.0]]], dtype=torch.float64), dim=-1)
    before = centroids.clone()
    q = torch.tensor([[[[5.0, 0.0], [0.0, 2.0]]]], dtype=torch.float64)
    keys = torch.tensor([[[[3.0, 4.0], [9.0, 9.0]]]], dtype=torch.float64)
    valid = torch.tensor([[True, True]])
    follow(centroids, q, keys, valid, 0.75)
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
    q, keys = vectors(length=7)
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[0, 4:] = False
    other_q, other_keys = q.clone(), keys.clone()
    other_q[0, :, 4:], other_keys[0, :, 4:] = 9, -9
    one, other = centres(), centres()
    follow(one, q, keys, valid, 0.5)
    follow(other, other_q, other_keys, valid, 0.5)
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
