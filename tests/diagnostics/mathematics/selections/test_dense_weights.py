"""What a selection keeps of dense attention, beside loops over queries and keys."""

import math

import pytest
import torch

from semdiag.mathematics.selections.dense_weights import dense_agreement

BATCH, HEADS, QUERIES, KEYS = 2, 3, 7, 9


@pytest.fixture
def drawn():
    """Scores, and a causal selection of at most three keys."""
    draw = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(BATCH, HEADS, QUERIES, KEYS, generator=draw, dtype=torch.float64)
    available = torch.ones(QUERIES, KEYS).tril(2).bool().expand(BATCH, -1, -1)
    order = torch.rand(BATCH, QUERIES, KEYS, generator=draw).masked_fill(~available, -1)
    kept = torch.zeros_like(available).scatter(-1, order.topk(3).indices, True)
    return scores, kept, available


def by_loop(scores, kept, available):
    """Recalled share, hit, best and random share of one query: scores by head, each a list over the keys."""
    chosen = [j for j, keep in enumerate(kept) if keep and available[j]]
    choices = [j for j, free in enumerate(available) if free]
    by_head, hits = [], []
    for own in scores:
        whole = math.fsum(math.exp(own[j]) for j in choices)
        by_head.append([math.exp(own[j]) / whole for j in choices])
        hits.append(max(choices, key=lambda j, own=own: own[j]) in chosen)
    recalled = [math.fsum(p for j, p in zip(choices, own, strict=True) if j in chosen) for own in by_head]
    means = sorted((math.fsum(each) / len(scores) for each in zip(*by_head, strict=True)), reverse=True)
    return recalled, hits, math.fsum(means[: len(chosen)]), len(chosen) / len(choices)


def test_it_is_what_loops_find(drawn):
    scores, kept, available = drawn
    found = dense_agreement(scores, kept, available)
    for b in range(BATCH):
        for i in range(QUERIES):
            truth = by_loop(scores[b, :, i].tolist(), kept[b, i].tolist(), available[b, i].tolist())
            assert found.recalled[b, :, i].tolist() == pytest.approx(truth[0], rel=1e-12)
            assert found.hit[b, :, i].tolist() == truth[1]
            assert float(found.best[b, i]) == pytest.approx(truth[2], rel=1e-12)
            assert float(found.at_random[b, i]) == pytest.approx(truth[3], rel=1e-12)
    assert bool((found.recalled.mean(1) <= found.best + 1e-12).all())
    assert bool(found.hit.any())
    assert not bool(found.hit.all())


def test_a_shift_of_scores_and_the_order_of_keys_do_not_matter(drawn):
    scores, kept, available = drawn
    one = dense_agreement(scores, kept, available)
    order = torch.randperm(KEYS, generator=torch.Generator().manual_seed(1))
    shift = torch.arange(HEADS)[:, None, None]
    other = dense_agreement((scores + shift)[..., order], kept[..., order], available[..., order])
    for own, again in zip(one, other, strict=True):
        assert torch.allclose(own.double(), again.double(), rtol=1e-12)


def test_all_keys_recall_everything_and_none_nothing(drawn):
    scores, kept, available = drawn
    whole = dense_agreement(scores, torch.ones_like(kept), available)
    assert torch.allclose(whole.recalled, torch.ones_like(whole.recalled))
    assert bool(whole.hit.all())
    assert bool((whole.at_random == 1).all())
    none = dense_agreement(scores, torch.zeros_like(kept), available)
    assert not bool(none.recalled.any() or none.hit.any() or none.best.any() or none.at_random.any())


def test_one_of_two_largest_weights_is_a_hit():
    scores, kept = torch.zeros(1, 1, 1, 2), torch.tensor([[[True, False]]])
    found = dense_agreement(scores, kept, torch.ones_like(kept))
    assert bool(found.hit.all())
