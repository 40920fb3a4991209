"""Attention that is trained with dropout on its weights: captured as it was before they were dropped."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.sparsify import TopK, sparsify
from semdiag.measuring.calls.monitor import Monitor

pytestmark = pytest.mark.usefixtures("own_random_numbers")
HEADS, LENGTH, WIDTH = 2, 9, 16
DROPPED = {
    "F.dropout": F.dropout,
    "F.dropout, in place": lambda w, p: F.dropout(w, p, inplace=True),
    "a module": lambda w, p: nn.Dropout(p)(w),
    "noise in zeros": lambda w, p: w * torch.zeros_like(w).bernoulli_(1 - p).div_(1 - p),
    "noise in a copy": lambda w, p: w * w.detach().clone().bernoulli_(1 - p) / (1 - p),
}
TRAINED = [*(name for name in DROPPED if "in place" not in name), "nn.MultiheadAttention"]  # torch refuses it


class ByHand(nn.Module):
    def __init__(self, drop, p):
        super().__init__()
        self.qkv, self.drop, self.p = nn.Linear(WIDTH, 3 * WIDTH), drop, p

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        w = (q @ k.mT / 3).softmax(-1)
        return ((self.drop(w, self.p) if self.training else w) @ v).transpose(1, 2).flatten(2)


class Layer(nn.MultiheadAttention):
    def __init__(self, p):
        super().__init__(WIDTH, HEADS, dropout=p, batch_first=True)

    def forward(self, x):
        return super().forward(x, x, x, need_weights=True)[0]


def built(name, p):
    torch.manual_seed(0)
    return Layer(p) if name == "nn.MultiheadAttention" else ByHand(DROPPED[name], p)


def tokens():
    return torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def seen(model, context=torch.enable_grad, seed=2):
    calls = []
    torch.manual_seed(seed)
    with context(), watch_attention(model, calls.append) as audit:
        output = model(tokens())
    return output, calls, audit


@pytest.mark.parametrize(("p", "seed"), [(0.1, 2), (0.1, 3), (0.5, 4), (0.9, 5)])
@pytest.mark.parametrize(
    ("name", "context"),
    [
        *itertools.product(TRAINED, [torch.enable_grad, torch.no_grad, torch.inference_mode]),
        ("F.dropout, in place", torch.no_grad),
        ("F.dropout, in place", torch.inference_mode),
    ],
)
def test_scores_are_those_without_dropout_and_it_is_remarked(name, p, seed, context):
    model = built(name, p)
    (expected,) = seen(model.eval())[1]
    torch.manual_seed(seed)
    with context():
        before = model.train()(tokens())
    during, (call,), audit = seen(model, context, seed)
    assert torch.equal(before, during)
    assert torch.equal(call.scores(torch.float32), expected.scores(torch.float32))
    assert not audit.skipped
    assert call.dropout == pytest.approx(p)
    assert [remark.text[:14] for remark in audit.remarks] == [f"dropout of {p:g}"[:14]]


@pytest.mark.parametrize("name", TRAINED)
def test_weights_after_some_steps_are_the_same_to_the_bit_with_monitor(name):
    trained, rows = [], []
    for watch in (False, True):
        model = built(name, 0.3).train()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        torch.manual_seed(7)
        monitor = Monitor(model, every=1)
        if watch:
            monitor.start()
        for _ in range(4):
            optimizer.zero_grad()
            model(tokens()).square().sum().backward()
            optimizer.step()
        if watch:
            monitor.stop()
        trained.append([p.detach().clone() for p in model.parameters()])
        rows.append(len(monitor.table))
    assert all(map(torch.equal, *trained))
    assert rows == [0, 4]


def test_weights_that_were_changed_besides_are_in_the_audit():
    model = built("F.dropout", 0.3).train()
    model.drop = lambda w, p: F.dropout(w, p) * 0.5
    _, calls, audit = seen(model)
    assert (calls, [s.reason for s in audit.skipped]) == (
        [],
        ["its weights were changed between the softmax and the values"],
    )


def test_what_is_dropped_twice_is_dropped_with_both_probabilities():
    (call,) = seen(ByHand(lambda w, p: F.dropout(F.dropout(w, p), 0.2), 0.1).train())[1]
    assert call.dropout == pytest.approx(0.28)


def test_a_mask_is_put_in_while_it_is_trained():
    model = built("F.dropout", 0.3).train()
    with sparsify(model, keep=TopK(2)) as masked:
        model(tokens())
    assert masked.kept["kept"].tolist() == [2.0] * HEADS
