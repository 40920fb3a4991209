"""Rows in a number format: torch's casts and loops as reference, what is not covered, certified rows hunted."""

import math

import numpy as np
import pytest
import torch

from semdiag.capturing.attention_call import AttentionCall
from semdiag.mathematics.rounding import FORMATS
from semdiag.questions.mask_precision import measure as module
from semdiag.questions.mask_precision.measure import BEYOND, OTHER_KEYS, rounded_rows
from semdiag.questions.mask_stability.mask_rows import selection_of

NAMES = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
KINDS = [FORMATS[name] for name in NAMES]
FULL = selection_of("full")
COLUMNS = ("covered", "changed", "tied", "certified")


def call_of(q, k, **more):
    """An attention call with these queries and keys (B, H, L, D)."""
    default = {"scale": 0.5, "allowed": None, "queries": None, "selected": None}
    return AttentionCall(module="", layer=0, q=q, k=k, v=k, mixed=torch.zeros_like(q), **{**default, **more})


def drawn(seed=0, heads=4, key_heads=2, length=12, width=8, size=1.5, dtype=torch.float32):
    """Queries (3, heads, length, width) and keys (3, key_heads, length, width)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (3, heads, length, width), (3, key_heads, length, width)
    return [size * torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def cast(x, kind):
    """Round by torch's own cast, after clamping to the largest finite number, which torch does not do."""
    return x.clamp(-kind.largest, kind.largest).to(getattr(torch, kind.name)).double()


def naive_row(z, later, kept, sign):
    """Of signed scores: whether the set changes and ties, and the weight lost if ties keep what they can."""
    order = sorted(z, key=lambda j: -z[j])
    before = set(order[:kept])
    ranked = sorted(later.values(), reverse=True)
    line, sure = ranked[kept - 1], {j for j in later if later[j] > ranked[kept - 1]}
    level = sorted((j for j in later if later[j] == line), key=lambda j: (j not in before, -z[j]))
    after = sure | set(level[: kept - len(sure)])
    weights = {j: math.exp(sign * value) for j, value in z.items()}
    lost = sum(weights[j] for j in before - after) - sum(weights[j] for j in after - before)
    return after != before, ranked[kept - 1] == ranked[kept], lost / sum(weights.values())


@pytest.mark.slow
@pytest.mark.parametrize("strip", [None, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_rows_are_as_defined(sign, causal, strip, monkeypatch):
    if strip:
        monkeypatch.setattr(module, "_STRIP", strip)
    # Multiples of 2⁻⁶ below 16: float32 holds every sum of 8 products, in whatever order it is added.
    q, k = ((64 * x).round() / 64 for x in drawn())
    q[..., 4:], k[..., 4:] = q[..., :4], k[..., 4:] / 8 - k[..., :4]  # half of each product cancels
    k = (64 * k).round() / 64
    assert max(q.abs().max(), k.abs().max()) < 16
    padded = torch.ones(3, 1, 1, 12, dtype=torch.bool)
    padded[1, ..., 9:] = False
    call = call_of(q, k, allowed=padded, queries=padded[:, 0, 0], causal=causal)
    found = rounded_rows(call, 3, selection_of("full" if sign > 0 else "bottomk"), KINDS)
    assert found.why == ""
    seen = 0
    for at, kind in enumerate(KINDS):
        for b, h, i in np.ndindex(3, 4, 12):
            keys = [j for j in range(12) if padded[b, 0, 0, j] and (j <= i or not causal)]
            assert found.keys[b, h, i] == len(keys)
            counts = bool(padded[b, 0, 0, i]) and len(keys) > 3
            assert found.counted[b, h, i] == counts
            assert found.covered[at, b, h, i] == counts
            if not counts:
                assert not any(getattr(found, name)[at, b, h, i] for name in COLUMNS)
                assert found.lost[at, b, h, i].isnan()
                continue
            row, own = q[b, h, i].double(), k[b, h // 2].double()
            z = {j: sign * 0.5 * float(row @ own[j]) for j in keys}
            sums = cast(row, kind).float() @ cast(own, kind).float().T
            later = {j: float(cast(sign * 0.5 * sums[j], kind)) for j in keys}
            changed, tied, lost = naive_row(z, later, 3, sign)
            assert (found.changed[at, b, h, i], found.tied[at, b, h, i]) == (changed, tied)
            seen += changed
            if sign > 0 and changed:  # 1e-12: sums of weights below 1, in float64
                assert found.lost[at, b, h, i] == pytest.approx(lost, abs=1e-12)
                assert lost >= 0
            assert found.lost[at, b, h, i].isnan() == (not changed)
    assert seen > 10


def test_a_row_by_hand():
    """One of two keys in e4m3, whose steps at 1 are 1/8; errors are about 3/16 at 1 and 6 at 30."""
    q = torch.ones(1, 1, 4, 1)
    keys = torch.tensor([[1.05, 1.2], [1.06, 1.05], [1.0, 1.0625], [30.0, 1.0]])
    answers = []
    for row in keys:
        found = rounded_rows(call_of(q, row.view(1, 1, 2, 1), scale=1.0), 1, FULL, [FORMATS["float8_e4m3fn"]])
        answers.append([bool(getattr(found, name)[0, 0, 0, 0]) for name in COLUMNS])
    assert answers == [
        [True, False, False, False],  # 1 and 1.25
        [True, False, True, False],  # both 1
        [True, False, True, False],  # 1.0625 is half a step above 1, and goes to the even 1
        [True, False, False, True],  # 30 and 1
    ]


def test_the_weight_lost_by_hand():
    """In e4m3 1.06 becomes 1 and 1.07 becomes 1.125: 3.18 against 3.17 becomes 3 against 3.25."""
    k = torch.tensor([[[[1.06] * 3, [1.07, 1.07, 1.03], [0.0] * 3]]])
    found = rounded_rows(call_of(torch.ones(1, 1, 1, 3), k, scale=1.0), 1, FULL, KINDS)
    assert found.changed.flatten().tolist() == [False, False, True, False]  # in e5m2 both become 3
    assert found.tied.flatten().tolist() == [False, False, False, True]
    lost = (math.exp(3.18) - math.exp(3.17)) / (math.exp(3.18) + math.exp(3.17) + 1)
    # The keys are float32 numbers: each score is off by at most 3 · 2⁻²⁴ · 1.07, each weight by half of that.
    assert found.lost[2].item() == pytest.approx(lost, abs=4 * 2.0**-24)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"softcap": 20.0}, "scores that are capped"),
        ({"sinks": torch.zeros(4)}, "a softmax with attention sinks"),
        ({"bias": torch.full((1, 1, 12, 12), 0.1)}, "scores with a bias"),
        ({"bias": torch.eye(12)[None, None]}, "scores with a bias"),
        ({"scale": 2.0**-130}, BEYOND),
        ({"scale": math.nan}, BEYOND),
    ],
)
def test_a_call_that_the_error_model_does_not_cover_has_counts_alone(more, why):
    found = rounded_rows(call_of(*drawn(), **more), 3, FULL, KINDS)
    assert found.why == why
    assert found.counted.all()
    assert not any(getattr(found, name).any() for name in COLUMNS)
    assert found.lost.isnan().all()


def test_a_bias_of_zeros_is_none():
    call, with_zeros = (call_of(*drawn(), **more) for more in ({}, {"bias": torch.zeros(1, 1, 1, 12)}))
    for name in COLUMNS:
        ours, theirs = (getattr(rounded_rows(c, 3, FULL, KINDS), name) for c in (call, with_zeros))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_a_row_with_a_number_that_is_none_is_not_covered_and_the_others_are(bad):
    q, k = drawn()
    allowed = torch.ones(1, 1, 1, 12, dtype=torch.bool)
    k[1, 0, 11, 0], allowed[..., 11] = bad, False  # a key that is forbidden does no harm
    clean = rounded_rows(call_of(q, k, allowed=allowed), 3, FULL, KINDS)
    assert (clean.why, bool(clean.covered.all())) == ("", True)
    q[0, 1, 5, 2] = bad
    found = rounded_rows(call_of(q, k, allowed=allowed), 3, FULL, KINDS)
    others = torch.ones(3, 4, 12, dtype=torch.bool)
    others[0, 1, 5] = False
    assert found.why == BEYOND
    assert torch.equal(found.counted, clean.counted)
    for name in COLUMNS:
        assert torch.equal(getattr(found, name), getattr(clean, name) & others)


def test_keys_that_the_scores_do_not_choose_are_not_covered():
    q, k = drawn(key_heads=4)
    best = (q.double() @ k.double().mT).topk(3, -1).indices
    worst = (q.double() @ k.double().mT).topk(3, -1, largest=False).indices
    mixed = torch.where(torch.arange(12)[:, None] < 5, worst, best)
    own = selection_of("topk")
    found = rounded_rows(call_of(q, k, selected=mixed), 9, own, KINDS)
    assert (found.set_size, found.why) == (3, OTHER_KEYS)
    assert found.covered[..., 5:].all()
    assert not found.covered[..., :5].any()
    assert not any(getattr(found, name)[..., :5].any() for name in COLUMNS)
    alone = rounded_rows(call_of(q, k), 3, FULL, KINDS)
    for name in COLUMNS:
        assert torch.equal(getattr(alone, name)[..., 5:], getattr(found, name)[..., 5:])


def engines(q, k, scale, kind, seed):
    """Scores as engines of the error model have them: sums in several orders, and scores left in float32."""
    q, k = cast(q, kind).float(), cast(k, kind).float()
    products = (q[..., :, None, :] * k[..., None, :, :]).numpy()
    order = np.random.default_rng(seed).permutation(q.shape[-1])
    one_after_the_other = np.add.accumulate(products[..., order], -1, dtype=np.float32)[..., -1]
    halves = products[..., ::2].sum(-1, dtype=np.float32) + products[..., 1::2].sum(-1, dtype=np.float32)
    for sums in (one_after_the_other, halves, (q @ k.mT).numpy()):
        scaled = torch.from_numpy(sums) * torch.tensor(scale, dtype=torch.float32)
        yield cast(scaled, kind)
        yield scaled.double()


@pytest.mark.parametrize("size", [0.05, 1.0, 1.5, 8.0])
@pytest.mark.parametrize("which", ["apart", "near ties", "boundaries"])
def test_no_engine_of_the_error_model_changes_a_certified_row(which, size):
    """A theorem, so 0 is exact. Each case certifies some rows of some format, or none, where all nearly tie."""
    certified = changed = 0
    for seed in range(4):
        q, k = drawn(seed, key_heads=4, length=16, size=size, dtype=torch.float64)
        for at, kind in enumerate(KINDS):
            if which == "near ties":
                k = k[:, :, :1] * (1 + 2.0**-kind.digits * torch.randn(k.shape, dtype=torch.float64).sign())
            if which == "boundaries":
                q, k = (cast(x, kind) * (1 + 2.0**-kind.digits) for x in (q, k))
            call = call_of(q.float(), k.float(), scale=8**-0.5, causal=True)
            found = rounded_rows(call, 4, FULL, KINDS)
            rows = found.certified[at]
            certified, changed = certified + int(rows.sum()), changed + int(found.changed[at].sum())
            later = torch.ones(16, 16, dtype=torch.bool).triu(1)
            exact = (8**-0.5 * call.q.double() @ call.k.double().mT).masked_fill(later, -torch.inf)
            kept = torch.zeros_like(exact, dtype=torch.bool).scatter_(-1, exact.topk(4, -1).indices, True)
            for scores in engines(call.q, call.k, 8**-0.5, kind, seed):
                lowest = scores.masked_fill(~kept, torch.inf).amin(-1)
                highest = scores.masked_fill(kept | later, -torch.inf).amax(-1)
                assert (lowest > highest)[rows].all()
    assert certified > 0 or which == "near ties"
    assert changed > 0 or size == 8.0


def test_a_broken_certificate_would_be_seen(monkeypatch):
    monkeypatch.setattr(module, "survives_rounding", lambda scores, *_: torch.ones(scores.shape[:-1]).bool())
    found = rounded_rows(call_of(*drawn()), 3, FULL, KINDS)
    assert (found.certified & (found.changed | found.tied)).any()
