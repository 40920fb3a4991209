"""Terms added by hand are judged as a sum, among the keys that no mask hides in the end."""

import math

import pytest
import torch
from torch import nn

import semdiag
from semdiag.capturing.sparsify import TopK, sparsify

LENGTH, WIDTH, RESET = 8, 4, 5
PAST = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
STEPS = torch.rand(LENGTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DOCUMENT = (torch.arange(LENGTH) >= RESET).long()
SEEN = PAST & (DOCUMENT[:, None] == DOCUMENT)  # keys of the query's own document, up to its own
EARLIER = 20_000 * DOCUMENT
OTHER = (DOCUMENT[:, None] != DOCUMENT).tril()


def gates():
    """Return Σ of the steps between key and query, −20,000 if a document begins between them."""
    total = (-STEPS).index_fill(0, torch.tensor(RESET), -20_000.0).cumsum(0)
    return (total[:, None] - total).float()


def hidden(constant):
    return torch.zeros(LENGTH, LENGTH).masked_fill(~PAST, constant)


def assigned(z):
    z = z.clone()
    z[..., ~PAST] = -torch.inf
    return z


def added_in_place(z):
    z += gates()
    return z.masked_fill_(~PAST, -torch.inf)


def by_columns(z):
    """The row's own total is the same for all its keys, the other one for all queries."""
    total = -gates()[0]
    return (z + total[:, None] - total).masked_fill(~PAST, -torch.inf)


STEPWISE = -(STEPS.cumsum(0)[:, None] - STEPS.cumsum(0))
WAYS = {
    "added, then filled": lambda z: (z + gates()).masked_fill(~PAST, -torch.inf),
    "filled, then added": lambda z: z.masked_fill(~PAST, -torch.inf) + gates(),
    "added, then where": lambda z: torch.where(PAST, z + gates(), -torch.inf),
    "added, then assigned": lambda z: assigned(z + gates()),
    "added, then -inf added": lambda z: z + gates() + hidden(-torch.inf),
    "-inf added, then added": lambda z: z + hidden(-torch.inf) + gates(),
    "added, then the lowest added": lambda z: z + gates() + hidden(torch.finfo(torch.float32).min),
    "added, then -1e9 filled": lambda z: (z + gates()).masked_fill(~PAST, -1e9),
    "subtracted": lambda z: (z - -gates()).masked_fill(~PAST, -torch.inf),
    "in place": added_in_place,
    "by columns": by_columns,
    "scaled afterwards": lambda z: ((2 * z + 2 * gates()) / 2).masked_fill(~PAST, -torch.inf),
    "two terms": lambda z: (z + STEPWISE.float() + (gates() - STEPWISE.float())).masked_fill(~PAST, -torch.inf),
    "baddbmm": lambda z: z,
    "float64": lambda z: (z + gates().double()).float().masked_fill(~PAST, -torch.inf),
    "whole numbers": lambda z: (z + STEPWISE.float() + (EARLIER - EARLIER[:, None])).masked_fill(
        ~PAST, -torch.inf
    ),
    "uint8": lambda z: (((z + STEPWISE.float()) / 80 - 250 * OTHER.byte()) * 80).masked_fill(~PAST, -torch.inf),
    "bfloat16": lambda z: (z + STEPWISE.float() + (EARLIER - EARLIER[:, None]).bfloat16()).masked_fill(
        ~PAST, -torch.inf
    ),
    "float16": lambda z: (z + STEPWISE.float() + (EARLIER - EARLIER[:, None]).half()).masked_fill(
        ~PAST, -torch.inf
    ),
}


class Gated(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        if self.way == "baddbmm":
            z = torch.baddbmm(gates().expand(len(x), -1, -1), x, x.flip(-1).mT, alpha=0.5)
            return z.masked_fill(~PAST, -torch.inf).softmax(-1) @ x
        return WAYS[self.way](x @ x.flip(-1).mT / 2).softmax(-1) @ x


def stream():
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def dense(x, k=LENGTH):
    """Return scores, and the output that k keys of each query give, by loops in float64."""
    scores = x @ x.flip(-1).mT / 2 + STEPWISE
    rows = []
    for sample in range(len(x)):
        for query in range(LENGTH):
            keys = SEEN[query].nonzero()[:, 0]
            best = keys[scores[sample, query, keys].argsort(descending=True)[:k]]
            rows.append(scores[sample, query, best].softmax(-1) @ x[sample, best])
    return scores, torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("way", WAYS)
def test_a_reset_between_documents_hides_the_other_document_alone(way):
    """The first document's rows had no keys and δ = NaN: keys that the causal mask hides were the best of them."""
    model = Gated(way)
    with torch.no_grad(), semdiag.capture(model) as calls:
        model(stream())
    scores, _ = dense(stream().double())
    low, high = (scores.masked_fill(~SEEN, end) for end in (math.inf, -math.inf))
    rows = calls.dispersion()
    assert rows["keys"].tolist() == SEEN.sum(-1).repeat(2).tolist()
    expected = (high.amax(-1) - low.amin(-1)).flatten()
    # Scores beside ±20,000 are rounded to a multiple of 2⁻⁹ in float32 before the model takes that off again.
    torch.testing.assert_close(torch.tensor(rows["dispersion"].to_numpy()), expected.float(), atol=4e-3, rtol=0)


@pytest.mark.parametrize("way", WAYS)
def test_top_k_keeps_k_keys_of_every_document(way):
    x, y = stream().requires_grad_(), stream().double().requires_grad_()
    model = Gated(way)
    with sparsify(model, TopK(2)) as masked:
        output = model(x)
    assert masked.totals == (2 * int(SEEN.sum(-1).clamp(max=2).sum()), 2 * int(SEEN.sum()))
    _, expected = dense(y, 2)
    weights = torch.arange(expected.numel()).view(expected.shape) / 10
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(output.double(), expected, atol=4e-3, rtol=0)
    assert (x.grad - y.grad).abs().max() < 4e-3 * y.grad.abs().max()
