"""Kinds of attention against naive ones: which keys each keeps, and what the table says."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_keys import select_keys, vectors

from semdiag_files import InputError
from semdiag_models import ATTENTIONS, AttentionKind
from semdiag_models import fast_attention as module
from semdiag_models.kinds import DRAWN, LOCAL
from semdiag_models.model import Encoder
from semdiag_models.selection import (
    SELECTORS,
    Indexer,
    divergence_from_attention,
    first_centroids,
    random_priorities,
)

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("strip", [2**20, 1, None])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("scale", [0.3, -2.0])
def test_heavy_hitters_are_those_of_a_stable_sort(monkeypatch, strip, k, padded, scale):
    """Strip by strip, and without the fast path."""
    monkeypatch.setattr(module, "_STRIP", strip)
    q, keys = vectors()
    valid = torch.arange(10) < torch.tensor([[10], [6], [2]]) if padded else None
    selected = select_keys("topk", k, q, keys, scale, valid, fast=strip is not None)
    assert selected.dtype == torch.int64
    assert torch.equal(selected, naive_heavy_hitters(q, keys, k, scale, valid))


@pytest.mark.parametrize("padded", [False, True])
def test_bottom_k_keeps_the_smallest_scores_lowest_first(padded):
    q, keys = vectors()
    valid = torch.arange(10) < torch.tensor([[10], [6], [2]]) if padded else None
    selected = select_keys("bottomk", 3, q, keys, 0.3, valid)
    assert torch.equal(selected, naive_heavy_hitters(q, -keys, 3, 0.3, valid))


def orders(seed=3, blocks=2, heads=2, length=10):
    return random_priorities(seed, blocks, heads, length, CPU)


@pytest.mark.parametrize("strip", [2**20, 1])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_random_attention_keeps_the_valid_keys_first_in_each_query_s_order(monkeypatch, strip, k, padded):
    monkeypatch.setattr(module, "_STRIP", strip)
    q, keys = vectors()
    valid = torch.arange(10) < torch.tensor([[10], [6], [2]]) if padded else None
    selected = select_keys("random", k, q, keys, 1.0, valid, selection_seed=3)
    assert selected.shape == (3, 2, 10, k)
    for b, h, i in torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(10)).tolist():
        order = orders()[0, h, i].tolist()
        expected = sorted((j for j in range(10) if valid is None or valid[b, j]), key=lambda j: -order[j])[:k]
        assert selected[b, h, i].tolist() == expected + [-1] * (k - len(expected))
    assert torch.equal(select_keys("random", k, 5 - q, keys, -2.0, valid, selection_seed=3), selected)


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
    selected = select_keys("random", 20, q, q, 1.0, None, selection_seed=0)
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


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_in_any_order_the_largest_are_those_of_torch(ties, k):
    scores = torch.randint(4, (5, 6, 7)).float() if ties else torch.randn(5, 6, 7)
    scores[0, 1, 2:] = -torch.inf  # fewer than three keys are allowed
    (values, positions), wanted = module.largest(scores, k, in_order=False), scores.topk(k, -1)
    assert torch.equal(scores.gather(-1, positions), values)
    assert torch.equal(values.sort(-1).values, wanted.values.sort(-1).values)
    assert all(len(set(row)) == k for row in positions.flatten(0, 1).tolist())
    if not ties:
        kept = wanted.values.amin(-1) > -torch.inf
        assert torch.equal(positions[kept].sort(-1).values, wanted.indices[kept].sort(-1).values)


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
        found = select_keys(kind, 3, q, keys, 0.5, counted, everywhere=(1, 0), cls_hidden=True)
        rest = None if counted is None else counted[:, 1:]
        alone = select_keys(kind, 3, q[:, :, 1:], keys[:, :, 1:], 0.5, rest)
        assert torch.equal(found[:, :, 1:], torch.where(alone < 0, alone, alone + 1))
        assert (found[:, :, 0] == -1).all()


# --- keys by a small head, and by the mean keys of blocks


def indexer_of(heads, width, seed=2):
    torch.manual_seed(seed)
    return Indexer((heads, width), heads, 3).double()


def naive_indexer_scores(indexer, q, keys, valid):
    """w · ReLU(q · k / √3) for each query and valid key of a sample, in Python's floats."""
    _, length, _ = q.shape
    linear = {name: layer.weight.tolist() for name, layer in indexer.named_children()}
    biases = {name: layer.bias.tolist() for name, layer in indexer.named_children()}

    def project(name, vector):
        rows = zip(linear[name], biases[name], strict=True)
        return [sum(a * b for a, b in zip(row, vector, strict=True)) + bias for row, bias in rows]

    rows = []
    for i in range(length):
        query = q[:, i].flatten().tolist()  # of all heads
        row = {}
        for j in (j for j in range(length) if valid is None or valid[j]):
            key = project("key", keys[:, j].flatten().tolist())
            product = sum(a * b for a, b in zip(project("query", query), key, strict=True)) / math.sqrt(3)
            row[j] = project("weight", query)[0] * max(0.0, product)
        rows.append(row)
    return rows


@given(st.integers(1, 9), st.integers(1, 10), st.booleans(), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_an_indexer_keeps_its_largest_scores_the_same_for_all_heads(length, k, padded, seed):
    torch.manual_seed(seed)
    q, keys = vectors(2, length=length)
    indexer = indexer_of(2, 4, seed)
    valid = torch.arange(length) < torch.tensor([[length], [max(1, length // 2)]]) if padded else None
    selected = select_keys("indexer", k, q, keys, 0.5, valid, indexer=indexer)
    assert selected.shape == (2, 2, length, min(k, length))
    assert torch.equal(selected[:, 0], selected[:, 1])
    for b in range(2):
        counted = None if valid is None else valid[b]
        for i, scores in enumerate(naive_indexer_scores(indexer, q[b], keys[b], counted)):
            chosen = [j for j in selected[b, 0, i].tolist() if j >= 0]
            assert len(set(chosen)) == len(chosen) == min(k, len(scores))
            assert chosen == sorted(scores, key=lambda j: (-scores[j], j))[: len(chosen)]  # ReLU's zeros are equal


@pytest.mark.parametrize("padded", [False, True])
def test_an_indexer_learns_from_its_divergence_from_the_mean_attention(padded):
    """The mean over queries of Σ p (ln p − ln softmax(score)), written out; queries and keys get no gradient."""
    q, keys = (part.clone().requires_grad_() for part in vectors(2, length=6))
    indexer = indexer_of(2, 4)
    valid = torch.arange(6) < torch.tensor([[6], [4]]) if padded else None
    found = divergence_from_attention(indexer(q, keys, valid), q, keys, valid, 0.5)
    rows = []
    for b in range(2):
        queries, all_keys = q[b].detach(), keys[b].detach()
        counted = [j for j in range(6) if valid is None or valid[b, j]]
        naive = naive_indexer_scores(indexer, queries, all_keys, None if valid is None else valid[b])
        for i in counted:
            heads = [[math.exp(0.5 * float(queries[h, i] @ all_keys[h, j])) for j in counted] for h in range(2)]
            attention = [sum(row[n] / sum(row) for row in heads) / 2 for n in range(len(counted))]
            total = sum(map(math.exp, naive[i].values()))
            logarithms = [score - math.log(total) for score in naive[i].values()]
            rows.append(sum(p * (math.log(p) - z) for p, z in zip(attention, logarithms, strict=True)))
    assert found.item() == pytest.approx(sum(rows) / len(rows), abs=1e-12)
    found.backward()
    assert q.grad is None
    assert all(p.grad.isfinite().all() and p.grad.any() for p in indexer.query.parameters())


def naive_block_choice(q, keys, k, scale, valid, chosen):
    """Keys of the query's own block and of the best others, by the scores of their mean keys: one set a query."""
    length, width = q.shape
    blocks = [list(range(start, min(start + k, length))) for start in range(0, length, k)]
    real = [[j for j in block if valid is None or valid[j]] for block in blocks]
    rows = []
    for i in range(length):
        scores = {}
        for n, members in enumerate(real):
            if members and n != i // k:
                mean = [sum(float(keys[j, d]) for j in members) / len(members) for d in range(width)]
                scores[n] = scale * sum(float(q[i, d]) * mean[d] for d in range(width))
        best = sorted(scores, key=lambda n: -scores[n])[: chosen - 1]
        rows.append({j for n in (i // k, *best) for j in real[n]})
    return rows


@given(st.integers(1, 13), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_moba_keeps_the_own_block_and_those_with_the_best_mean_keys(length, k, chosen, padded, seed):
    torch.manual_seed(seed)
    q, keys = vectors(2, length=length)
    valid = torch.arange(length) < torch.tensor([[length], [max(1, length // 2)]]) if padded else None
    selected = select_keys("moba", k, q, keys, -0.7, valid, chosen_blocks=chosen)
    for b, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
        counted = None if valid is None else valid[b]
        naive = naive_block_choice(q[b, h], keys[b, h], k, -0.7, counted, chosen)
        for i, row in enumerate(selected[b, h].tolist()):
            if counted is None or counted[i]:
                listed = [j for j in row if j >= 0]
                assert len(listed) == len(set(listed))
                assert set(listed) == naive[i]


def test_moba_by_hand():
    """Blocks {0, 1}, {2, 3}, {4}; mean keys 1, 3, -5: +1 takes the second, -1 the last."""
    keys = torch.tensor([0.0, 2, 3, 3, -5]).view(1, 1, 5, 1)
    signs = torch.tensor([1.0, -1, 1, 1, 1]).view(1, 1, 5, 1)
    rows = select_keys("moba", 2, signs, keys, 1.0, None)[0, 0].tolist()
    assert [{j for j in row if j >= 0} for row in rows] == [
        {0, 1, 2, 3},
        {0, 1, 4},
        {0, 1, 2, 3},
        {0, 1, 2, 3},
        {2, 3, 4},
    ]


# --- the table


@dataclass(frozen=True)
class Row:
    """One query of one head."""

    query: int
    length: int  # of the input
    k: int  # at most the length
    scores: dict[int, float]  # of the keys that are no padding

    @property
    def ranked(self):
        """The keys, those with the largest scores first."""
        return sorted(self.scores, key=lambda key: -self.scores[key])


def best_blocks(row):
    """The own block of k keys, and the other with the largest mean score: that of its mean key."""
    blocks = {}
    for key in row.scores:
        blocks.setdefault(key // row.k, []).append(key)
    chosen = blocks.pop(row.query // row.k, [])
    means = {number: sum(row.scores[key] for key in keys) / len(keys) for number, keys in blocks.items()}
    return {*chosen, *(blocks[max(means, key=means.get)] if means else ())}


# The naive reference of each kind: the keys that a query keeps; padding among them does not count.
REFERENCES = {
    "banded": lambda row: set(naive_band(row.length, row.k)[row.query]),
    "block": lambda row: {key for key in range(row.length) if key // row.k == row.query // row.k},
    "topk": lambda row: set(row.ranked[: row.k]),
    "bottomk": lambda row: set(row.ranked[-row.k :]),
    "moba": best_blocks,
}
# Their keys depend on draws, or on weights of the layer.
REFERENCES_ELSEWHERE = {"random", "redrawn", "lsh", "routing", "indexer"}


def test_every_kind_has_a_reference():
    assert REFERENCES.keys() | REFERENCES_ELSEWHERE == SELECTORS.keys()
    assert SELECTORS.keys() == {name for name, kind in ATTENTIONS.items() if not kind.dense}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("k", [1, 3, 10, 12])
@pytest.mark.parametrize("name", REFERENCES)
def test_a_kind_keeps_the_keys_of_its_reference(name, k, padded):
    q, keys = vectors(2)
    valid = torch.arange(10) < torch.tensor([[10], [6]]) if padded else None
    selected = select_keys(name, k, q, keys, 0.7, valid)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(10)).tolist():
        real = [key for key in range(10) if valid is None or valid[b, key]]
        row = Row(i, 10, min(k, 10), {key: 0.7 * float(q[b, h, i] @ keys[b, h, key]) for key in real})
        listed = [key for key in selected[b, h, i].tolist() if key >= 0]
        if i in real:
            assert sorted(listed) == sorted(REFERENCES[name](row) & {*real})


def test_only_full_attention_is_dense():
    assert [name for name, kind in ATTENTIONS.items() if kind.dense] == ["full"]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_kind_is_said_in_words_and_cannot_be_changed(name):
    kind = ATTENTIONS[name]
    assert kind.meaning
    assert "\n" not in kind.meaning
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind.keeps = "all"


def test_the_derived_names():
    assert LOCAL == ("banded", "block")
    assert DRAWN == ("random", "lsh", "routing")


@pytest.mark.parametrize("name", ATTENTIONS)
def test_only_dense_attention_takes_no_k(name, tiny_model):
    right, wrong = (None, 3) if ATTENTIONS[name].dense else (3, None)
    assert tiny_model(attention=name, k=right).attention == name
    with pytest.raises(InputError, match="takes no k;" if right is None else "needs k"):
        tiny_model(attention=name, k=wrong)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_kept_keys_follow_the_scores_exactly_where_it_says_so(name):
    """Scores turned round keep other keys if and only if the kind is input-dependent."""
    kind, k = ATTENTIONS[name], None if ATTENTIONS[name].dense else 3
    q, keys = torch.randn(2, 1, 1, 8, 4, generator=torch.Generator().manual_seed(0))
    centroids = first_centroids(0, 0, (1, 3, 4)) if name == "routing" else None
    indexer = indexer_of(1, 4).float()
    states = {"centroids": centroids, "indexer": indexer}
    one, other = (select_keys(name, k, sign * q, keys, 1.0, None, **states) for sign in (1, -1))
    if kind.keeps == "redrawn":
        assert not torch.equal(one, other)
        assert one.shape == (1, 1, 8, 3)
    elif kind.dense:
        assert one is other is None
    else:
        assert torch.equal(one, other) != kind.input_dependent
        assert one.shape == (1, 1, 8, 6 if name == "moba" else 3) or name == "routing"


@pytest.mark.parametrize("name", ["", "Full", "top-k", "causal", "masked", "sparse"])
def test_an_unknown_kind_is_refused_with_those_that_are_known(name, tiny_model):
    with pytest.raises(InputError, match="full") as refused:
        tiny_model(attention=name, k=3)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize(
    ("option", "value", "takers"),
    [
        ("global_tokens", 1, "banded and block"),
        ("selection_seed", 1, "random, lsh and routing"),
        ("hash_rounds", 2, "lsh"),
        ("clusters", 2, "routing"),
        ("score_gradient", "straight-through", "topk"),
        ("indexer_width", 4, "indexer"),
        ("indexer_warm_up", 0, "indexer"),
        ("chosen_blocks", 3, "moba"),
    ],
)
def test_an_option_that_a_kind_does_not_know_is_refused_with_the_kinds_that_know_it(
    name, option, value, takers, tiny_model
):
    fields = {"attention": name, "k": None if ATTENTIONS[name].dense else 3, option: value}
    if option in ATTENTIONS[name].options:
        assert getattr(tiny_model(**fields), option) == value
        return
    with pytest.raises(InputError) as refused:
        tiny_model(**fields)
    verb = "does" if " and " not in takers else "do"
    assert str(refused.value) == f"{name} attention takes no {option}; {takers} {verb}. Got {option}={value}."


def test_a_new_kind_is_one_function_and_one_line_of_the_table(monkeypatch, tiny_model, naive_attention):
    """Every second key: the model, its training and evaluation follow."""

    def strided(q, keys, valid, layer):
        length = q.shape[2]
        return (2 * torch.arange(layer.config.k) % length).expand(*q.shape[:3], -1)

    monkeypatch.setitem(ATTENTIONS, "strided", AttentionKind("every second key", "fixed"))
    monkeypatch.setitem(SELECTORS, "strided", strided)
    model = Encoder(tiny_model(attention="strided", k=4, dropout=0.0)).double()
    calls = []
    model.attention(0).core.register_forward_hook(lambda _, given, output: calls.append((given, output)))
    tokens = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1]])
    trained, evaluated = model.train()(tokens), model.eval()(tokens)
    torch.testing.assert_close(trained, evaluated, rtol=0, atol=1e-14)
    allowed = (torch.arange(8) % 2 == 0).expand(1, 1, 8, 8)
    for (q, k, v, scale, *_), mixed in calls:
        torch.testing.assert_close(mixed, naive_attention(q, k, v, scale, allowed), rtol=0, atol=1e-12)
    with pytest.raises(InputError, match="strided attention takes no clusters; routing does"):
        tiny_model(attention="strided", k=4, clusters=2)
