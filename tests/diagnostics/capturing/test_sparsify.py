"""Real masks in any model, against the same model with eager attention in which the mask is written out.

The reference replaces ``softmax`` and ``scaled_dot_product_attention`` themselves by loops over sorted scores: it
shares neither the mechanisms nor the choice of keys with what is tested. Seeds are fixed; two scores that rounding
could swap are some 1e-6 apart, of which there is none among these.
"""

import contextlib
import gc
import importlib.util
import inspect
import sys
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import semdiag
from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.sparsify import RandomK, TopK, Window, sparsify
from semdiag_files import InputError
from semdiag_models import Encoder, ModelConfig

_spec = importlib.util.spec_from_file_location("support_rows", Path(__file__).with_name("test_support.py"))
support = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = support  # the compiler looks up functions by the name of their module
_spec.loader.exec_module(support)
BART = {"d_model": support.WIDTH, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 1}
BART["initializer_range"] = 0.2  # six attentions: with more, gradients of 100 leave little of float32
BART |= {
    f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4))
}


class Decoder(nn.Module):
    """Torch's own decoder layer: causal self-attention, and cross-attention to as many tokens."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(support.WIDTH, support.HEADS, 48, dropout=0.0, batch_first=True)

    def forward(self, x, memory):
        rule = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, memory, tgt_mask=rule)


def hand_causal(self, q, k, v):
    """Grouped key heads and a bias that grows with distance, by hand."""
    k, v = (x[:, ::2].repeat_interleave(2, 1) for x in (k, v))
    places = torch.arange(q.shape[2])
    scores = q @ k.mT / 4 - 0.1 * (places[:, None] - places).abs()
    return scores.masked_fill(places[:, None] < places, -torch.inf).softmax(-1) @ v


def boolean(self, q, k, v):
    """A fused attention whose mask is boolean, causal but for the first token, which sees all."""
    seen = torch.ones(q.shape[2], q.shape[2]).tril().bool()
    seen[0] = True
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def planar(self, q, k, v):
    """Positions on a grid, 3 × 3, each axis with a bias that depends on the query: those of Segment Anything."""
    places = torch.randn(2, 3, q.shape[-1], generator=torch.Generator().manual_seed(0))
    scores = (q @ k.mT / 3).unflatten(-1, (3, 3))
    scores = scores + (q @ places[0].T)[..., :, None] + (q @ places[1].T)[..., None, :]
    return scores.flatten(-2).softmax(-1) @ v


def mixed_heads(self, q, k, v):
    return (q @ k.mT).sort(1).values.softmax(-1) @ v


def bart(kind):
    run = support.text(attention_mask=support.present, decoder_input_ids=lambda: support.tokens()[:, :5])
    return support.hugging_face("Bart", kind, 6, run, **BART)


ROWS = {
    **support.ROWS,
    "Bart, padded, sdpa": bart("sdpa"),
    "Bart, padded, eager": bart("eager"),
    "nn.TransformerDecoderLayer": support.Row(
        Decoder, 2, lambda model: model(support.stream(), support.stream().flip(1)), same=False
    ),
    "boolean mask, fused": support.Row(support.two(boolean), 2, support.on_stream),
    "grouped, biased and causal by hand": support.Row(support.two(hand_causal), 2, support.on_stream),
    "on a grid, by hand": support.Row(support.two(planar), 2, support.on_stream),
    "mixed heads, by hand": support.Row(support.two(mixed_heads), 2, support.on_stream),
}
NAMES = [name for name, row in ROWS.items() if row.needs != "timm"]
TOLERANCE = 1e-5  # of the largest output or gradient: float32, two layers, sums in another order


# --------------------------------------------------------------------------------------------------- reference


def written_out(scores, allowed, choose):
    """Bool, of the shape of the scores: row by row, which of the allowed keys are kept."""
    kept = torch.zeros_like(allowed)
    rows, masks, keeps = (x.reshape(-1, x.shape[-1]) for x in (scores, allowed, kept))
    for at in range(len(rows)):
        keys = [j for j in range(rows.shape[1]) if masks[at, j]]
        keeps[at, choose(at % scores.shape[-2], rows[at].tolist(), keys)] = True
    return keeps.reshape(scores.shape)


def top(k, sinks=0, window=0):
    """A choice of keys: the first ones, the near ones, and the k largest of the others."""

    def choose(query, scores, keys):
        fixed = [j for j in keys if j in keys[:sinks] or abs(j - query) < window]
        rest = sorted((j for j in keys if j not in fixed), key=lambda j: (-scores[j], j))
        return fixed + rest[:k] or keys

    return choose


@pytest.fixture
def reference(monkeypatch):
    """Call with a choice of keys: from then on every eager attention keeps those."""

    def plain(scores, dtype=None):
        return scores.to(dtype or scores.dtype).log_softmax(-1).exp().nan_to_num()

    def install(choose):
        def softmax(scores, dim=None, dtype=None, _stacklevel=3):
            assert dim in (-1, scores.ndim - 1)
            if scores.ndim < 3:  # a router's
                return plain(scores, dtype)
            columns = scores.shape[-1] - sink_columns(scores)
            keys = scores[..., :columns]
            allowed = keys > -1e4
            drop = allowed & ~written_out(keys.detach(), allowed, choose)
            drop = F.pad(drop, (0, scores.shape[-1] - columns))
            return plain(scores.masked_fill(drop, -torch.inf), dtype)

        def fused(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
            groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
            key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
            scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
            if is_causal:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, -torch.inf)
            elif attn_mask is not None:
                scores = scores + attn_mask
            return softmax(scores, dim=-1) @ value

        monkeypatch.setattr(F, "softmax", softmax)
        monkeypatch.setattr(torch, "softmax", softmax)
        monkeypatch.setattr(torch.Tensor, "softmax", softmax)
        monkeypatch.setattr(F, "scaled_dot_product_attention", fused)
        monkeypatch.setattr(support, "imported_before", fused)
        monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)

    return install


def sink_columns(scores):
    """One, in gpt-oss: a logit of the softmax that is no key."""
    return int(scores.shape[-1] == support.LENGTH + 1)


# ---------------------------------------------------------------------------------------------- the matrix


def close(mine, theirs):
    torch.testing.assert_close(mine, theirs, atol=TOLERANCE * max(1.0, float(theirs.detach().abs().max())), rtol=0)


def built(name):
    """A row's model, in evaluation mode unless the row says otherwise, and itself not compiled or exported."""
    row, plain = ROWS[name], {"compiled": support.nano, "exported": support.early}.get(name.split()[0])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = row.build()
        torch.manual_seed(0)
        eager = model if plain is None else support.two(plain)()
    for one in (model, eager):
        if "train" not in name and (not name.startswith("exported") or one is eager):
            one.eval()
    return row, model, eager


def lacking(name):
    """Why a row cannot be run with the packages that are here; empty if it can."""
    if name in support.ROWS:
        return support.lacking(name)
    return "" if support.imported(ROWS[name].needs) else f"{ROWS[name].needs} cannot be imported here"


def most_keys(name):
    return {"ViT,": 17}.get(name.split()[0], support.LENGTH)


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_that_drops_nothing_changes_nothing(name):
    """To the bit, but below 1e-6 for compiled models, and where torch leaves a fused path of its own."""
    if lacking(name):
        pytest.skip(lacking(name))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        row, model, _ = built(name)
        before = row.run(model)
        with sparsify(model, TopK(most_keys(name))) as masked:
            during = row.run(model)
        assert masked.calls == row.calls
        assert torch.equal(row.run(model), before)
    assert torch.equal(before, during) if row.same else (before - during).abs().max() < 1e-6 * before.abs().max()


@pytest.mark.processor
@pytest.mark.parametrize("k", [1, 3, "all but one"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_are_those_of_a_mask_written_out(name, k, reference):
    if lacking(name):
        pytest.skip(lacking(name))
    row, model, eager = built(name)
    k = most_keys(name) - 1 if k == "all but one" else k
    before, after = [], []  # keys of each query: as seen by a watch inside of the mask, and by one around it
    with watch_attention(model, lambda call: after.append(keys(call))), sparsify(model, TopK(k)) as masked:
        with watch_attention(model, lambda call: before.append(keys(call))):
            output = row.run(model)
        gradients = slopes(model, output)
    assert masked.calls == row.calls == len(before) == len(after)
    for some, left in zip(before, after, strict=True):
        assert torch.equal(left[some > 0], some.clamp(max=k)[some > 0])
    assert masked.kept["most"].max() == min(k, max(int(some.max()) for some in before))
    reference(top(k))
    expected_output = row.run(eager)
    expected = slopes(eager, expected_output)
    close(output, expected_output)
    close(gradients, expected)


def slopes(model, output):
    """Gradients of a fixed combination of the outputs in all parameters, in one vector."""
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad((output * direction).sum(), list(model.parameters()), allow_unused=True)
    return torch.cat([torch.zeros(1) if part is None else part.flatten() for part in found])


def keys(call):
    """(B, H, Lq): how many keys each query of a call attends to."""
    allowed = call.part().allowed
    size = (*call.q.shape[:3], call.k.shape[2])
    return (torch.ones(()) if allowed is None else allowed).expand(size).sum(-1).long().flatten()


SELF_ATTENTION = (
    "GPT-2, sdpa",
    "BERT, padded, eager",
    "Llama, grouped keys, padded, sdpa",
    "nanoGPT-like, by hand",
)


def looked_at(model, run, *contexts):
    """The table of dispersion, the residuals and the audit of a capture among other contexts, in their order."""
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        calls = next(c for c in [stack.enter_context(context()) for context in contexts] if hasattr(c, "residual"))
        run(model)
    return calls.dispersion(k=[1, 2]), calls.residual, calls.audit


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_inside_sees_the_masked_attention_as_one_around_does(name):
    """Whether the mask was opened first or last, the rows are those of the masked model."""
    if lacking(name):
        pytest.skip(lacking(name))
    row, model, _ = built(name)
    masks, captures = (lambda: sparsify(model, TopK(2), partial=True)), (lambda: semdiag.capture(model, k=2))
    around, inside = looked_at(model, row.run, captures, masks), looked_at(model, row.run, masks, captures)
    for one, other in zip(around, inside, strict=True):
        pd.testing.assert_frame_equal(one, other)
    with sparsify(model, TopK(2), partial=True) as masked:
        row.run(model)
    if not masked.unmasked:
        assert around[0]["keys"].max() <= 2
    assert torch.overrides._get_current_function_mode_stack() == _get_current_dispatch_mode_stack() == []


def test_global_tokens_of_a_masked_encoder_are_seen_masked_from_inside():
    """Queries that attend to all keys without the mask keep one with it, and so nothing is dispersed."""
    config = {"vocabulary_size": 3, "classes": 2, "length": 6, "blocks": 2, "attention": "banded", "k": 3}
    model = Encoder(ModelConfig(**config, global_tokens=1)).eval()
    tokens = torch.tensor([[0, 1, 1, 0, 1, 0]])
    for wrapped in (model, nn.Sequential(model)):
        with sparsify(model, TopK(1)), semdiag.capture(wrapped) as calls:
            wrapped(tokens)
        assert (calls.dispersion()["dispersion"] == 0).all()
        assert calls.residual["residual"].max() < 1e-5


class Others(TorchDispatchMode):
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_modes_of_others_between_the_mask_and_the_capture_are_left_in_their_order():
    """A capture goes below the mask, past the modes that were entered after it, and takes itself off again."""
    _, model, _ = built("nanoGPT-like, by hand")
    with sparsify(model, TopK(2)):
        before = torch.overrides._get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
        with torch.device("cpu"), Others(), semdiag.capture(model) as calls:
            model(support.stream())
        after = torch.overrides._get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
        assert before == after
    assert calls.dispersion()["keys"].max() == 2
    assert torch.overrides._get_current_function_mode_stack() == _get_current_dispatch_mode_stack() == []


def test_a_copy_of_a_masked_model_is_refused():
    """What measures in another dtype or runs copies would tell of the model without its mask."""
    model = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1)).eval()
    tokens = torch.tensor([[0, 1, 1, 0]])
    with sparsify(model, TopK(1)):
        assert semdiag.measure(model, tokens).queries["dispersion"].max() == 0
        with pytest.raises(InputError, match="runs under sparsify"):
            semdiag.measure(model, tokens, dtype=torch.float64)
        with pytest.raises(InputError, match="runs under sparsify"):
            semdiag.k_sweep(model, tokens)
    assert len(semdiag.measure(model, tokens, dtype=torch.float64).queries)


@pytest.mark.parametrize("name", SELF_ATTENTION)
@pytest.mark.parametrize(
    ("rule", "choose"),
    [(TopK(2, sinks=1, window=2), top(2, 1, 2)), (TopK(0, window=3), top(0, 0, 3)), (TopK(0, 2, 2), top(0, 2, 2))],
)
def test_sinks_and_windows_are_kept(name, rule, choose, reference):
    row, model, _ = built(name)
    with torch.no_grad(), sparsify(model, rule):
        output = row.run(model)
    reference(choose)
    with torch.no_grad():
        expected = row.run(model)
    real = torch.ones(output.shape[:2], dtype=torch.bool)
    if "padded" in name:  # what a padded query attends to is nobody's business
        real = support.present("left" if name.startswith("Llama") else "right").bool()
    close(output[real], expected[real])


# ------------------------------------------------------------------------------------------------ the rules


def two_by_hand():
    torch.manual_seed(0)
    return support.two(support.by_hand)().eval()


def test_of_equal_scores_the_lower_position_is_kept():
    model = two_by_hand()
    with torch.no_grad():
        for part in model:
            part.qkv.weight[: support.WIDTH] = 0
            part.qkv.bias[: support.WIDTH] = 0
    x, seen = support.stream(), []
    with torch.no_grad(), watch_attention(model, seen.append), sparsify(model, TopK(2)):
        model(x)
        assert all(call.part().allowed.expand(2, 4, 9, 9)[..., :2].all() for call in seen)


class Padded(nn.Module):
    """Causal attention that is told which tokens are real."""

    def forward(self, x, attention_mask):
        past = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
        seen = attention_mask[:, None, None].bool() & past
        return F.scaled_dot_product_attention(x, x, x, attn_mask=seen | torch.eye(x.shape[-2], dtype=torch.bool))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_queries_are_not_counted_on_whichever_side(side):
    lengths, k = (7, 3, 1), 2
    real = torch.arange(7) < torch.tensor(lengths)[:, None]
    model, x = Padded(), torch.randn(3, 2, 7, 4, generator=torch.Generator().manual_seed(0))
    with sparsify(model, TopK(k)) as masked:
        model(x, attention_mask=real.flip(1) if side == "left" else real)
    numbers = [keys for length in lengths for keys in range(1, length + 1)]
    assert masked.kept["queries"].tolist() == [len(numbers)] * 2
    assert masked.kept["keys"].tolist() == pytest.approx([sum(numbers) / len(numbers)] * 2)
    assert masked.kept["kept"].tolist() == pytest.approx([sum(min(k, n) for n in numbers) / len(numbers)] * 2)
    assert masked.kept[["least", "most"]].values.tolist() == [[1, 2]] * 2
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_every_layer_and_head_can_have_a_rule_of_its_own():
    model = two_by_hand()
    for keep in (
        {"0": TopK([1, 2, 3, 4]), "1": RandomK(5)},
        {0: TopK([1, 2, 3, 4]), 1: RandomK(5)},
        {("0", 0): TopK([1, 2, 3, 4]), ("1", 0): RandomK(5)},
    ):
        with torch.no_grad(), sparsify(model, keep) as masked:
            model(support.stream())
        assert masked.kept["kept"].tolist() == [1, 2, 3, 4, 5, 5, 5, 5]
    with pytest.raises(InputError, match="no rule for 1"), torch.no_grad(), sparsify(model, {"0": TopK(2)}):
        model(support.stream())
    with pytest.raises(InputError, match="4 heads; k has 2 numbers"), sparsify(model, TopK([1, 2])):
        model(support.stream())


class Windows(nn.Module):
    """Tokens in windows of four, and four heads of width 4: in the order (samples, heads, windows), or another."""

    def __init__(self, attend, order):
        super().__init__()
        self.qkv, self.attend, self.order = nn.Linear(16, 48), attend, order

    def forward(self, x):
        q, k, v = self.qkv(x).view(len(x), -1, 4, 3, 4, 4).permute(3, *self.order, 2, 5)
        return self.attend(q, k, v)


def written(q, k, v):
    return torch.softmax(q @ k.mT / 2, -1) @ v


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, written])
@pytest.mark.parametrize("windows", [3, 4])
@pytest.mark.parametrize("order", [(0, 4, 1), (0, 1, 4)])
def test_heads_are_told_from_windows_by_capture_and_by_masks(attend, windows, order):
    torch.manual_seed(0)
    model = nn.Sequential(Windows(attend, order)).eval()
    x = torch.randn(2, 4 * windows, 16)
    with torch.no_grad(), semdiag.capture(model) as calls:
        model(x)
    assert calls.residual["heads"].tolist() == [4]
    assert not calls.audit["reason"].str.contains("swapped").any()
    weights = calls.dispersion()
    with torch.no_grad(), sparsify(model, TopK([1, 2, 3, 4])):
        masked = model(x)
    q, k, v = model[0].qkv(x).view(len(x), -1, 4, 3, 4, 4).permute(3, 0, 4, 1, 2, 5)  # heads, then windows
    scores = q @ k.mT / 2
    spread = scores.amax(-1) - scores.amin(-1)
    torch.testing.assert_close(
        torch.tensor(weights.groupby("head")["dispersion"].mean().to_numpy()), spread.mean((0, 2, 3)).detach()
    )
    for head in range(4):
        lowest = scores[:, head].sort(-1, descending=True).values[..., head, None]
        kept = scores[:, head].masked_fill(scores[:, head] < lowest, -torch.inf).softmax(-1) @ v[:, head]
        found = masked.select(order.index(4), head)
        torch.testing.assert_close(found, kept.detach())


def test_random_keys_are_those_of_their_seed_for_every_batch():
    model, x = two_by_hand(), support.stream()

    def output(inputs, seed):
        with torch.no_grad(), sparsify(model, RandomK(3, seed)) as masked:
            found = model(inputs)
        assert (masked.kept[["least", "most"]] == 3).to_numpy().all()
        return found

    assert torch.equal(output(x, 0), output(x, 0))
    torch.testing.assert_close(output(x[1:], 0), output(x, 0)[1:])
    assert not torch.allclose(output(x, 0), output(x, 1))


def test_blocks_are_ranked_by_their_weight():
    model, seen = two_by_hand(), []
    with torch.no_grad(), watch_attention(model, seen.append), sparsify(model, TopK(2, block=4)):
        model(support.stream())
    for call in seen:
        weights = call.scores(torch.float64).softmax(-1)
        sums = torch.stack([part.sum(-1) for part in weights.split(4, -1)], -1)  # 4, 4 and 1 keys
        best = sums.argsort(-1, descending=True)[..., :2]
        kept = call.allowed.unfold(-1, 1, 4).squeeze(-1)  # the first key of each block
        assert torch.equal(kept.nonzero()[:, -1].view(2, 4, 9, 2), best.sort(-1).values)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: TopK(0),
        lambda: TopK(-1),
        lambda: Window(0),
        lambda: Window(4, sinks=4),
        lambda: TopK([]),
        lambda: TopK(1, block=0),
    ],
)
def test_a_rule_that_keeps_nothing_is_refused(wrong):
    with pytest.raises(InputError):
        wrong()


@pytest.mark.parametrize("kind", ["full", "topk", "banded", "banded, two global tokens and CLS"])
def test_our_encoder_masked_is_the_top_k_encoder(kind, wild_encoder, padded_tokens, untouched):
    """With the weights of a full encoder those of attention="topk"; of others the kept keys are among theirs."""
    encoder, tokens, seen = wild_encoder(kind), padded_tokens[0], []
    check = untouched(encoder)
    with torch.no_grad(), watch_attention(encoder, seen.append), sparsify(encoder, TopK(2)) as masked:
        output = encoder(tokens)
    check()
    assert (masked.calls, masked.kept["most"].max()) == (2, 2)
    assert all((call.selected >= 0).sum(-1).max() == 2 for call in seen)
    if kind in ("full", "topk"):
        other = Encoder(
            wild_encoder("topk").config.__class__(**{**encoder.config.to_dict(), "attention": "topk", "k": 2})
        )
        other.double().load_state_dict(encoder.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(output, other.eval()(tokens))
    with torch.no_grad(), sparsify(encoder, TopK(15)):
        whole = encoder(tokens)
    assert torch.equal(whole, encoder(tokens))


# ------------------------------------------------------------------------------------------ what is refused


def test_a_window_is_refused_in_cross_attention():
    model, x = Decoder().eval(), support.stream()
    for memory in (x.flip(1), x[:, :4]):
        said = r"layer\.multihead_attn: its queries .* Leave this kind of mask out, or"
        with pytest.raises(InputError, match=said), sparsify(model, Window(2)):
            model(x, memory)
        keep = {"layer.self_attn": Window(2), "layer.multihead_attn": TopK(2)}
        with sparsify(model, keep) as masked:
            model(x, memory)
        assert masked.kept.groupby("module")["most"].max().to_dict() == {
            "layer.self_attn": 2,
            "layer.multihead_attn": 2,
        }


class Near(nn.Module):
    """As many neighbours as there are queries, in an order of each query's own."""

    def forward(self, x):
        near = x[
            :,
            torch.stack(
                [torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(i)) for i in range(x.shape[1])]
            ),
        ]
        return torch.einsum("bij,bijd->bid", torch.einsum("bid,bijd->bij", x, near).softmax(-1), near)


def test_of_keys_that_each_query_has_for_itself_the_largest_are_kept_and_a_window_is_refused(reference):
    model, x = Near(), support.stream()
    with pytest.raises(InputError, match="window"), sparsify(model, Window(2)):
        model(x)
    with sparsify(model, TopK(3)) as masked:
        found = model(x)
    assert set(masked.kept["most"]) == {3}
    reference(top(3))
    close(found, model(x))


def test_sinks_are_refused_where_the_first_keys_are_hidden():
    q, k = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 6, 4)
    model = Fused(torch.tensor([False, False, True, True, True, True]))
    with pytest.raises(InputError, match="first keys are hidden"), sparsify(model, TopK(1, sinks=1)):
        model(q, k)


class Fused(nn.Module):
    """One fused attention with a mask."""

    def __init__(self, mask=None):
        super().__init__()
        self.mask = mask

    def forward(self, q, k):
        return F.scaled_dot_product_attention(q, k, k, attn_mask=self.mask)


def traced():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.jit.trace(support.Attention(support.by_hand).eval(), support.stream())

        def forward(self, x):
            return self.inner(x)

    return Whole()


def unknown_scores(self, q, k, v):
    return (-torch.cdist(q.contiguous(), k.contiguous())).softmax(-1) @ v


def with_a_sink(self, q, k, v):
    return torch.nn.functional.pad(q @ k.mT, (0, 1)).softmax(-1)[..., :-1] @ v


def flexible():
    from torch.nn.attention.flex_attention import flex_attention  # before the model runs: it brings the compiler

    return support.Attention(lambda self, q, k, v: flex_attention(q, k, v))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (traced, "inner: .*captured, but it takes no mask here"),
        (lambda: support.Attention(unknown_scores), "softmax .its scores are not followed to a product"),
        (lambda: support.Attention(with_a_sink), "captured, but it takes no mask here"),
        (flexible, "flex_attention"),
    ],
)
def test_attention_that_cannot_be_masked_is_named(build, said):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(support.Attention(support.by_hand), build()).eval()
        with torch.no_grad(), pytest.raises(InputError, match=rf"1.*{said}"), sparsify(model, TopK(2)):
            model(support.stream())
        with torch.no_grad(), sparsify(model, TopK(2), partial=True) as masked:
            model(support.stream())
    assert masked.calls == 1
    assert {skipped.module.split(".")[0] for skipped in masked.unmasked} == {"1"}
    nothing_is_left()


def test_a_part_of_the_model_that_is_called_alone_is_checked_at_the_end():
    model = nn.Sequential(support.Attention(support.by_hand), support.Attention(unknown_scores))
    with pytest.raises(InputError, match="1: softmax"), sparsify(model, TopK(2)):
        model[1](support.stream())


def test_where_nothing_can_be_masked_it_is_named_too():
    model = support.Attention(with_a_sink)
    with pytest.raises(InputError, match="it takes no mask here"), sparsify(model, TopK(2)):
        model(support.stream())


class AfterAttention(nn.Module):
    """Attention by hand, and a softmax that is none."""

    def __init__(self, other):
        super().__init__()
        self.attention, self.other = support.Attention(support.by_hand), other
        self.weight = nn.Parameter(torch.randn(support.WIDTH, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        x = x + self.attention(x)
        return self.other(x, self.weight)


def routed(x, weight):
    """A router, a mixture of six experts, the scores of which are a product with a parameter."""
    p = (x @ weight).softmax(-1)
    return sum(p[..., i : i + 1] * x.roll(i, -1) for i in range(6))


def of_a_vocabulary(x, weight):
    return torch.softmax(torch.einsum("bld,dv->blv", x, F.normalize(weight)), -1)


def pointing(x, weight):
    return torch.softmax(x[:, :1] @ x.mT, -1)


def contrasted(x, weight):
    x = x.mean(1)
    return torch.softmax(x @ x.T, -1)


def of_one(x, weight):
    """A softmax over one entry, as SwiftFormer has: no mask can change it."""
    return torch.softmax(x @ weight[:, :1], -1) * x


@pytest.mark.parametrize("other", [routed, of_a_vocabulary, of_one])
def test_a_softmax_over_parameters_is_left_alone(other):
    model, alone = AfterAttention(other).eval(), AfterAttention(lambda x, weight: x).eval()
    alone.load_state_dict(model.state_dict())
    x = support.stream()
    with torch.no_grad(), sparsify(alone, TopK(2)):
        attended = alone(x)
    with torch.no_grad():
        expected = other(attended, model.weight)
    with torch.no_grad(), sparsify(model, {("attention", 0): TopK(2), "": TopK(1)}) as masked:
        found = model(x)
    assert torch.equal(found, expected)
    assert set(masked.kept["module"]) == {"attention"} | ({""} if other is of_one else set())


@pytest.mark.parametrize("k", [2, 99])
@pytest.mark.parametrize("other", [pointing, contrasted])
def test_a_masked_softmax_that_meets_no_values_is_refused(other, k):
    model, x = AfterAttention(other).eval(), support.stream()
    with semdiag.capture(model) as calls:
        model(x)
    assert (len(calls), calls.other_softmaxes) == (1, 1)
    said = "something else. the model itself: softmax .a mask was applied to it as to attention, but its"
    with torch.no_grad(), pytest.raises(InputError, match=said), sparsify(model, TopK(k)):
        model(x)
    with torch.no_grad(), sparsify(model, TopK(k), partial=True) as masked:
        model(x)
    assert [skipped.module for skipped in masked.unmasked] == [""]
    lacking = nn.Sequential(support.Attention(with_a_sink), model).eval()
    with torch.no_grad(), sparsify(lacking, TopK(k), partial=True) as masked:
        lacking(x)
    assert sorted(skipped.module for skipped in masked.unmasked) == ["0", "1"]
    model.other = lambda x, weight: torch.log_softmax(x[:, :1] @ x.mT, -1).exp()  # as the error advises
    with torch.no_grad(), sparsify(model, TopK(k)) as masked:
        model(x)
    assert (masked.calls, masked.unmasked) == (1, [])


def test_a_model_without_attention_is_refused():
    model = nn.Linear(3, 3)
    with pytest.raises(InputError, match="No softmax attention"), sparsify(model, TopK(2)):
        model(torch.ones(1, 3))
    with sparsify(model, TopK(2)):
        pass  # it never ran


def test_another_thread_is_refused():
    from concurrent.futures import ThreadPoolExecutor

    model = two_by_hand()
    with ThreadPoolExecutor(1) as pool, sparsify(model, TopK(2)):
        model(support.stream())
        with pytest.raises(InputError, match="another thread"):
            pool.submit(model, support.stream()).result()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_refused(reentrant):
    model = two_by_hand()

    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return checkpoint(self.model, x, use_reentrant=reentrant)

    saving, x = Saving(), support.stream().requires_grad_()
    with pytest.raises(InputError, match="checkpointing"), sparsify(saving, TopK(2)):
        saving(x)
    with torch.no_grad(), sparsify(model, TopK(2)):
        model(x)
    nothing_is_left()


def interrupted(module, inputs, output):
    raise KeyboardInterrupt


def nothing_is_left():
    modules = torch.nn.modules.module
    assert not {**modules._global_forward_hooks, **modules._global_forward_pre_hooks}
    assert torch.overrides._get_current_function_mode() is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("name", ["GPT-2, eager", "nanoGPT-like, by hand", "nn.TransformerEncoder, padded, eval"])
def test_nothing_is_left_behind_after_an_exception(name):
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if lacking(name):
            pytest.skip(lacking(name))
        row, model, _ = built(name)
        before = row.run(model)
        model.register_forward_hook(interrupted)
        with pytest.raises(KeyboardInterrupt), sparsify(model, TopK(1)):
            row.run(model)
        model._forward_hooks.clear()
        nothing_is_left()
        gc.collect()
        assert torch.equal(row.run(model), before)


def test_a_generation_is_masked_step_by_step():
    """With a cache each step keeps what the same query keeps in one forward over all tokens."""
    _, model, _ = built("GPT-2, sdpa")
    ids = support.tokens()
    # transformers 5.24 renamed the argument.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for rule in (TopK(3), TopK(1, sinks=1, window=2)):
        with torch.no_grad(), sparsify(model, rule):
            whole = model(ids).last_hidden_state
            first = model(ids[:, :6], use_cache=True)
            steps, cache = [first.last_hidden_state], {name: first.past_key_values}
            for at in range(6, ids.shape[1]):
                step = model(ids[:, at : at + 1], **cache, use_cache=True)
                steps.append(step.last_hidden_state)
        close(torch.cat(steps, 1), whole)


@pytest.mark.slow
def test_a_model_can_be_trained_under_a_mask():
    model, x = two_by_hand(), support.stream()
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    with sparsify(model, TopK(2)):
        for _ in range(20):
            optimiser.zero_grad()
            losses.append(F.mse_loss(model(x), target))
            losses[-1].backward()
            optimiser.step()
    assert losses[-1] < 0.7 * losses[0]


def test_it_is_part_of_the_package():
    assert (semdiag.sparsify, semdiag.TopK) == (sparsify, TopK)


@pytest.mark.parametrize("keep", [3, None, {"": 3}])
def test_what_is_no_rule_is_refused_at_once(keep):
    with (
        pytest.raises(InputError, match=r"^keep must be a rule like TopK\(3\), .* Got "),
        sparsify(nn.Identity(), keep),
    ):
        pass


@pytest.mark.parametrize(
    "arguments", [{"k": 2.5}, {"k": True}, {"k": "3"}, {"k": [2, None]}, {"k": 3, "sinks": 0.5}]
)
def test_counts_of_a_rule_are_whole_numbers(arguments):
    with pytest.raises(InputError, match=r"^(k|sinks) must be a whole number\. Got "):
        TopK(**arguments)
