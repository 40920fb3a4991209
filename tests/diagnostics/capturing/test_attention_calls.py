"""Watching attention: everything is seen, nothing is changed, nothing is left behind."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.modules import module as everywhere
from torch.overrides import _get_current_function_mode_stack

from semdiag.capturing import attention_calls
from semdiag.capturing.attention_calls import watch_attention
from semdiag.measuring.calls.monitor import Monitor
from semdiag.questions.stability.measure import noisy_copies
from semdiag_models import Encoder

TOKENS = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 0, 0, 2, 2, 2]])


def left_behind(model):
    """Hooks on the model, hooks on all modules, function modes."""
    on_model = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    on_all = len(everywhere._global_forward_hooks) + len(everywhere._global_forward_pre_hooks)
    return on_model, on_all, len(_get_current_function_mode_stack())


NOTHING = (0, 0, 0)


@pytest.fixture(
    params=[("full", None), *((kind, 3) for kind in ("topk", "banded", "block", "bottomk", "random", "lsh"))],
    ids=lambda kind: kind[0],
)
def encoder(request, tiny_config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(tiny_config(*request.param)).eval()


@pytest.mark.processor
def test_outputs_are_the_same_to_the_last_bit(encoder):
    calls = []
    before = encoder(TOKENS)
    with watch_attention(encoder, calls.append):
        during = encoder(TOKENS)
    assert len(calls) == 2
    assert torch.equal(before, during)
    assert torch.equal(before, encoder(TOKENS))


@pytest.mark.processor
def test_training_goes_on_bit_by_bit_under_watch(encoder):
    encoder.train()
    gradients = []
    for watch in (False, True):
        encoder.zero_grad()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            if watch:
                with watch_attention(encoder, lambda call: None):
                    encoder(TOKENS).sum().backward()
            else:
                encoder(TOKENS).sum().backward()
        gradients.append([p.grad.clone() for p in encoder.parameters()])
    assert all(map(torch.equal, *gradients))
    assert encoder.training


def test_calls_come_in_the_order_of_the_layers_and_name_their_modules(encoder):
    calls = []
    with watch_attention(encoder, calls.append) as audit:
        encoder(TOKENS)
        encoder(TOKENS)
    assert audit.modules == ["blocks.0.attention.core", "blocks.1.attention.core"]
    assert [call.layer for call in calls] == [0, 1, 0, 1]
    assert [call.module for call in calls] == audit.modules * 2
    assert audit.captured == {(name, "hook"): 2 for name in audit.modules}
    assert not audit.skipped
    assert all(dict(encoder.named_modules())[call.module] is not None for call in calls)


def test_a_call_holds_everything_attention_is_made_of(encoder):
    calls = []
    with watch_attention(encoder, calls.append), torch.no_grad():
        encoder(TOKENS)
    for call in calls:
        scores = (call.scale * call.q) @ call.k.transpose(2, 3)
        keep = call.allowed.expand(scores.shape).clone()
        if call.selected is not None:
            chosen = torch.zeros(*scores.shape[:3], 7, dtype=torch.bool)
            keep &= chosen.scatter(-1, call.selected.where(call.selected >= 0, 6), True)[..., :6]
        mixed = scores.masked_fill(~keep, -1e30).softmax(-1).mul(keep) @ call.v
        valid = call.queries[:, None, :, None]
        torch.testing.assert_close(call.mixed * valid, mixed * valid, rtol=1e-5, atol=1e-6)
        assert call.queries.tolist() == [[True] * 6, [True] * 3 + [False] * 3]
        assert call.allowed.shape == (2, 1, 1, 6)


def test_without_pad_every_key_is_allowed_and_every_query_counts(encoder):
    calls = []
    with watch_attention(encoder, calls.append):
        encoder(TOKENS[:1])
    assert [(call.allowed, call.queries) for call in calls] == [(None, None)] * 2


def test_nothing_is_attached_to_the_model_and_nothing_is_left_behind(encoder):
    with watch_attention(encoder, lambda call: None):
        assert left_behind(encoder) == (0, 2, 0)
    assert left_behind(encoder) == NOTHING


CHANGES = {
    "another part": lambda encoder: setattr(encoder.blocks[1], "out", torch.nn.Sequential(torch.nn.Identity())),
    "a method": lambda encoder: setattr(encoder, "forward", encoder.forward),
    "a method of a part": lambda encoder: setattr(encoder.blocks[0].attention, "select", lambda *_: None),
    "a hook": lambda encoder: encoder.blocks[0].register_forward_hook(lambda *_: None),
    "a hook before": lambda encoder: encoder.head.register_forward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_encoder_that_was_changed_is_watched_like_any_other_model(encoder, change):
    change(encoder)
    before = left_behind(encoder)
    with watch_attention(encoder, lambda call: None):
        assert left_behind(encoder)[2] == 1
    assert left_behind(encoder) == before


def test_hooks_of_semdiag_are_no_change(encoder):
    modes = []
    with (
        noisy_copies(encoder.blocks[0], 1, lambda copies: modes.append(left_behind(encoder)[2])),
        Monitor(encoder, every=1) as monitor,
        watch_attention(encoder, lambda call: None),
    ):
        encoder.train()(TOKENS)
    assert modes == [0]
    assert monitor.table["layer"].tolist() == [0, 1]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_nothing_is_left_behind_after_an_exception_in_the_body(encoder, error):
    with pytest.raises(error), watch_attention(encoder, lambda call: None):
        raise error
    assert left_behind(encoder) == NOTHING


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_nothing_is_left_behind_after_an_exception_while_consuming(encoder, error):
    def consume(call):
        raise error(call.layer)

    with pytest.raises(error, match="0"), watch_attention(encoder, consume):
        encoder(TOKENS)
    assert left_behind(encoder) == NOTHING


def test_a_watch_goes_on_after_a_forward_that_was_interrupted(encoder):
    calls = []

    def consume(call):
        calls.append((call.layer, call.occurrence))
        if len(calls) == 2:
            raise KeyboardInterrupt

    with watch_attention(encoder, consume):
        with pytest.raises(KeyboardInterrupt):
            encoder(TOKENS)
        encoder(TOKENS)
    assert calls == [(0, 0), (1, 0)] * 2


def test_nothing_is_left_behind_when_a_hook_cannot_be_attached(encoder, monkeypatch):
    def refuse(hook, *, always_call):
        raise RuntimeError("no hooks here")

    monkeypatch.setattr(attention_calls.of_all_modules, "register_module_forward_hook", refuse)
    with pytest.raises(RuntimeError, match="no hooks here"), watch_attention(encoder, lambda call: None):
        pytest.fail("the context was entered")
    assert left_behind(encoder) == NOTHING


def test_watches_may_be_nested_and_each_sees_every_call(encoder):
    outer, inner = [], []
    with watch_attention(encoder, outer.append):
        encoder(TOKENS)
        with watch_attention(encoder, inner.append):
            encoder(TOKENS)
        encoder(TOKENS)
        assert left_behind(encoder) == (0, 2, 0)
    assert (len(outer), len(inner)) == (6, 2)
    assert left_behind(encoder) == NOTHING


def test_hooks_of_others_stay(encoder):
    seen = []
    handle = encoder.blocks[0].attention.core.register_forward_hook(lambda *call: seen.append(1))
    with watch_attention(encoder, lambda call: None):
        encoder(TOKENS)
    encoder(TOKENS)
    assert seen == [1, 1]
    handle.remove()


@pytest.mark.parametrize("kind", ["banded", "block"])
def test_queries_that_attend_everywhere_have_every_key_selected(tiny_config, kind):
    encoder = Encoder(tiny_config(kind, 3, global_tokens=2, pooling="cls")).eval()
    calls = []
    with watch_attention(encoder, calls.append), torch.no_grad():
        encoder(TOKENS)
    for call in calls:
        for sample, pads in ((0, set()), (1, {4, 5, 6})):
            everything = set(range(9)) - pads
            rows = [[{*row} - {-1} for row in head] for head in call.selected[sample].tolist()]
            for head in rows:
                assert head[0] == head[7] == head[8] == everything
                assert all({0, 7, 8} <= row <= everything and len(row) <= 6 for row in head[1:7])
        scores = (call.scale * call.q) @ call.k.transpose(2, 3)
        keep = torch.zeros(*scores.shape[:3], 10, dtype=torch.bool)
        keep = keep.scatter(-1, call.selected.where(call.selected >= 0, 9), True)[..., :9]
        mixed = scores.masked_fill(~keep, -torch.inf).softmax(-1) @ call.v
        torch.testing.assert_close(call.mixed, mixed, rtol=1e-5, atol=1e-6)


def test_a_model_without_attention_has_an_empty_audit():
    calls, model = [], nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
    with watch_attention(model, calls.append) as audit:
        model(torch.ones(1, 2))
    assert (calls, audit.modules, audit.captured, audit.skipped) == ([], [], {}, {})


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # in torch 2.12
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_products_run_in_the_form_that_torch_chose_for_trained_weights(context):
    """``matmul`` folds batches where the other factor is trained; not to do so may round otherwise."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.out = nn.Parameter(torch.eye(8)), nn.Linear(8, 8)

        def forward(self, x):
            return self.out((x.transpose(0, 1) @ self.weight.T).transpose(0, 1))

    model, x = Turned(), torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    ran = []
    for watched in (False, True):
        with (
            context(),
            watch_attention(model, lambda call: None) if watched else nullcontext(),
            torch.profiler.profile() as profile,
        ):
            model(x)
        ran.append({event.name for event in profile.events()} & {"aten::mm", "aten::bmm", "aten::addmm"})
    assert ran == [{"aten::mm"}] * 2
