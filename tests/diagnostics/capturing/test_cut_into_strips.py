"""What is computed in strips, where strips are so small that samples, heads, queries and keys are cut.

Masks and models are compared with loops in float64; sums with themselves in one strip, which other tests compare
with loops.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from semdiag import RandomK, TopK, TopP, Window, sparsify, tiles
from semdiag.capturing import call_strips, kept_keys, masked_attention
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.choices import choice_of
from semdiag.measuring import outputs
from semdiag.measuring.calls import counted_rows, residual
from semdiag.questions.k_sweep import budgets
from semdiag.questions.overlap import measure as overlap

sys.path.append(str(Path(__file__).parents[2] / "capture_oracle"))
from dense_masks import DenseMask

SAMPLES, HEADS, LENGTH, WIDTH = 5, 4, 11, 12
ONE_SAMPLE = HEADS * LENGTH**2
RULES = [
    TopK(3),
    TopK([1, 2, 3, 12]),
    TopK(2, sinks=1, window=2),
    TopK(2, block=3),
    TopK(3, shared="layer"),
    TopK(2, sinks=2, window=3, shared="layer"),
    TopK(1, block=3, sinks=1, window=2, shared="layer"),
    TopP(0.7),
    Window(3),
    Window(4, sinks=2),
    TopK(0, sinks=2),
    RandomK(3),
    RandomK(2, sinks=1, window=2),
]


class ByHand(nn.Module):
    """Attention as nanoGPT writes it; padded texts, if lengths are given."""

    def __init__(self, lengths=None, causal=True):
        super().__init__()
        self.map, self.lengths, self.causal = nn.Linear(WIDTH, 3 * WIDTH), lengths, causal

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.map(x).chunk(3, -1))
        scores = q @ k.mT / (WIDTH // HEADS) ** 0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        if self.lengths is not None:
            scores = scores.masked_fill(torch.arange(LENGTH) >= self.lengths[:, None, None, None], -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def by_hand(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ByHand(**options).double(), torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64)


def answers(model, x):
    """Outputs and the gradient of a sum of their squares."""
    output = model(x)
    return output.detach(), torch.autograd.grad(output.square().sum(), model.map.weight)[0]


@pytest.mark.parametrize("at_once", [1, 3 * LENGTH, 2 * ONE_SAMPLE // HEADS, 2 * ONE_SAMPLE])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_model_by_hand_under_a_mask_is_that_of_loops_wherever_strips_end(monkeypatch, rule, padded, at_once):
    """Strips of one row, of some rows of a head, of two samples of a head, and of two of five samples."""
    model, x = by_hand(lengths=torch.tensor([11, 7, 9, 11, 5]) if padded else None)
    with DenseMask(rule, HEADS, HEADS).installed():
        output, slope = answers(model, x)
    monkeypatch.setattr(kept_keys, "_AT_ONCE", at_once)
    with sparsify(model, rule):
        mine, my_slope = answers(model, x)
    torch.testing.assert_close(mine, output, atol=1e-12, rtol=0)
    torch.testing.assert_close(my_slope, slope, atol=1e-10, rtol=0)


def test_strips_end_within_samples_heads_and_queries(monkeypatch):
    """The sizes above do cut: else the test says nothing."""
    q = torch.randn(SAMPLES, HEADS, LENGTH, 3)
    call = AttentionCall("", 0, q, q, q, 1.0, None, None, None, q, causal=True)
    found = {}
    for at_once in (3 * LENGTH, 2 * ONE_SAMPLE // HEADS, 2 * ONE_SAMPLE):
        monkeypatch.setattr(kept_keys, "_AT_ONCE", at_once)
        for name, rule in (("scores", TopK(3)), ("draws", RandomK(3)), ("places", Window(3))):
            for strip in choice_of(rule, call).strips():
                sizes = [part.stop - part.start for part in (strip.samples, strip.heads, strip.queries)]
                found.setdefault(name, set()).add(tuple(sizes))
    for name in ("scores", "places"):
        assert any(1 < samples < SAMPLES for samples, _, _ in found[name])
    assert any(1 < samples < SAMPLES and heads == 1 for samples, heads, _ in found["draws"])
    for sizes in found.values():
        assert any(queries < LENGTH for _, _, queries in sizes)
    assert any(heads < HEADS for _, heads, _ in found["scores"])


def call_of(causal=True, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, 19, 8, generator=generator, dtype=dtype) for heads in (4, 2, 2))
    lengths = torch.tensor([19, 12, 16])
    hidden = torch.rand(3, 1, 19, 19, generator=generator) < 0.2
    allowed = (torch.arange(19) < lengths[:, None, None, None]) & (~hidden | torch.eye(19).bool())
    real = torch.arange(19) < lengths[:, None]
    return AttentionCall("layer", 0, q, k, v, 0.6, allowed, real, None, q, causal=causal)


def budgets_of(call):
    needed = budgets.NeededKeys()
    needed.add(call)
    return [torch.from_numpy(x) for x in (*needed.counts.values(), *needed.ranked.values())]


def answers_of(call):
    classes = call.q.flatten(1, 2)
    one, two = (
        outputs.Answers(x, True, None, torch.ones(x.shape[:2]).bool()) for x in (classes, classes.roll(1, 1))
    )
    return [*outputs.position_terms(one, two).values(), outputs.output_change(one, two)]


def overlaps_of(call):
    masks = call.part().allowed[0] & (torch.rand(8, 19, 19, generator=torch.Generator().manual_seed(0)) < 0.5)
    sizes, seen = masks.sum(-1), torch.ones(1, 19, 19).bool()
    table = overlap._pairs(masks, sizes, seen, [0] * 8, [(0, head) for head in range(8)])
    return [torch.tensor(table[name].tolist()) for name in ("queries", "jaccard")]


CUTS = {
    "keys that padding leaves": (counted_rows, "_STRIP", lambda call: [counted_rows.attended_keys(call)]),
    "numbers of keys": (call_strips, "AT_ONCE_ELSEWHERE", lambda call: [call_strips.number_of_keys(call)]),
    "keys that queries see": (
        call_strips,
        "AT_ONCE_ELSEWHERE",
        lambda call: [call_strips.query_reach(call).real, torch.tensor(call_strips.query_reach(call).later)],
    ),
    "residual": (
        residual,
        "_CACHED",
        lambda call: [residual.residual_numbers(call, torch.Generator().manual_seed(0))],
    ),
    "budgets": (budgets, "_AT_ONCE", budgets_of),
    "changes of outputs": (outputs, "_AT_ONCE", answers_of),
    "overlap": (overlap, "_ENTRIES", overlaps_of),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("at_once", [1, 200, 3000])
@pytest.mark.parametrize("name", CUTS)
def test_sums_do_not_depend_on_where_strips_end(monkeypatch, name, at_once, causal):
    module, constant, compute = CUTS[name]
    call = call_of(causal)
    whole = compute(call)
    monkeypatch.setattr(module, constant, at_once)
    for one, other in zip(compute(call), whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12, equal_nan=True)


@pytest.mark.parametrize("rule", [TopK(3), Window(6), TopK(2, block=4), TopK(2, block=4, query_block=8)], ids=repr)
def test_what_flex_attention_is_given_does_not_depend_on_where_strips_end(monkeypatch, rule):
    """Layouts are made for 128 queries at least: 300 of them are cut in three."""
    q = torch.randn(2, 2, 300, 4, generator=torch.Generator().manual_seed(0))
    allowed = (torch.arange(300) >= torch.tensor([0, 130])[:, None])[:, None, None]
    call = AttentionCall("", 0, q, q, q, 0.5, allowed, None, None, q, causal=True)

    def layout():
        choice = choice_of(rule, call)
        number, bare, blocks = masked_attention._layout(choice, choice.table() if choice.by_table else None)
        return number, bare, blocks.to_dense(), blocks.full_kv_num_blocks

    whole = layout()
    monkeypatch.setattr(masked_attention, "_AT_ONCE", 1)
    monkeypatch.setattr(kept_keys, "_AT_ONCE", 1000)
    for one, other in zip(layout(), whole, strict=True):
        assert torch.equal(one, other)


def test_what_tiles_keep_does_not_depend_on_where_strips_end(monkeypatch):
    model, x = by_hand(lengths=torch.tensor([11, 7, 9, 11, 5]))
    kinds = ["tile-4x3", "tile-4x3-mean", "skip-0.3-4x3"]
    whole = tiles(model, x, kinds, k=3)
    numbers = whole.select_dtypes("float64").to_numpy()
    for at_once in (1, 3 * LENGTH, 2 * ONE_SAMPLE):
        monkeypatch.setattr(kept_keys, "_AT_ONCE", at_once)
        found = tiles(model, x, kinds, k=3).select_dtypes("float64").to_numpy()
        assert numbers == pytest.approx(found, abs=1e-12, nan_ok=True)
