"""Which scores are the largest, against loops; masks are the same however few scores are held at a time."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag.capturing import call_strips
from semdiag.capturing import kept_keys as module
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.choices import choice_of, heaviest
from semdiag.capturing.kept_keys import all_kept
from semdiag.capturing.rules import RandomK, TopK, TopP, Window
from semdiag.questions.k_sweep.budgets import rule_of

SCORES = st.sampled_from([-math.inf, -3e38, -1.0, -0.0, 0.0, 0.5, 1.0, 1.0 + 2**-23, 3e38])


def largest(row, k):
    """The first k of the scores in falling order, of equal ones the first; what is hidden is none."""
    order = sorted(range(len(row)), key=lambda j: (-row[j], j))
    return {j for j in order[:k] if row[j] > -math.inf}


@pytest.mark.slow
@pytest.mark.parametrize("sorted_up_to", [0, 512])
@given(rows=st.lists(st.lists(SCORES, min_size=7, max_size=7), min_size=2, max_size=6), k=st.integers(0, 9))
def test_the_largest_scores_are_those_of_a_loop(sorted_up_to, rows, k):
    values = torch.tensor(rows)[None, None]
    before = call_strips._SORTED
    call_strips._SORTED = sorted_up_to
    try:
        kept = call_strips.mark_largest(values, torch.tensor([[[k]]]))[0, 0]
    finally:
        call_strips._SORTED = before
    for row, found in zip(values[0, 0].tolist(), kept, strict=True):
        assert set(found.nonzero().flatten().tolist()) == largest(row, k)


def test_each_head_keeps_its_own_number():
    values = torch.tensor([3.0, 1.0, 2.0, 2.0]).expand(1, 3, 1, 4)
    kept = call_strips.mark_largest(values, torch.tensor([0, 2, 9])[:, None, None])[0, :, 0]
    assert kept.int().tolist() == [[0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]]


def test_a_score_that_is_no_number_counts_as_the_largest():
    values = torch.tensor([[[[0.0, torch.nan, 2.0], [torch.nan, torch.nan, 1.0]]]])
    for k in (1, 2):
        kept = call_strips.mark_largest(values, torch.tensor([[[k]]]))
        assert kept[..., 0, 1].all()
        assert kept.sum(-1).eq(k).all()


def call_of(padded):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, heads, 11, 4, generator=generator) for heads in (4, 2))
    allowed = None
    if padded:
        allowed = (torch.arange(11) < torch.tensor([11, 6, 9])[:, None])[:, None, None]
    return AttentionCall("", 0, q, k, k, 1.0, allowed, None, None, q, causal=True)


def kept_keys(rule, call):
    return all_kept(choice_of(rule, call))


RULES = [
    TopK(3),
    TopK([1, 2, 3, 12]),
    TopK(2, sinks=1, window=2),
    TopK(3, shared="group"),
    TopK(3, shared="layer"),
    TopK(2, block=3, by="mean"),
    TopP(0.7),
    Window(2, sinks=1),
    RandomK(3),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("k", [5, 6, 8])
@pytest.mark.parametrize("rule", [lambda k: rule_of("window", k, 0), lambda k: Window(k, sinks=4)])
def test_a_window_of_k_keys_holds_no_more_of_them_in_any_model(k, causal, rule):
    """Without a causal mask it reached as far to both sides, and in Python it kept its sinks beside k others."""
    q = torch.randn(2, 3, 20, 4, generator=torch.Generator().manual_seed(0))
    call = AttentionCall("", 0, q, q, q, 1.0, None, None, None, q, causal=causal)
    kept, _ = kept_keys(rule(k), call)
    wide = k - 4
    for query in range(20):
        first = query - wide + 1 if causal else query - wide // 2
        near = {*range(4), *range(first, first + wide)} & {*range(20)}
        expected = {key for key in near if key <= query or not causal}
        assert set(kept[1, 2, query].nonzero()[:, 0].tolist()) == expected
        assert len(expected) == min(k, query + 1) if causal else len(expected) <= k


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("at_once", [1, 100, 500, 1000])
def test_masks_do_not_depend_on_how_many_scores_are_held(monkeypatch, rule, padded, at_once):
    """One query at a time, two, one or two samples; products of fewer rows round by less than scores differ."""
    whole = kept_keys(rule, call_of(padded))
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    for one, other in zip(kept_keys(rule, call_of(padded)), whole, strict=True):
        assert one.shape == (3, 4, 11, 11)
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not isinstance(rule, RandomK)], ids=repr)
def test_masks_of_a_text_do_not_depend_on_padding_in_front_of_it(rule):
    """Blocks were counted from the first column: what they keep hung on the longest text of the batch."""
    call, length = call_of(padded=False), 7
    alone = replace(call, **{name: getattr(call, name)[:, :, -length:] for name in ("q", "k", "v", "mixed")})
    real = torch.arange(11) >= torch.tensor([11 - length, 0, 11 - length])[:, None]
    behind = replace(call, allowed=real[:, None, None])
    expected, _ = kept_keys(rule, alone)
    kept, _ = kept_keys(rule, behind)
    for sample in (0, 2):
        assert torch.equal(kept[sample, :, -length:, -length:], expected[sample])
        assert not kept[sample, :, -length:, :-length].any()
    assert torch.equal(kept[1], kept_keys(rule, call)[0][1])


def test_heads_that_share_their_keys_are_averaged_with_the_weight_that_their_sinks_leave():
    """The first head has nearly all of its weight on its sink: by weight the second decides."""
    k = torch.eye(3)[None, None].expand(1, 2, 3, 3)
    q = torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]])[None, :, None]
    call = AttentionCall("", 0, q, k, k, 1.0, None, None, None, q, sinks=torch.tensor([20.0, -20.0]))
    assert kept_keys(TopK(1, shared="layer"), call)[0][0, 0].tolist() == [[False, True, False]]
    without = replace(call, sinks=None)
    assert kept_keys(TopK(1, shared="layer"), without)[0][0, 0].tolist() == [[True, False, False]]


@pytest.mark.parametrize("p", [0.3, 0.9, 1 - 2**-20, 1 - 2**-30, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_share_of_the_weight_is_that_of_exact_sums(dtype, p):
    """Of some thousand keys a share of 1 dropped a quarter: sums in float32 reached 1 before the last."""
    scores = 3 * torch.randn(4, 1000, generator=torch.Generator().manual_seed(0), dtype=dtype)
    scores[3, 500:] = -torch.inf
    scores = scores.sort(-1, descending=True).values
    for row, found in zip(scores.double().tolist(), heaviest(scores, p), strict=True):
        weights = [math.exp(score - row[0]) for score in row]
        whole, held, count = math.fsum(weights), 0.0, 0
        while count < len(row) and weights[count] and held < p * whole:
            count += 1
            held = math.fsum(weights[:count])
        assert found.nonzero()[:, 0].tolist() == list(range(int(found.sum())))
        assert abs(int(found.sum()) - count) <= (p > 1 - 2**-25)  # the sums of two keys are within rounding there


def test_a_share_of_one_drops_no_key_at_any_length():
    q = 4 * torch.randn(1, 2, 700, 4, generator=torch.Generator().manual_seed(0))
    call = AttentionCall("", 0, q, q, q, 3.0, None, None, None, q)
    assert kept_keys(TopP(1.0), call) is None
