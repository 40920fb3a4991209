"""Blocks of keys for tiles of queries, against loops in float64; thresholds, donors, estimates, bad input."""

import math

import pytest
import torch

from semdiag.capturing import kept_keys as module
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.choices import choice_of
from semdiag.capturing.kept_keys import all_kept
from semdiag.capturing.masked_attention import in_strips
from semdiag.capturing.rules import RandomK, SameAs, SkipTiles, TopK
from semdiag.capturing.sparsify import engine_rule, sparsify
from semdiag.mathematics.block_estimates import ESTIMATES
from semdiag.measuring.calls.tile_weights import tiles
from semdiag_files import InputError

HEADS, LENGTH = 4, 19
KINDS = ["causal", "whole", "front", "behind", "windowed", "sinks", "whole, front", "whole, behind", "whole, both"]
RULES = [
    *(TopK(2, block=4, by=by, query_block=5) for by in ("weight", "best", "mean")),
    TopK((1, 2, 3, 9), block=4, query_block=8),
    *(TopK(2, block=4, query_block=8, shared=shared) for shared in ("group", "layer")),
    TopK(2, block=4, query_block=8, shared="group", by="best"),
    TopK(3, query_block=4),
    *(TopK(2, block=4, query_block=4, estimate=name) for name in ESTIMATES),
    TopK(2, block=4, query_block=8, estimate="mean", shared="layer"),
    *(SkipTiles(threshold, 6, 4) for threshold in (0, 0.7, 2.0)),
]


@pytest.fixture(scope="module")
def tiny_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


def call_of(kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(3, h, LENGTH, 8, generator=generator, dtype=torch.float64) for h in (HEADS, 2, 2))
    places, pad = torch.arange(LENGTH), torch.tensor([0, 5, 8])[:, None]
    allowed = None
    if kind.endswith("front"):
        allowed = (places >= pad)[:, None, None]
    elif kind.endswith("behind"):
        allowed = (places < LENGTH - pad)[:, None, None]
    elif kind == "whole, both":
        allowed = ((places >= pad // 2) & (places < LENGTH - pad.flip(0) // 2))[:, None, None]
    elif kind == "windowed":
        allowed = ((places[:, None] - places).abs() < 9)[None, None]
    sinks = torch.linspace(-1, 2, HEADS) if kind == "sinks" else None
    return AttentionCall("", 0, q, k, v, 0.6, allowed, None, None, q, causal="whole" not in kind, sinks=sinks)


def by_loops(call, rule):
    """(B, H, Lq, Lk) bool, with everything computed for one text, tile, head and block at a time."""
    z, seen = call.scores(torch.float64), call.part().allowed
    seen = torch.ones(z.shape, dtype=torch.bool) if seen is None else seen.expand(z.shape)
    kept = torch.zeros(z.shape, dtype=torch.bool)
    rows = z.exp().where(seen, 0).sum(-1) + (0 if call.sinks is None else call.sinks.double().exp()[:, None])
    weights = (z.exp() / rows[..., None]).numpy()
    z, seen = z.numpy(), seen.numpy()
    for b in range(len(z)):
        real = [j for j in range(LENGTH) if seen[b, :, :, j].any()]
        first, n = real[0], len(real)
        tiles = [real[i : i + rule.query_block] for i in range(0, n, rule.query_block)]
        blocks = [real[j : j + rule.block] for j in range(0, n, rule.block)]
        values, visible = {}, {}
        estimate = getattr(rule, "estimate", None)
        if estimate:
            q, k = call.q[b, :, first : first + n] * call.scale, call.k[b, :, first : first + n]
            places = torch.arange(n) if call.causal else torch.full((n,), n - 1)
            estimated = ESTIMATES[estimate](q, k, places, rule.query_block, rule.block)
        for h in range(HEADS):
            for t, tile in enumerate(tiles):
                for m, keys in enumerate(blocks):
                    pairs = [(i, j) for i in tile for j in keys if seen[b, h, i, j]]
                    visible[h, t, m] = bool(pairs)
                    if not pairs:
                        continue
                    scores = [z[b, h, i, j] for i, j in pairs]
                    if isinstance(rule, SkipTiles):
                        values[h, t, m] = max(_gap(z[b, h, i], seen[b, h, i], keys, blocks[:m]) for i in tile)
                    elif estimate:
                        values[h, t, m] = estimated[h, t, m].item()
                    elif rule.by == "best":
                        values[h, t, m] = max(scores)
                    elif rule.by == "mean":
                        values[h, t, m] = sum(scores) / len(scores)
                    else:
                        values[h, t, m] = sum(weights[b, h, i, j] for i, j in pairs)
        for h in range(HEADS):
            shared = getattr(rule, "shared", "head")
            heads = {"head": [h], "group": [h // 2 * 2, h // 2 * 2 + 1], "layer": range(HEADS)}[shared]
            for t, tile in enumerate(tiles):
                there = [m for m in range(len(blocks)) if any(visible[g, t, m] for g in heads)]
                if isinstance(rule, SkipTiles):
                    chosen = [m for m in there if values[h, t, m] >= -rule.threshold]
                else:
                    own = {m for m in there if call.causal and set(blocks[m]) & set(tile)}
                    joined = max if rule.by == "best" else lambda x: sum(x) / len(x)
                    rank = {m: joined([values.get((g, t, m), 0) for g in heads]) for m in there}
                    k = rule.k if isinstance(rule.k, int) else rule.k[h]
                    chosen = own | set(sorted(there, key=lambda m: (m not in own, -rank[m]))[:k])
                for i in tile:
                    keys = [j for m in chosen for j in blocks[m] if seen[b, h, i, j]]
                    kept[b, h, i, keys or [j for j in range(LENGTH) if seen[b, h, i, j]]] = True
    return kept


def _gap(z, seen, keys, before):
    here = max((z[j] for j in keys if seen[j]), default=-math.inf)
    earlier = [z[j] for block in before for j in block if seen[j]]
    return here - max([here, *earlier]) if here > -math.inf else here


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_tiles_keep_what_loops_over_texts_tiles_and_blocks_keep(monkeypatch, kind, rule):
    call = call_of(kind)
    expected, allowed = by_loops(call, rule), call.part().allowed
    allowed = torch.ones(()).bool() if allowed is None else allowed
    for at_once in (2**19, 90):
        monkeypatch.setattr(module, "_AT_ONCE", at_once)
        choice = choice_of(rule, call)
        kept = all_kept(choice)
        kept = torch.ones_like(expected) if kept is None else kept[0]
        counted = expected.any(-1)
        assert torch.equal(kept & allowed & counted[..., None], expected)
    if kind not in ("sinks",):  # and the attention over them is that of a dense softmax
        mixed = in_strips(choice_of(rule, call), (call.q, call.k, call.v)).output
        weights = call.scores(torch.float64).masked_fill(~expected, -torch.inf).softmax(-1).nan_to_num(0)
        dense = weights @ call.v.repeat_interleave(2, 1)
        assert torch.allclose(mixed.where(counted[..., None], 0), dense.where(counted[..., None], 0), atol=1e-12)


@pytest.mark.parametrize("rule", [TopK(3), TopK(3, shared="layer", every=2)], ids=str)
def test_donors_lend_their_keys_to_the_layers_that_name_them(tiny_llama, rule):
    ids = torch.arange(3, 43)[None]
    keep = {0: rule, 1: SameAs(0)}
    seen = []
    with sparsify(tiny_llama, keep), watch_attention(tiny_llama, lambda call: seen.append(call.part().allowed)):
        tiny_llama(ids)
    assert torch.equal(seen[0], seen[1])
    assert seen[0].sum(-1).unique().tolist() == [1, 2, 3]
    with (
        pytest.raises(InputError, match="Layer 0 cannot keep the keys of layer 1"),
        sparsify(tiny_llama, {0: SameAs(1), 1: TopK(3)}),
    ):
        tiny_llama(ids)


# What the user does who has a kernel of his own: in docs/engines.md, too.
def newest(q, k, positions, query_block, block):
    """Score blocks by their place: the newest are best."""
    places = torch.arange(-(-k.shape[1] // block), dtype=torch.float32)
    return places.expand(len(q), -(-q.shape[1] // query_block), -1)


def test_a_function_of_the_user_chooses_blocks():
    call = call_of("front")
    kept, _ = all_kept(choice_of(TopK(2, block=4, query_block=4, estimate=newest), call))
    first, last = 5, LENGTH - 1  # sample 1 begins at 5: its blocks are 5–8, 9–12, 13–16, 17–18
    assert kept[1, 0, last].nonzero()[:, 0].tolist() == [13, 14, 15, 16, 17, 18]
    assert kept[1, 0, first + 1].nonzero()[:, 0].tolist() == [5, 6]


@pytest.mark.parametrize("estimate", [*ESTIMATES, newest])
@pytest.mark.parametrize("front", [0, 3])
def test_a_text_alone_and_padded_has_the_same_blocks_where_queries_see_later_keys(estimate, front):
    """Behind a text, its padding entered block means, extremes and a user's function."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dtype=torch.float64)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        text = 2 * torch.randn(1, 13, 16, dtype=torch.float64)
        padded = torch.nn.functional.pad(text, (0, 0, front, 9), value=4.0)
    padding = torch.ones(1, padded.shape[1], dtype=torch.bool)
    padding[:, front : front + 13] = False
    rule = TopK(2, block=4, query_block=4, estimate=estimate)
    with torch.no_grad():
        whole = model(text)
        with sparsify(model, rule):
            alone = model(text)
        with sparsify(model, rule):
            found = model(padded, src_key_padding_mask=padding)[:, front : front + 13]
    assert (whole - alone).abs().max() > 1e-3
    assert (found - alone).abs().max() < 1e-12
    if isinstance(estimate, str):
        kinds = [f"tile-4x4-{estimate}", "tile-4x4"]
        rows = [
            tiles(model, [batch], kinds, k=8).select_dtypes("float64").to_numpy()
            for batch in ({"src": text}, {"src": padded, "src_key_padding_mask": padding})
        ]
        assert rows[0] == pytest.approx(rows[1], abs=1e-12)


@pytest.mark.parametrize(
    ("estimate", "said"),
    [
        (lambda q, k, *rest: q.new_zeros(1, 2), r"by head, tile and block, shape \(4, 5, 5\)\. Got \(1, 2\)"),
        (lambda q, k, *rest: q.new_zeros(4, 5, 4), r"Got \(4, 5, 4\)"),  # other blocks
        (lambda q, k, *rest: q.new_full((4, 5, 5), math.nan), "no numbers"),
        (lambda q, k, *rest: None, "Got NoneType"),
    ],
)
def test_what_an_estimate_returns_is_checked(estimate, said):
    with pytest.raises(InputError, match=said):
        choice_of(TopK(1, block=4, query_block=4, estimate=estimate), call_of("causal"))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (lambda: SkipTiles(math.nan), "Got nan"),
        (lambda: SkipTiles(-1.0), "at least 0"),
        (lambda: SkipTiles(1.0, 0), "query_block must be at least 1"),
        (lambda: TopK(1, block=4, query_block=0), "query_block must be at least 1"),
        (lambda: TopK(1, block=4, estimate="mean"), "above 1 with an estimate"),
        (lambda: TopK(1, block=4, query_block=4, estimate="quests"), "quest"),
        (lambda: choice_of(SkipTiles(1.0, 64, 4), call_of("causal")), "larger than a text of 19 tokens"),
        (lambda: engine_rule("tile-64", 64), "tile-64x64"),
        (lambda: engine_rule("skip-much", 64), "skip-8"),
        (lambda: engine_rule("tile-64x64-nowhere:f", 64), "nowhere cannot be imported"),
    ],
)
def test_wrong_rules_are_refused_in_one_line(rule, said):
    with pytest.raises(InputError, match=said) as error:
        rule()
    assert "\n" not in str(error.value)


def test_kinds_name_rules():
    assert engine_rule("tile-128x64", 256) == TopK(4, block=64, query_block=128)
    assert engine_rule("tile-64x32-quest", 64) == TopK(2, block=32, query_block=64, estimate="quest")
    assert engine_rule("tile-64x64", 63) is None
    assert engine_rule("skip-7.5", 1) == SkipTiles(7.5)
    assert engine_rule("skip-8-128x64", 1) == SkipTiles(8, 128, 64)
    own = engine_rule("tile-64x64-semdiag.mathematics.block_estimates:quest_estimate", 64)
    assert own.estimate is ESTIMATES["quest"]


def step_of(pad=0, keys_before=0):
    """The last query of a text of 19 tokens, some of them padding in front, after a cache of 18."""
    call = call_of("causal")
    allowed = (torch.arange(LENGTH) >= pad)[None, None, None] if pad else None
    first = LENGTH - 1
    numbers = {"allowed": allowed, "first_query": first, "keys_before": keys_before}
    return AttentionCall(**{**vars(call), "q": call.q[:, :, first:], "mixed": call.q[:, :, first:], **numbers})


BLOCKED = [TopK(2, block=4), TopK(2, block=4, query_block=2), SkipTiles(1.0, 2, 4)]


@pytest.mark.parametrize("rule", BLOCKED, ids=repr)
@pytest.mark.parametrize(("pad", "before"), [(5, 0), (0, 3)])
def test_blocks_behind_a_cache_that_hides_first_keys_are_refused(rule, pad, before):
    """They counted from the padding: another choice than in one pass over the text."""
    with pytest.raises(InputError, match="a cache hides its first keys"):
        choice_of(rule, step_of(pad, before))


def test_blocks_of_a_query_behind_a_cache_are_those_of_one_pass():
    whole, _ = all_kept(choice_of(TopK(2, block=4), call_of("causal")))
    step, _ = all_kept(choice_of(TopK(2, block=4), step_of()))
    assert torch.equal(step[:, :, 0], whole[:, :, -1])


@pytest.mark.parametrize(
    ("rule", "other"),
    [(TopK(2, block=4), False), (TopK(3), False), (RandomK(3), True), (BLOCKED[1], True)],
    ids=repr,
)
def test_rules_that_mean_something_else_behind_a_cache_say_so(rule, other):
    assert (choice_of(rule, step_of()).remark is not None) is other
    assert choice_of(rule, call_of("causal")).remark is None


@pytest.mark.parametrize("before", [0, 1, 5])
def test_first_keys_that_a_cache_has_dropped_are_no_sinks(before):
    kept, _ = all_kept(choice_of(TopK(0, sinks=2, window=1), step_of(keys_before=before)))
    sinks = [j for j in range(LENGTH) if j + before < 2]
    assert kept[0, 0, 0].nonzero()[:, 0].tolist() == [*sinks, LENGTH - 1]
