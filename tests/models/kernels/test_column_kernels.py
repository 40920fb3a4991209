"""The largest scores of queries side by side by a compiled kernel, against torch's operations."""

import math

import pytest
import torch

from semdiag_models import compiled
from semdiag_models.kernels import column_kernels
from semdiag_models.kernels.column_kernels import keep_largest
from semdiag_models.step.attention import _largest


def scores_of(keys, queries, seed=0):
    return torch.randn(keys, 1, queries, generator=torch.Generator().manual_seed(seed))


def kept(scores, k):
    counts = (scores > -math.inf).sum(0)
    wanted = int((counts.clamp(max=k) + len(scores) - counts).sum())
    return _largest(scores.clone(), k, wanted, lambda name, shape: torch.empty(shape))


@pytest.mark.parametrize("queries", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize(("keys", "k"), [(1, 1), (5, 5), (40, 1), (40, 5), (40, 12), (128, 6)])
def test_what_is_kept_is_what_torch_keeps(monkeypatch, keys, k, queries):
    scores = scores_of(keys, queries)
    masked = scores.masked_fill(
        torch.arange(keys)[:, None, None] >= torch.arange(1, queries + 1) % keys + 1, -math.inf
    )
    for given in (scores, masked, -scores * 1e37):
        monkeypatch.setitem(compiled.LEAST, "column_kernels", 2**60)
        expected = kept(given, k)
        monkeypatch.setitem(compiled.LEAST, "column_kernels", 1)
        assert torch.equal(kept(given, k), expected)
        assert keep_largest(given.clone()[:, 0], k)


@pytest.mark.parametrize("place", [0, 130, 299])
def test_equal_scores_are_told_and_left_to_torch(monkeypatch, place):
    scores = scores_of(40, 300)
    scores[3:30, 0, place] = 9.0
    assert not keep_largest(scores.clone()[:, 0], 5)
    monkeypatch.setitem(compiled.LEAST, "column_kernels", 1)
    assert (kept(scores, 5) > -math.inf).sum(0).eq(5).all()


@pytest.mark.parametrize("key", [0, 20, 39])
def test_scores_that_are_no_numbers_stay(key):
    scores = scores_of(40, 300)[:, 0]
    scores[key, 7] = torch.nan
    keep_largest(scores, 5)
    assert scores.isnan().nonzero().tolist() == [[key, 7]]


@pytest.mark.parametrize(
    ("queries", "k", "dtype", "threads", "calls"),
    [
        (1000, 5, torch.float32, 1, 1),
        (999, 5, torch.float32, 1, 0),
        (1000, 13, torch.float32, 1, 0),
        (1000, 5, torch.float64, 1, 0),
        (1000, 5, torch.float32, 2, 0),
    ],
)
def test_it_takes_many_queries_of_one_thread(monkeypatch, queries, k, dtype, threads, calls):
    found, before = [], torch.get_num_threads()
    monkeypatch.setattr(column_kernels, "keep_largest", lambda *of: found.append(of) or keep_largest(*of))
    try:
        torch.set_num_threads(threads)
        kept(scores_of(40, queries).to(dtype), k)
    finally:
        torch.set_num_threads(before)
    assert len(found) == calls
