import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semdiag_models.attention import selection as module
from semdiag_models.attention import selection as products
from semdiag_models.attention.selection import random_priorities, select_keys


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


@pytest.mark.processor
@pytest.mark.parametrize("padded", [False, True])
def test_of_many_keys_in_single_precision_none_better_is_left_out_but_by_rounding(padded, through_onednn):
    """At sizes at which oneDNN makes the products."""
    length, width, k, scale = 300, 32, 5, 0.3
    q, keys = torch.randn(2, 2, 2, length, width)
    assert products.takes(q[0, 0], keys[0, 0])
    valid = torch.arange(length) < torch.tensor([[length], [200]]) if padded else None
    selected = select_keys("topk", k, q, keys, scale, valid)
    scores = scale * (q.double() @ keys.double().mT)
    if valid is not None:
        scores.masked_fill_(~valid[:, None, None], float("-inf"))
    worst_kept, best = scores.gather(-1, selected).amin(-1), scores.topk(k, -1).values[..., -1]
    # Of width products, scaled before; each of the two that are compared is off by as much.
    unit = torch.finfo(torch.float32).eps / 2
    error = 2 * (width + 1) * unit / (1 - (width + 1) * unit) * scale * (q.abs() @ keys.abs().mT).amax(-1).double()
    assert bool((worst_kept >= best - error).all())
    assert bool((selected.sort(-1).values.diff(dim=-1) > 0).all())


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


@pytest.mark.parametrize("padded", [False, True])
def test_bottom_k_keeps_the_smallest_scores_lowest_first(padded):
    q, keys = vectors()
    valid = torch.arange(10) < torch.tensor([[10], [6], [2]]) if padded else None
    selected = select_keys("bottomk", 3, q, keys, 0.3, valid)
    assert torch.equal(selected, naive_heavy_hitters(q, -keys, 3, 0.3, valid))


def orders(seed=3, blocks=2, heads=2, length=10):
    return random_priorities(seed, blocks, heads, length, torch.device("cpu"))


@pytest.mark.parametrize("strip", [2**20, 1])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_random_attention_keeps_the_valid_keys_first_in_each_query_s_order(monkeypatch, strip, k, padded):
    monkeypatch.setattr(module, "_STRIP", strip)
    q, keys = vectors()
    valid = torch.arange(10) < torch.tensor([[10], [6], [2]]) if padded else None
    selected = select_keys("random", k, q, keys, 1.0, valid, priorities=orders()[0])
    assert selected.shape == (3, 2, 10, k)
    for b, h, i in torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(10)).tolist():
        order = orders()[0, h, i].tolist()
        expected = sorted((j for j in range(10) if valid is None or valid[b, j]), key=lambda j: -order[j])[:k]
        assert selected[b, h, i].tolist() == expected + [-1] * (k - len(expected))
    assert torch.equal(select_keys("random", k, 5 - q, keys, -2.0, valid, priorities=orders()[0]), selected)


def test_random_orders_differ_by_block_head_query_and_seed_and_come_again():
    drawn = orders()
    assert (drawn.sort(-1).values == torch.arange(10)).all()
    assert len(set(map(tuple, drawn.flatten(0, 2).tolist()))) == 2 * 2 * 10
    assert not (orders(seed=4) == drawn).all(-1).any()
    random_priorities.cache_clear()
    before = torch.get_rng_state()
    assert torch.equal(orders(), drawn)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_key_is_kept_equally_often_by_random_attention():
    q = torch.zeros(1, 1, 400, 1)
    selected = select_keys("random", 20, q, q, 1.0, None, priorities=orders(0, 1, 1, 400)[0])
    load = torch.bincount(selected.flatten(), minlength=400).double()
    assert abs(load.mean() - 20) < 1e-12
    # Binomial: 400 draws with probability 20/400. The variance of 400 loads is good to √(2/400), times 4.5.
    assert abs(load.var() / (20 * 0.95) - 1) < 4.5 * (2 / 400) ** 0.5


@given(st.integers(1, 12), st.integers(0, 2), st.integers(0, 3), st.data())
@settings(max_examples=80, deadline=None)
def test_local_attention_keeps_its_own_and_the_tokens_everywhere(inner, first, last, data):
    k = data.draw(st.integers(1, inner))
    kind, padded = data.draw(st.sampled_from(["banded", "block"])), data.draw(st.booleans())
    length = first + inner + last
    valid = torch.ones(1, length, dtype=torch.bool)
    valid[0, first + inner // 2 : first + inner] = not padded
    q = torch.zeros(1, 1, length, 2)
    rows = select_keys(kind, k, q, q, 1.0, valid if padded else None, (first, last))[0, 0].tolist()
    own = (naive_band if kind == "banded" else naive_blocks)(inner, k)
    for query, row in enumerate(rows):
        if query < first or query >= first + inner:
            assert set(row) == {-1}
        else:
            everywhere = {*range(first), *range(first + inner, length)}
            expected = everywhere | {first + j for j in own[query - first] if j >= 0}
            kept = [j for j in row if j >= 0]
            assert len(row) == k + first + last
            assert sorted(kept) == kept == sorted(j for j in expected if valid[0, j])


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
    for kind in ("banded", "topk", "bottomk", "block"):
        rows = select_keys(kind, 6, q, keys, 1.0, None).flatten(0, 2).tolist()
        assert all(sorted(key for key in row if key >= 0) == everything for row in rows)


@pytest.mark.parametrize("kind", ["banded", "block", "topk", "bottomk"])
def test_a_token_apart_in_front_is_no_ones_key(kind):
    """What the others keep is what they keep without it; its own row is left to the attention."""
    generator = torch.Generator().manual_seed(4)
    q, keys = (torch.randn(2, 2, 9, 4, generator=generator) for _ in range(2))
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, 7:] = False
    for counted in (None, valid):
        found = select_keys(kind, 3, q, keys, 0.5, counted, everywhere=(1, 0), apart=True)
        rest = None if counted is None else counted[:, 1:]
        alone = select_keys(kind, 3, q[:, :, 1:], keys[:, :, 1:], 0.5, rest)
        assert torch.equal(found[:, :, 1:], torch.where(alone < 0, alone, alone + 1))
        assert (found[:, :, 0] == -1).all()
