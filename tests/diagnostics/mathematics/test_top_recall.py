"""Recall of the true top-k against sets counted one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semdiag.mathematics import paper_stability as module
from semdiag.mathematics.paper_stability import top_recall


def naive(q, k, scale, selected, top, allowed):
    recall = torch.full(q.shape[:3], torch.nan, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        keys = [j for j in range(k.shape[2]) if allowed is None or allowed[b, 0, 0, j]]
        best = sorted(keys, key=lambda j: -scale * float(q[b, h, i] @ k[b, h, j]))[:top]
        if best:
            recall[b, h, i] = len({*best} & {*selected[b, h, i].tolist()}) / len(best)
    return recall


@given(st.integers(1, 9), st.integers(1, 7), st.booleans(), st.sampled_from([0.5, -2.0]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_the_share_of_the_largest_scores_that_a_selection_has(length, top, padded, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 3, 2, length, 4, generator=generator, dtype=torch.float64)
    selected = torch.rand(3, 2, length, length, generator=generator).argsort(-1)[..., :4]
    selected = selected.masked_fill(torch.rand(selected.shape, generator=generator) < 0.3, -1)
    allowed = torch.rand(3, 1, 1, length, generator=generator) < 0.6 if padded else None
    found = top_recall(q, k, scale, selected, top, allowed)
    torch.testing.assert_close(
        found, naive(q, k, scale, selected, top, allowed), equal_nan=True, rtol=0, atol=1e-15
    )


def test_strips_change_nothing(monkeypatch):
    q, k = torch.randn(2, 5, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    selected = torch.arange(3).expand(5, 2, 6, 3)
    whole = top_recall(q, k, 1.0, selected, 3)
    monkeypatch.setattr(module, "_STRIP", 1)
    assert torch.equal(whole, top_recall(q, k, 1.0, selected, 3))


@pytest.mark.parametrize(("kept", "recall"), [([-1, -1], 0.0), ([2, 0], 1.0), ([1, 0], 0.5)])
def test_of_scores_4_1_3_the_two_largest_are_wanted(kept, recall):
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[4.0], [1.0], [3.0]]]])
    assert top_recall(q, k, 1.0, torch.tensor([[[kept]]]), 2).item() == recall
