"""Kinds of attention against naive ones: which keys each keeps, and the mixing of values with its gradients."""

import dataclasses
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from semdiag_models import ATTENTIONS, AttentionKind, InputError, ModelConfig
from semdiag_models import attention as module
from semdiag_models.attention import (
    DRAWN,
    LOCAL,
    bucket_codes,
    cosines_to,
    dense_attention,
    distinct,
    dropped_positions,
    first_centroids,
    follow,
    hash_directions,
    plain_selected_attention,
    random_priorities,
    selected_attention,
    straight_through_attention,
)
from semdiag_models.encoder import Encoder

CPU = torch.device("cpu")


def select_keys(
    kind, k, q, keys, scale, valid, everywhere=(0, 0), apart=False, centroids=None, planes=None, **fields
):
    """What the kind's function in the table keeps, in a layer with these properties."""
    (_, heads, length, width), select = q.shape, ATTENTIONS[kind].select
    sizes = {"heads": heads, "head_width": width, "blocks": 1}
    config = ModelConfig(3, 2, max(length, k or 1), kind, k, **sizes, **fields)
    layer = SimpleNamespace(
        config=config, layer=0, scale=scale, training=False, draw_seed=None, centroids=centroids,
        core=SimpleNamespace(everywhere=everywhere, apart=apart),
    )  # fmt: skip
    if planes is None:
        return None if select is None else select(q, keys, valid, layer)
    with mock.patch.object(module, "hash_directions", return_value=planes[None]):
        return select(q, keys, valid, layer)


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


# --- the table


# dense, input_dependent, has_bounds, ranks_scores
PROPERTIES = {
    "full": (True, False, True, True),
    "banded": (False, False, True, False),
    "block": (False, False, True, False),
    "topk": (False, True, True, True),
    "bottomk": (False, True, False, False),
    "random": (False, False, True, False),
    "redrawn": (False, False, False, False),
    "lsh": (False, True, False, False),
    "routing": (False, True, False, False),
}


def test_every_kind_is_known_here():
    assert list(ATTENTIONS) == list(PROPERTIES)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_properties(name):
    kind = ATTENTIONS[name]
    found = (kind.dense, kind.input_dependent, kind.has_bounds, kind.ranks_scores)
    assert found == PROPERTIES[name]


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
    one, other = (select_keys(name, k, sign * q, keys, 1.0, None, centroids=centroids) for sign in (1, -1))
    if kind.keeps == "redrawn":
        assert not torch.equal(one, other)
        assert one.shape == (1, 1, 8, 3)
    elif kind.dense:
        assert one is other is None
    else:
        assert torch.equal(one, other) != kind.input_dependent
        assert one.shape == (1, 1, 8, 3) or name == "routing"


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

    monkeypatch.setitem(ATTENTIONS, "strided", AttentionKind("every second key", "fixed", strided))
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
        follow(centroids, q, keys, None, 0.9)
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
    q, keys = vectors(2, length=7)
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


# --- attention over all keys


B, L, D, SCALE = 3, 10, 5, 0.7
STRIPS = {"one strip": 2**20, "a short last strip": 4 * L**2, "a matrix a strip": 1}


def projected(heads):
    """Queries, keys and values as the encoder lays them out: three views of one tensor."""
    qkv = torch.randn(B, L, 3, heads, D, dtype=torch.float64, requires_grad=True)
    return qkv, qkv.permute(2, 0, 3, 1, 4)


def validity(padded):
    return torch.arange(L) < torch.tensor([[L], [7], [1]]) if padded else None


def redrawn(heads, p, strip, seed):
    """The drops that a seed leads to, as (B, H, L, L) zeros among ones."""
    torch.manual_seed(seed)
    kept = torch.ones(B * heads, L, L, dtype=torch.float64)
    per_strip = max(1, strip // L**2)
    for rows in range(0, B * heads, per_strip):
        part = kept[rows : rows + per_strip]
        part.view(-1)[dropped_positions(part.numel(), p)] = 0
    return kept.view(B, heads, L, L)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("strip", STRIPS.values(), ids=STRIPS)
def test_with_dropout_it_is_the_naive_softmax_under_the_same_drops(
    monkeypatch, naive_attention, heads, padded, strip
):
    monkeypatch.setattr(module, "_STRIP", strip)
    qkv, (q, k, v) = projected(heads)
    valid, p = validity(padded), 0.3
    torch.manual_seed(4)
    mixed = dense_attention(q, k, v, SCALE, valid, p)
    kept = redrawn(heads, p, strip, 4)
    assert 0.5 < kept.mean() < 0.9
    allowed = None if valid is None else valid[:, None, None, :].expand(B, heads, L, L)
    naive = naive_attention(q, k, v, SCALE, allowed, kept, p)
    torch.testing.assert_close(mixed, naive, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(mixed)
    gradients = [torch.autograd.grad(out, qkv, cotangent, retain_graph=True)[0] for out in (mixed, naive)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_without_dropout_it_is_the_naive_softmax(naive_attention, heads, padded):
    qkv, (q, k, v) = projected(heads)
    valid = validity(padded)
    mixed = dense_attention(q, k, v, SCALE, valid, 0.0)
    allowed = None if valid is None else valid[:, None, None, :].expand(B, heads, L, L)
    naive = naive_attention(q, k, v, SCALE, allowed)
    torch.testing.assert_close(mixed, naive, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(mixed)
    gradients = [torch.autograd.grad(out, qkv, cotangent, retain_graph=True)[0] for out in (mixed, naive)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("strip", [2**20, 2 * L, 1])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_few_queries_attend_to_all_keys(monkeypatch, naive_attention, padded, strip, p):
    monkeypatch.setattr(module, "_STRIP", strip)
    qkv, (q, k, v) = projected(2)
    valid = validity(padded)
    torch.manual_seed(4)
    mixed = dense_attention(q[:, :, :2], k, v, SCALE, valid, p)
    torch.manual_seed(4)
    kept = torch.ones(B * 2, 2, L, dtype=torch.float64)
    for rows in kept.split(max(1, strip // (2 * L))) if p else ():
        rows.view(-1)[dropped_positions(rows.numel(), p)] = 0
    allowed = None if valid is None else valid[:, None, None, :].expand(B, 2, 2, L)
    naive = naive_attention(q[:, :, :2], k, v, SCALE, allowed, kept.view(B, 2, 2, L), p)
    torch.testing.assert_close(mixed, naive, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(mixed)
    gradients = [torch.autograd.grad(out, qkv, cotangent, retain_graph=True)[0] for out in (mixed, naive)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_the_gradient_over_all_keys_is_that_of_finite_differences():
    q, k, v = torch.randn(3, 2, 2, 4, 3, dtype=torch.float64)
    valid = torch.tensor([[True, True, True, False], [True, True, True, True]])

    def seeded(*inputs):
        torch.manual_seed(1)
        return dense_attention(*inputs, SCALE, valid, 0.2)

    assert torch.autograd.gradcheck(seeded, [t.clone().requires_grad_() for t in (q, k, v)])


def test_an_excluded_key_has_no_influence_and_no_gradient():
    _, (q, k, v) = projected(1)
    k, v = k.detach().requires_grad_(), v.detach().requires_grad_()
    valid = validity(True)
    mixed = dense_attention(q, k, v, SCALE, valid, 0.1)
    for gradient in torch.autograd.grad(mixed.square().sum(), (k, v)):
        assert not gradient[~valid[:, None, :].expand(B, 1, L)].any()
        assert gradient[valid[:, None, :].expand(B, 1, L)].any(-1).float().mean() > 0.9


def test_of_several_strips_nothing_as_large_as_the_scores_is_kept(monkeypatch):
    monkeypatch.setattr(module, "_STRIP", 2**14)
    length, kept = 200, []
    q, k, v = (torch.randn(2, 1, length, 4, requires_grad=True) for _ in range(3))

    def note(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        dense_attention(q, k, v, 1.0, None, 0.01)
    assert 6 * length * 4 <= sum(kept) < length**2 / 2


# --- attention over selected keys


def dense(selected, entries):
    """Scatter entries (B, H, L, K) of the selected keys into (B, H, L, L); zero elsewhere."""
    whole = torch.zeros(*selected.shape[:3], L + 1, dtype=entries.dtype)
    return whole.scatter(3, selected.where(selected >= 0, L), entries)[..., :L]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", ["banded", "block", "topk"])
@pytest.mark.parametrize("k", [1, 3, L])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_it_is_the_naive_masked_softmax_under_the_same_drops(naive_attention, kind, k, heads, padded, p):
    qkv, (q, keys, v) = projected(heads)
    selected = select_keys(kind, k, q, keys, SCALE, validity(padded))
    torch.manual_seed(6)
    mixed = selected_attention(q, keys, v, SCALE, selected, p)

    torch.manual_seed(6)
    kept = torch.ones(selected.shape, dtype=torch.float64)
    if p:
        kept.view(-1)[dropped_positions(kept.numel(), p)] = 0
        assert 0.5 < kept.mean() < 0.9
    allowed = dense(selected, torch.ones(selected.shape)) > 0
    some = allowed.any(-1, keepdim=True)  # the naive softmax has no answer for a query without a key
    naive = naive_attention(q, keys, v, SCALE, allowed | ~some, dense(selected, kept), p) * some
    torch.testing.assert_close(mixed, naive, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(mixed)
    gradients = [torch.autograd.grad(out, qkv, cotangent, retain_graph=True)[0] for out in (mixed, naive)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_a_query_without_a_selected_key_gives_zero_and_takes_no_gradient():
    q, k, v = (torch.randn(1, 1, 4, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    selected = torch.tensor([[[[0, 1], [-1, -1], [2, -1], [3, 0]]]])
    mixed = selected_attention(q, k, v, SCALE, selected, 0.0)
    assert not mixed[0, 0, 1].any()
    torch.testing.assert_close(mixed[0, 0, 2], v[0, 0, 2])
    gradient = torch.autograd.grad(mixed.square().sum(), q)[0]
    assert not gradient[0, 0, 1].any()
    assert gradient[0, 0, 0].all()
    assert gradient.isfinite().all()


def test_its_gradient_is_that_of_finite_differences():
    inputs = [torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    selected = torch.tensor([[0, 2], [1, -1], [3, 2], [-1, -1]]).expand(2, 2, 4, 2)

    def seeded(*inputs):
        torch.manual_seed(1)
        return selected_attention(*inputs, SCALE, selected, 0.2)

    assert torch.autograd.gradcheck(seeded, inputs)


@pytest.mark.processor
def test_the_backward_pass_repeats_itself_bit_for_bit():
    gradients = []
    inputs = [torch.randn(4, 2, 50, 8, requires_grad=True) for _ in range(3)]
    selected = torch.zeros(4, 2, 50, 7, dtype=torch.int64).copy_(
        torch.arange(7)
    )  # every query loads the same keys
    for _ in range(3):
        mixed = selected_attention(*inputs, SCALE, selected, 0.0)
        gradients.append(torch.autograd.grad(mixed.square().sum(), inputs))
    assert all(torch.equal(a, b) for later in gradients[1:] for a, b in zip(gradients[0], later, strict=True))


def test_the_gathered_keys_and_values_are_never_stored():
    length, k, width, kept = 64, 16, 32, []
    q, keys, v = (torch.randn(1, 1, length, width, requires_grad=True) for _ in range(3))
    selected = select_keys("topk", k, q, keys, 1.0, None)

    def note(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        selected_attention(q, keys, v, 1.0, selected, 0.01)
    assert 3 * length * width <= sum(kept) < length * k * width


@pytest.mark.parametrize(("kind", "k"), [("banded", 3), ("block", 3), ("topk", 4)])
@pytest.mark.parametrize("padded", [False, True])
def test_the_plain_path_is_the_fast_one_and_so_are_its_gradients(kind, k, padded):
    qkv, (q, keys, v) = projected(2)
    selected = select_keys(kind, k, q, keys, SCALE, validity(padded))
    mixed = selected_attention(q, keys, v, SCALE, selected, 0.0)
    plain = plain_selected_attention(q, keys, v, SCALE, selected)
    torch.testing.assert_close(plain, mixed, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(mixed)
    gradients = [torch.autograd.grad(out, qkv, cotangent)[0] for out in (mixed, plain)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is ")  # torch's own jvp calls it
def test_the_plain_path_has_forward_derivatives_alone_and_vectorised():
    _, (q, keys, v) = projected(2)
    inputs = tuple(t.detach() for t in (q, keys, v))
    selected = select_keys("topk", 3, q, keys, SCALE, validity(True))

    def mix(*inputs):
        return plain_selected_attention(*inputs, SCALE, selected)

    tangents = tuple(torch.randn(5, *t.shape, dtype=t.dtype) for t in inputs)
    several = torch.func.vmap(lambda *t: torch.func.jvp(mix, inputs, t)[1])(*tangents)
    for i in range(5):
        tangent = tuple(t[i] for t in tangents)
        step = 1e-6
        there, back = (
            mix(*(x + sign * step * t for x, t in zip(inputs, tangent, strict=True))) for sign in (1, -1)
        )
        torch.testing.assert_close(several[i], (there - back) / (2 * step), rtol=1e-6, atol=1e-8)
    batched = torch.func.vmap(mix, randomness="error")(*(torch.stack([t, 2 * t]) for t in inputs))
    torch.testing.assert_close(batched[1], mix(*(2 * t for t in inputs)), rtol=0, atol=1e-12)


def test_the_plain_path_can_be_differentiated_twice():
    inputs = [torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    selected = torch.tensor([[0, 2], [1, -1], [3, 2], [-1, -1]]).expand(1, 2, 4, 2)
    assert torch.autograd.gradgradcheck(lambda *t: plain_selected_attention(*t, SCALE, selected), inputs)


@pytest.mark.device
def test_bfloat16_runs_on_another_device(other_device):
    """CUDA has no kernel for one of its products in bfloat16."""
    draw = torch.Generator().manual_seed(4)
    q, k, v = torch.randn(3, 2, 2, 9, 8, generator=draw).bfloat16().to(other_device)
    selected = torch.rand(2, 2, 9, 9, generator=draw).topk(3, -1).indices.to(other_device)
    mixed = [
        selected_attention(*(t.to(dtype) for t in (q, k, v)), 0.5, selected, 0.0).float().cpu()
        for dtype in (torch.bfloat16, torch.float32)
    ]
    # The scores, the weights and the values are each rounded to 8 bits; scores lie below 8.
    torch.testing.assert_close(*mixed, rtol=0, atol=(8 + 2) * 2**-8 * float(v.abs().max()))


# --- straight-through gradients


ROUNDING = 1e-13  # sums of some dozen products of numbers around 1, in float64


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, g = torch.randn(4, 2, 3, 7, 5, generator=generator, dtype=torch.float64)
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[1, 5:] = False
    return q, k, v, g, valid


def gradients(attend, *leaves, g):
    leaves = [t.clone().requires_grad_() for t in leaves]
    mixed = attend(*leaves)
    return mixed.detach(), *torch.autograd.grad(mixed, leaves, g)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kept", [1, 3, 6])
def test_forward_is_topk_and_the_scores_learn_by_the_softmax_over_all_keys(kept, padded):
    q, k, v, g, valid = drawn()
    valid = valid if padded else None
    selected = select_keys("topk", kept, q, k, SCALE, valid)
    found = gradients(lambda *t: straight_through_attention(*t, SCALE, valid, selected, 0.0), q, k, v, g=g)
    exact = gradients(lambda *t: plain_selected_attention(*t, SCALE, selected), q, k, v, g=g)
    for one, other in ((found[0], exact[0]), (found[3], exact[3])):  # output, and gradient of v
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)

    scores = SCALE * q @ k.mT
    if padded:
        scores.masked_fill_(~valid[:, None, None], -torch.inf)
    p, a = scores.softmax(-1), g @ v.mT
    d_scores = p * (a - (p * a).sum(-1, keepdim=True))  # (diag(p) - p pᵀ) a, written out
    for one, other in ((found[1], SCALE * d_scores @ k), (found[2], SCALE * d_scores.mT @ q)):
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)
    assert (found[1] - exact[1]).abs().max() > 1e-3  # not the derivative of what is computed


def test_a_sample_of_padding_alone_mixes_nothing_and_has_no_gradient():
    q, k, v, g, valid = drawn()
    valid[1] = False
    selected = select_keys("topk", 2, q, k, SCALE, valid)
    found = gradients(lambda *t: straight_through_attention(*t, SCALE, valid, selected, 0.0), q, k, v, g=g)
    assert not any(t[1].any() for t in found)
    assert all(t.isfinite().all() and t[0].any() for t in found)


def test_in_evaluation_the_gradient_is_that_of_topk(tiny_model):
    tokens = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1]])
    torch.manual_seed(0)
    model = Encoder(tiny_model(attention="topk", k=3, dropout=0, score_gradient="straight-through")).double()
    exact = Encoder(tiny_model(attention="topk", k=3, dropout=0)).double().eval()
    exact.load_state_dict(model.state_dict())

    def of(encoder):
        outputs = encoder(tokens)
        return outputs.detach(), torch.autograd.grad(outputs[0, 0], encoder.attention(0).qkv.weight)[0]

    (trained, learning), (output, gradient) = of(model.train()), of(exact)
    torch.testing.assert_close(trained, output, rtol=0, atol=ROUNDING)
    assert (learning - gradient).abs().max() > 1e-6
    for one, other in zip(of(model.eval()), (output, gradient), strict=True):
        assert torch.equal(one, other)
