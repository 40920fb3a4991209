"""Attention by rules, in strips or by FlexAttention, against dense float64 with the keys of sorted scores."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

import semdiag
from semdiag.capturing import kept_keys, masked_attention
from semdiag.capturing.adapters.fused import _over_all
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.choices import SharedChoices, choice_of
from semdiag.capturing.kept_keys import all_kept
from semdiag.capturing.masked_attention import flexible, in_strips, row_thresholds
from semdiag.capturing.rules import RandomK, SkipTiles, TopK, TopP, Window
from semdiag.capturing.sparsify import sparsify
from semdiag_files import InputError

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
THRESHOLDS = [
    TopK(5),
    TopK(3, sinks=1, window=4),
    TopK([1, 2, 0, 7], sinks=1),
    Window(12, sinks=2),
    Window(9),
    TopK(0, sinks=3),
]
RULES = [
    *THRESHOLDS,
    TopK(2, block=4),
    TopK(2, block=4, by="mean"),
    TopK(3, shared="group"),
    TopK(3, shared="layer", sinks=1),
    TopP(0.8),
    RandomK(4, sinks=1, window=2),
]
TABLES = [
    TopP(0.8),
    TopK(2, block=4),
    TopK([1, 2, 0, 7], block=4, sinks=1, window=3),
    TopK(2, block=4, by="mean", shared="group"),
    TopK(2, block=4, shared="layer"),
    TopK(2, block=4, query_block=8),
    TopK(3, query_block=4, shared="layer"),
    SkipTiles(1.0, 6, 4),
]
KINDS = ["causal", "whole", "padded in front", "padded behind", "windowed", "biased", "per head"]


def call_of(kind, length=37, dtype=torch.float32, batch=2):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(batch, heads, length, WIDTH, generator=generator).to(dtype)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    places, own = torch.arange(length), torch.tensor([0, 8])[:batch, None]
    allowed, bias = None, None
    if kind == "padded in front":
        allowed = (places >= own)[:, None, None]
    elif kind == "padded behind":
        allowed = (places < length - own)[:, None, None]
    elif kind == "windowed":
        allowed = ((places[:, None] - places).abs() < 20)[None, None]
    elif kind == "per head":
        allowed = torch.rand(1, HEADS, length, length, generator=generator) < 0.7
        allowed |= torch.eye(length, dtype=torch.bool)
    elif kind == "biased":
        bias = torch.randn(1, HEADS, length, length, generator=generator)
    causal = kind not in ("whole", "padded behind")
    return AttentionCall("", 0, q, k, v, 0.4, allowed, None, None, q, bias=bias, causal=causal)


def dense(call, kept, q, k, v):
    """Attention in float64 over kept keys; queries without any give 0."""
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    z = q @ k.mT * call.scale + (0 if call.bias is None else call.bias)
    weights = z.masked_fill(~kept, -torch.inf).softmax(-1).nan_to_num(0)
    return weights @ v


def keys_by_loops(call, rule):
    """(B, H, Lq, Lk) bool: for every row, a sorted list of its scores."""
    scores, length = call.scores(torch.float64), call.k.shape[2]
    seen = call.part().allowed
    seen = torch.ones(scores.shape, dtype=torch.bool) if seen is None else seen.expand(scores.shape)
    kept = torch.zeros_like(seen)
    counts = rule.k if isinstance(rule.k, list) else [rule.k] * HEADS
    for b in range(len(seen)):
        real = [j for j in range(length) if seen[b, :, :, j].any()]
        for h in range(HEADS):
            for i in range(length):
                keys = [j for j in range(length) if seen[b, h, i, j]]
                before = rule.window - 1
                after = before
                if rule.centred and not call.causal:
                    before, after = rule.window // 2, rule.window - 1 - rule.window // 2
                fixed = [j for j in keys if j in real[: rule.sinks] or -after <= i - j <= before]
                rest = sorted((j for j in keys if j not in fixed), key=lambda j: (-scores[b, h, i, j], j))
                kept[b, h, i, fixed + rest[: counts[h]] or keys] = True
    return kept & seen


def off(mine, exact):
    return float((mine.detach().double() - exact.detach()).abs().max() / exact.detach().abs().max())


@pytest.mark.parametrize(("kind", "at_once"), [("causal", 2**19), *((kind, 300) for kind in KINDS)])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_outputs_and_gradients_of_strips_are_those_of_dense_float64(monkeypatch, rule, kind, at_once):
    """Few scores at a time or all; by loops where a rule ranks scores by itself, else with the call's mask."""
    call = call_of(kind)
    by_itself = isinstance(rule, TopK) and rule.block == 1 and rule.shared == "head"
    chosen = all_kept(choice_of(rule, call))
    kept = keys_by_loops(call, rule) if by_itself else chosen[0] & chosen[1]
    monkeypatch.setattr(kept_keys, "_AT_ONCE", at_once)
    monkeypatch.setattr(kept_keys, "_BAND", (4, 8))
    own = [x.clone().requires_grad_() for x in (call.q, call.k, call.v)]
    found = in_strips(choice_of(rule, call), tuple(own))
    exact = [x.detach().double().requires_grad_() for x in own]
    expected = dense(call, kept, *exact)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    slopes = torch.autograd.grad((found.output * direction).sum(), own)
    exact_slopes = torch.autograd.grad((expected * direction).sum(), exact)
    assert torch.equal(found.number.expand(kept.shape[:3]), kept.sum(-1).int())
    assert off(found.output, expected) < 1e-5  # float32: some 40 terms, each to 6e-8
    for mine, theirs in zip(slopes, exact_slopes, strict=True):
        assert off(mine, theirs) < 2e-5


def evaluated(dynamic):
    """FlexAttention, written out: its functions over all positions, within its blocks alone."""

    def attention(q, k, v, score_mod, blocks, scale, enable_gqa):
        assert isinstance(blocks, BlockMask)
        assert enable_gqa
        k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
        z = q @ k.mT * scale
        with torch.no_grad():
            seen = _over_all(blocks.mask_mod, z.shape, z.device, ()).expand(z.shape)
        size = z.shape[2:]
        inside = blocks.to_dense().bool().repeat_interleave(128, -1).repeat_interleave(128, -2)
        full = BlockMask.from_kv_blocks(blocks.full_kv_num_blocks, blocks.full_kv_indices, BLOCK_SIZE=128)
        full = full.to_dense().bool().repeat_interleave(128, -1).repeat_interleave(128, -2)
        inside, full = (x[..., : size[0], : size[1]] for x in (inside, full))
        assert not (full & ~seen).any()
        if score_mod is not None:
            z = _over_all(score_mod, z.shape, z.device, (), z)
        return z.masked_fill(~(seen & inside), -torch.inf).softmax(-1).nan_to_num(0) @ v

    return attention


@pytest.mark.parametrize(
    ("kind", "length"),
    [*((kind, 37) for kind in KINDS if kind != "windowed"), ("causal", 300), ("padded in front", 300)],
)
@pytest.mark.parametrize("rule", [*THRESHOLDS, *TABLES], ids=repr)
def test_what_flex_attention_is_given_keeps_the_same_keys(monkeypatch, rule, kind, length):
    """Its functions of positions and scores, its blocks, its tables, and the numbers of kept keys."""
    monkeypatch.setattr(masked_attention, "_flex", evaluated)
    call = call_of(kind, length)
    assert choice_of(rule, call).by_threshold != choice_of(rule, call).by_table
    own = [x.clone().requires_grad_() for x in (call.q, call.k, call.v)]
    found, strips = flexible(choice_of(rule, call), tuple(own)), in_strips(choice_of(rule, call), tuple(own))
    assert torch.equal(found.number.expand(strips.number.shape), strips.number)
    torch.testing.assert_close(found.output, strips.output, atol=2e-6, rtol=0)
    direction = torch.randn(call.q.shape, generator=torch.Generator().manual_seed(2))
    for mine, theirs in zip(
        *(torch.autograd.grad((x.output * direction).sum(), own) for x in (found, strips)), strict=True
    ):
        assert off(mine, theirs.double()) < 1e-5


def test_of_equal_scores_a_threshold_keeps_the_first():
    """Scores of 0 and 1: equal ones are told apart by their position, also when computed with another rounding."""
    k = torch.zeros(1, 1, 9, WIDTH)
    k[0, 0, [2, 5, 7], 0] = 1.0
    q = torch.zeros(1, 1, 9, WIDTH)
    q[..., 0] = 1.0
    call = AttentionCall("", 0, q, k, k, 1.0, None, None, None, q)
    for count, kept in ((2, [2, 5]), (3, [2, 5, 7]), (5, [0, 1, 2, 5, 7])):
        rows = row_thresholds(choice_of(TopK(count), call))
        for rounding in (-1e-7, 0.0, 1e-7):
            z, places = call.scores(torch.float32) + rounding, torch.arange(9)
            high, low, place = (x[..., None] for x in rows[:3])
            found = (z >= high) | ((z >= low) & (places <= place))
            assert found[0, 0, 4].nonzero()[:, 0].tolist() == kept
        assert bool(rows.close.all()) is (count != 3)


def test_layers_that_reuse_a_choice_keep_its_keys(monkeypatch):
    monkeypatch.setattr(kept_keys, "_AT_ONCE", 300)
    first, second = call_of("causal"), call_of("causal")
    second = AttentionCall(**{**vars(second), "layer": 1, "q": second.q.flip(3)})
    monkeypatch.setattr(masked_attention, "_flex", evaluated)
    choices, rule = SharedChoices(), TopK(3, shared="layer", every=2)
    kept = all_kept(choice_of(rule, first))[0] & first.part().allowed
    for call in (first, second):
        inputs, choice = (call.q, call.k, call.v), choices.choice(rule, call)
        exact = dense(call, kept, *(x.double() for x in inputs))
        assert off(in_strips(choice, inputs).output, exact) < 1e-5
        assert choice.by_table is (call is second)
        if choice.by_table:
            assert off(flexible(choice, inputs).output, exact) < 1e-5


@pytest.mark.parametrize("rule", [TopK(3, shared="group"), TopK(3, shared="layer"), RandomK(4)], ids=repr)
def test_choices_that_would_need_a_table_of_queries_times_keys_stay_in_strips(rule):
    choice = choice_of(rule, call_of("causal"))
    assert not choice.by_table
    assert not choice.by_threshold


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rule", [TopP(0.8), TopK(2, block=4), TopK(2, block=4, query_block=8)], ids=repr)
def test_torchs_own_flex_attention_gives_what_strips_give(monkeypatch, rule):
    """Uncompiled, as torch writes it out."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(masked_attention, "_flex", lambda dynamic: uncompiled)

    def uncompiled(q, k, v, score_mod, blocks, scale, enable_gqa):
        return flex_attention(q, k, v, score_mod, blocks, scale, enable_gqa)

    call = call_of("padded in front", 150)
    inputs = call.q, call.k, call.v
    found, strips = (attend(choice_of(rule, call), inputs) for attend in (flexible, in_strips))
    assert torch.equal(found.number.expand(strips.number.shape), strips.number)
    torch.testing.assert_close(found.output, strips.output, atol=2e-6, rtol=0)


# --------------------------------------------------------------------------------------------- in a model


class Attending(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.map, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), dropout

    def forward(self, x, mask=None):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.map(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, mask is None)
        return mixed.transpose(1, 2).flatten(2)


def seeded(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Attending(**options), torch.randn(2, 30, WIDTH)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_runs_in_strips_and_gives_what_a_mask_gives(autocast):
    """With a capture around, its mask is a tensor, which the capture sees; without, there is none."""
    model, x = seeded()
    with torch.autocast("cpu", enabled=autocast):
        with sparsify(model, TopK(3)) as masked:
            output = model(x)
            output.float().square().sum().backward()
        slope, model.map.weight.grad = model.map.weight.grad, None
        with semdiag.capture(model), sparsify(model, TopK(3)):
            expected = model(x)
            expected.float().square().sum().backward()
    assert output.dtype == expected.dtype
    unit = 2**-8 if autocast else 2**-24
    torch.testing.assert_close(output, expected, atol=8 * unit, rtol=8 * unit)
    torch.testing.assert_close(slope, model.map.weight.grad, atol=64 * unit, rtol=64 * unit)
    assert not masked.audit.remarks
    assert masked.kept["most"].max() == 3


PLACES = torch.arange(12)
BACK = PLACES[:, None] - PLACES
EMPTY = {
    "own key hidden": BACK != 0,
    "strided": (BACK >= 0) & (BACK % 4 == 0) & ((BACK > 0) | (PLACES[:, None] < 4)),
    "only the first key": (PLACES == 0).expand(12, 12),
    "far keys": BACK.abs() > 2,
    "causal": BACK >= 0,
}


class ByMask(nn.Module):
    """Attention under a mask of its own, fused or by hand, over texts of which the second is shorter."""

    def __init__(self, seen, fused):
        super().__init__()
        self.map, self.seen, self.fused = nn.Linear(WIDTH, 3 * WIDTH), seen, fused

    def forward(self, x, padding_mask, kept=True):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.map(x).chunk(3, -1))
        seen = self.seen & padding_mask[:, None, None] & kept
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, seen)
        return (q @ k.mT / 2).masked_fill(~seen, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rule", [Window(1), Window(3), Window(2, sinks=1), TopK(0, sinks=2), TopK(1)], ids=repr)
@pytest.mark.parametrize("name", EMPTY)
def test_rows_whose_keys_are_all_outside_a_window_keep_all_and_are_counted(name, rule, fused):
    """They kept all in silence; the count leaves padding out."""
    seen, real = EMPTY[name], torch.arange(12) < torch.tensor([[12], [9]])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = ByMask(seen, fused).double(), torch.randn(2, 12, WIDTH, dtype=torch.float64)
    kept, bare = torch.zeros(2, 2, 12, 12, dtype=torch.bool), 0
    q, k, _ = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in model.map(x).chunk(3, -1))
    scores, later = q @ k.mT, bool((seen & (BACK < 0)).any())
    before = rule.window // 2 if later else rule.window - 1
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(12)).tolist():
        keys = [j for j in range(12) if seen[i, j] and real[b, j]]
        first = [j for j in range(12) if seen[:, j].any() and real[b, j]][: rule.sinks]
        fixed = [j for j in keys if j in first or (-(rule.window - 1 - before) <= i - j <= before and rule.window)]
        free = sorted((j for j in keys if j not in fixed), key=lambda j: -scores[b, h, i, j])
        some = fixed + free[: rule.k]
        bare += bool(keys) and not some and bool(real[b, i])
        kept[b, h, i, some or keys] = True
    with sparsify(model, rule) as masked:
        found = model(x, real)
    exact = model(x, real, kept)
    there = kept.any(-1) & real[:, None]
    assert (found - exact)[there].abs().max() < 1e-12
    texts = [remark.text for remark in masked.audit.remarks if "none of their keys" in remark.text]
    assert [int(text.split()[0]) for text in texts] == [bare] * (bare > 0)
    if name == "only the first key" and rule == Window(1):
        assert bare == 2 * (11 + 8)
    if name == "causal" or rule.k:
        assert bare == 0


def test_a_mask_that_must_be_a_tensor_is_told_of():
    model, x = seeded(dropout=0.5)
    with sparsify(model, TopK(3)) as masked:
        model(x)
    (text,) = (remark.text for remark in masked.audit.remarks if "mask" in remark.text)
    assert text == "its mask is a tensor of queries × keys: it drops weights at random"
    model, x = seeded()
    bias = torch.zeros(30, 30, requires_grad=True)
    with sparsify(model, TopK(3)):
        model(x, bias).sum().backward()  # a learned term gets its gradient
    assert bias.grad is not None


def test_a_mask_that_does_not_fit_is_refused_with_the_length_that_does(monkeypatch):
    monkeypatch.setattr(masked_attention, "_LARGE", 0)
    monkeypatch.setattr(masked_attention, "free_memory", lambda device: 100 * 2 * 2 * 6 * 200)
    model, x = seeded(dropout=0.5)
    with (
        pytest.raises(InputError, match=r"takes 0.0 GiB, .* are free: about 128 tokens would fit"),
        sparsify(model, TopK(3)),
    ):
        model(torch.randn(2, 300, WIDTH))
    with sparsify(model, TopK(3)):
        model(x)


def test_memory_that_runs_out_in_a_masked_forward_is_bad_input(monkeypatch):
    def full(choice, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(masked_attention, "in_strips", full)
    model, x = seeded()
    message = r"needs more memory: CUDA out of memory\. Take shorter inputs"
    with pytest.raises(InputError, match=message), sparsify(model, TopK(3)):
        model(x)


def test_a_kernel_that_does_not_compile_leaves_strips(monkeypatch):
    monkeypatch.setattr(masked_attention, "FAILED", [])
    monkeypatch.setattr(masked_attention, "fits_flex", lambda choice, inputs: len(masked_attention.FAILED) < 2)
    tried = []

    def broken(dynamic):
        tried.append(dynamic)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(masked_attention, "_flex", broken)
    model, x = seeded()
    with sparsify(model, TopK(3)) as masked:
        model(x)
        model(x)
    assert tried == [True, False]
    assert [remark.text for remark in masked.audit.remarks] == [
        "FlexAttention was not used (RuntimeError: no compiler)"
    ]


MEMORY = """
import resource, sys, torch
from semdiag.capturing.choices import choice_of
from semdiag.capturing.rules import TopK, Window
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.masked_attention import in_strips
torch.set_num_threads(1)
q = torch.randn(1, 8, 4096, 16, requires_grad=True)
call = AttentionCall("", 0, q.detach(), q.detach(), q.detach(), 0.3, None, None, None, q.detach(), causal=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for rule in (TopK(32), Window(64, sinks=4)):
    in_strips(choice_of(rule, call), (q, q, q)).output.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_four_thousand_tokens_need_no_tensor_of_queries_times_keys():
    """A mask of 8 heads has 128 MiB, its scores 512: forwards and backwards in strips need a part of that."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 100
