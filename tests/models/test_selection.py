import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semdiag_models import selection as module
from semdiag_models.selection import select_keys


def vectors(batch=3, heads=2, length=10, width=4):
    return torch.randn(2, batch, heads, length, width, dtype=torch.float64)


def choose(kind, k, length, valid=None):
    """One row per query, of the input-agnostic kinds."""
    q = torch.zeros(1, 1, length, 2)
    return select_keys(kind, k, q, q, 1.0, valid)[0, 0].tolist()


def naive_band(length, k):
    rows = []
    for query in range(length):
        first = query - (k - 1) // 2
        while first < 0:
            first += 1
        while first + k > length:
            first -= 1
        rows.append(list(range(first, first + k)))
    return rows


def naive_blocks(length, k):
    rows = []
    for query in range(length):
        own = [key for key in range(length) if key // k == query // k]
        rows.append(own + [-1] * (k - len(own)))
    return rows


def naive_heavy_hitters(q, keys, k, scale, valid):
    batch, heads, length, _ = q.shape
    chosen = torch.full((batch, heads, length, k), -1)
    for b in range(batch):
        candidates = [j for j in range(length) if valid is None or valid[b, j]]
        for h in range(heads):
            for i in range(length):
                scores = {j: scale * float(q[b, h, i] @ keys[b, h, j]) for j in candidates}
                best = sorted(candidates, key=lambda j: -scores[j])[:k]
                chosen[b, h, i, : len(best)] = torch.tensor(best)
    return chosen


def test_full_attention_selects_nothing_in_particular():
    q, keys = vectors()
    assert select_keys("full", None, q, keys, 1.0, None) is None


@given(st.integers(1, 30), st.data())
@settings(max_examples=60, deadline=None)
def test_bands_are_k_consecutive_keys_shifted_inward_at_the_ends(length, data):
    k = data.draw(st.integers(1, length))
    assert choose("banded", k, length) == naive_band(length, k)


def test_an_even_band_reaches_one_further_to_the_right():
    assert choose("banded", 4, 9)[4] == [3, 4, 5, 6]
    assert choose("banded", 5, 9)[4] == [2, 3, 4, 5, 6]
    assert choose("banded", 5, 9)[0] == [0, 1, 2, 3, 4]
    assert choose("banded", 5, 9)[8] == [4, 5, 6, 7, 8]


@given(st.integers(1, 30), st.data())
@settings(max_examples=60, deadline=None)
def test_blocks_are_disjoint_and_the_last_one_may_be_short(length, data):
    k = data.draw(st.integers(1, length))
    assert choose("block", k, length) == naive_blocks(length, k)


@pytest.mark.parametrize("kind", ["banded", "block"])
def test_an_invalid_key_leaves_an_empty_place_in_a_fixed_selection(kind):
    valid = torch.tensor([[True] * 4 + [False] + [True] * 2 + [False] * 3])
    with_all, without = choose(kind, 3, 10), choose(kind, 3, 10, valid)
    gone = {-1, 4, 7, 8, 9}
    assert without == [[-1 if key in gone else key for key in row] for row in with_all]


@pytest.mark.parametrize("kind", ["banded", "block"])
def test_fixed_selections_are_those_of_every_sample_and_head(kind):
    q, keys = vectors()
    selected = select_keys(kind, 3, q, keys, 1.0, None)
    assert selected.shape == (3, 2, 10, 3)
    assert (selected == selected[0, 0]).all()


@pytest.mark.parametrize("strip", [2**20, 1])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("scale", [0.3, -2.0])
def test_heavy_hitters_are_those_of_a_stable_sort(monkeypatch, strip, k, padded, scale):
    monkeypatch.setattr(module, "_STRIP", strip)
    q, keys = vectors()
    valid = torch.arange(10) < torch.tensor([[10], [6], [2]]) if padded else None
    selected = select_keys("topk", k, q, keys, scale, valid)
    assert selected.dtype == torch.int64
    assert torch.equal(selected, naive_heavy_hitters(q, keys, k, scale, valid))


def test_among_ties_every_choice_has_the_largest_scores_and_no_key_comes_twice():
    q = torch.ones(1, 1, 6, 1)
    keys = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0]).view(1, 1, 6, 1)
    for row in select_keys("topk", 3, q, keys, 1.0, None)[0, 0].tolist():
        assert row[0] == 1
        assert set(row[1:]) < {2, 3, 4}
        assert len(set(row)) == 3


def test_selecting_is_not_differentiated():
    q, keys = vectors().requires_grad_()
    assert not select_keys("topk", 2, q, keys, 1.0, None).requires_grad


def test_an_input_shorter_than_k_has_all_its_keys_selected():
    q, keys = vectors(length=4)
    everything = [0, 1, 2, 3]
    for kind in ("banded", "topk", "block"):
        rows = select_keys(kind, 6, q, keys, 1.0, None).flatten(0, 2).tolist()
        assert all(sorted(key for key in row if key >= 0) == everything for row in rows)
