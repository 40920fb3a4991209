"""Every kind of sparse attention, against models whose attention chooses its keys by loops, in float64.

The reference is an attention function of its own, registered with transformers: it shares neither the mechanisms
nor the choice of keys with what is tested. Seeds are fixed.
"""

import math

import pytest
import torch

from semdiag import RandomK, TopK, TopP, sparsify
from semdiag.questions.k_sweep.budgets import KINDS, check_kinds, masks_of, rule_of
from semdiag_files import InputError

transformers = pytest.importorskip("transformers")
from transformers.masking_utils import AttentionMaskInterface, eager_mask  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402

WORDS, LENGTH, WIDTH = 31, 14, 32
SHAPE = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4}
BART = {"vocab_size": WORDS, "d_model": WIDTH, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 1}
BART |= {
    f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4))
}
MODELS = {
    "causal, grouped": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "sliding window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SHAPE, sliding_window=5)
    ),
    "encoder and decoder": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(**BART, init_std=0.4)
    ),
}
TOLERANCE = 1e-10  # relative, float64: sums in another order, over three layers


def inputs(name):
    ids = torch.randint(4, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return (
        {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
        if name == "encoder and decoder"
        else {"input_ids": ids}
    )


def top(count, values):
    """Positions of the largest values that are not None; of equal ones the first."""
    return set(sorted((j for j, x in enumerate(values) if x is not None), key=lambda j: (-values[j], j))[:count])


def blocks(values, block, by):
    """One number for each block; None where all of it is hidden."""
    found = []
    for at in range(0, len(values), block):
        some = [x for x in values[at : at + block] if x is not None]
        mean = {"best": max, "mean": lambda xs: sum(xs) / len(xs), "weight": lambda xs: sum(map(math.exp, xs))}[by]
        found.append(mean(some) if some else None)
    return found


def chosen(rule, rows, groups):
    """Kept keys of one query in every head.

    Args:
        rule: the rule.
        rows: by head, scores of keys, None where hidden.
        groups: heads that share a key head, as many in each.
    """
    if isinstance(rule, TopP):
        kept = []
        for row in rows:
            order = sorted((j for j, x in enumerate(row) if x is not None), key=lambda j: (-row[j], j))
            whole, held, some = sum(math.exp(row[j]) for j in order), 0.0, set()
            for j in order:
                if held < rule.p * whole:
                    some.add(j)
                held += math.exp(row[j])
            kept.append(some)
        return kept
    size = {"head": 1, "group": groups, "layer": len(rows)}[rule.shared]
    kept = []
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        values = part[0]
        if size > 1:
            whole = [sum(math.exp(x) for x in row if x is not None) for row in part]
            weights = [
                [
                    0.0 if row[j] is None else math.exp(row[j]) / total
                    for row, total in zip(part, whole, strict=True)
                ]
                for j in range(len(values))
            ]
            seen = [any(row[j] is not None for row in part) for j in range(len(values))]
            values = [math.log(sum(w) / size) if s else None for w, s in zip(weights, seen, strict=True)]
        if rule.block > 1:
            some = top(rule.k, blocks(values, rule.block, rule.by))
            some = {j for at in some for j in range(at * rule.block, (at + 1) * rule.block)}
        else:
            some = top(rule.k, values)
        kept += [{j for j in some if j < len(row) and row[j] is not None} for row in part]
    return kept


def reference(rule, leaders):
    """An attention function for transformers that keeps what a rule keeps; leaders: choices by shape."""

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **others):
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        hidden = torch.zeros_like(scores, dtype=torch.bool)
        if attention_mask is not None:
            hidden = (attention_mask[..., : key.shape[2]] < -1e30).expand_as(scores)
        layer = leaders["calls"] = leaders.get("calls", -1) + 1
        lead, old = leaders.get("lead", (-99, None))
        every = getattr(rule, "every", 1)
        follows = every > 1 and layer - lead < every and old.shape == scores.shape
        kept = torch.zeros_like(hidden)
        for b in range(len(scores)):
            for i in range(scores.shape[2]):
                rows = [
                    [None if hidden[b, h, i, j] else float(scores[b, h, i, j]) for j in range(scores.shape[3])]
                    for h in range(scores.shape[1])
                ]
                for h, keys in enumerate(chosen(rule, rows, groups)):
                    kept[b, h, i, list(keys)] = True
        if follows:
            kept = old & ~hidden
            kept |= ~hidden & ~kept.any(-1, keepdim=True)
        elif every > 1:
            leaders["lead"] = layer, kept
        weights = scores.masked_fill(~kept, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    return attend


RULES = {
    "heads": TopK(3),
    "groups": TopK(3, shared="group"),
    "layer": TopK(3, shared="layer"),
    "two layers": TopK(3, shared="layer", every=2),
    "blocks by weight": TopK(1, block=4),
    "blocks by their best": TopK(1, block=4, by="best"),
    "blocks by their mean": TopK(1, block=4, by="mean"),
    "blocks of a layer": TopK(1, block=4, by="mean", shared="layer"),
    "share of the weight": TopP(0.7),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", RULES)
def test_a_model_under_a_rule_is_the_model_whose_attention_keeps_what_loops_keep(name, kind):
    torch.manual_seed(0)
    model, batch = MODELS[name]().double().eval(), inputs(name)
    rule = RULES[kind]
    with torch.no_grad():
        whole = model(**batch).logits
        with sparsify(model, keep=rule) as masked:
            found = model(**batch).logits
        AttentionInterface.register("by_loops", reference(rule, {}))
        AttentionMaskInterface.register("by_loops", eager_mask)
        model.set_attn_implementation("by_loops")
        expected = model(**batch).logits
    assert (expected - whole).abs().max() > 1e-3 * whole.abs().max()  # the rule drops something
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    kept, keys = masked.totals
    assert 0 < kept < keys


def test_a_window_keeps_as_many_keys_as_top_k():
    for k in (5, 16, 40):
        assert rule_of("window", k, 0) == TopK(0, sinks=4, window=k - 4, centred=True)
    assert rule_of("window", 4, 0) is None
    assert rule_of("block-32", 64, 0) == TopK(2, block=32, by="mean")
    assert rule_of("topk-4-layers", 8, 0) == TopK(8, shared="layer", every=4)
    assert rule_of("random", 8, 3) == RandomK(8, 3)
    assert [k for name, k, _ in masks_of([8, 16], 0, ("block-16",))] == [16]
    remarks = []
    masks = masks_of([2, 4], 0, ["topk", "window"], ["window"], lambda text, code: remarks.append((text, code)))
    assert {name for name, _, _ in masks} == {"topk"}
    assert remarks == [("window is left out: it needs k of at least 5, and 4 is the largest", "k-left-out")]
    assert {name for name, _, _ in masks_of([64], 0, tuple(KINDS))} == set(KINDS)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TopK(2, by="median"), "by is one of weight, best, mean"),
        (lambda: TopK(2, shared="model"), "shared one of head, group, layer"),
        (lambda: TopK(2, every=2), 'above 1 only with shared="layer"'),
        (lambda: TopK([1, 2], shared="layer"), "need a single k"),
        (lambda: TopP(0), "p is a fraction"),
        (lambda: TopP(1.5), "p is a fraction"),
        (lambda: masks_of([2, 4], 0, ["topk", "window"], ["window"]), "window needs k of at least 5. Got 2, 4"),
        (lambda: masks_of([8], 0, ["block-32"], ["block-32"]), "block-32 needs k of at least 32. Got 8"),
        (lambda: masks_of([8], 0, ["tile-8x128"], ["tile-8x128"]), "tile-8x128 needs k of at least 128. Got 8"),
        (lambda: check_kinds(["block-32-best"]), "no kind of sparse attention 'block-32-best'. Kinds: topk"),
        (lambda: check_kinds(["topk", "best"]), "no kind of sparse attention 'best'. Kinds: topk, topk-group"),
    ],
)
def test_what_is_no_rule_is_refused_in_one_line(make, said):
    with pytest.raises(InputError) as caught:
        make()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_share_of_one_drops_nothing():
    torch.manual_seed(0)
    model = MODELS["causal, grouped"]().double().eval()
    batch = inputs("causal, grouped")
    with torch.no_grad(), sparsify(model, keep=TopP(1.0)) as masked:
        model(**batch)
    assert masked.totals[0] == masked.totals[1]
