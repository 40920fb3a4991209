"""Factors, terms and masks that bring heads to scores, and arguments given by keyword, against loops."""

import pytest
import torch
from torch import nn

import semdiag
from semdiag import TopK, Window, sparsify

pytestmark = pytest.mark.filterwarnings("ignore:where received a uint8 condition")
HEADS, LENGTH, WIDTH = 3, 7, 8
FUTURE = torch.ones(LENGTH, LENGTH).triu(1).bool()
BY_HEAD = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64).view(HEADS, 1, 1)
BY_SAMPLE = torch.tensor([0.7, 1.5], dtype=torch.float64).view(2, 1, 1, 1)
BY_QUERY = (1 + torch.arange(HEADS * LENGTH, dtype=torch.float64)).view(HEADS, LENGTH, 1) / 10
BIAS = torch.randn(HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LOW = torch.tensor(-torch.inf, dtype=torch.float64)
ZERO = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)


def in_parts(q, k):
    """Scores of (B, L, D), with an axis for heads behind a product without one."""
    return torch.baddbmm(input=BIAS[:1], batch1=q[:, 0], batch2=k[:, 0].mT, alpha=0.5)[:, None] * BY_HEAD


# Of q and k (2, 1, L, D).
FORMS = {
    "factor by head": lambda q, k: (q @ k.mT) * BY_HEAD,
    "divisor by head": lambda q, k: (q @ k.mT) / BY_HEAD,
    "filled, factor by head": lambda q, k: (q @ k.mT).masked_fill(FUTURE, -torch.inf) * BY_HEAD,
    "factor by head, filled": lambda q, k: ((q @ k.mT) * BY_HEAD).masked_fill(FUTURE, -torch.inf),
    "filled by head": lambda q, k: (q @ k.mT).masked_fill(FUTURE & (BY_HEAD < 2), -torch.inf),
    "factor by head and query": lambda q, k: (q @ k.mT) * BY_QUERY,
    "term, factor by head": lambda q, k: (q @ k.mT + BIAS[0]) * BY_HEAD,
    "term by head": lambda q, k: q @ k.mT + BIAS,
    "term by head subtracted": lambda q, k: q @ k.mT - BIAS,
    "factor by sample": lambda q, k: (q @ k.mT) * BY_SAMPLE * BY_HEAD,
    "factor in front": lambda q, k: BY_HEAD * (q @ k.mT),
    "where by head": lambda q, k: torch.where(FUTURE & (BY_HEAD < 2), LOW, q @ k.mT),
    "where of bytes": lambda q, k: torch.where((~FUTURE).to(torch.uint8), q @ k.mT, LOW) * BY_HEAD,
    "where of bytes, low first": lambda q, k: torch.where(FUTURE.to(torch.uint8), LOW, q @ k.mT) + BIAS,
    "where as a method": lambda q, k: ((q @ k.mT) * BY_HEAD).where(~FUTURE, LOW),
    "where, other=": lambda q, k: torch.where(condition=FUTURE, input=LOW, other=q @ k.mT) * BY_HEAD,
    "where, input=": lambda q, k: torch.where(condition=~FUTURE, input=q @ k.mT, other=LOW) * BY_HEAD,
    "mul, other=": lambda q, k: torch.mul(input=BY_HEAD, other=q @ k.mT),
    "mul, input=": lambda q, k: torch.mul(input=q @ k.mT, other=BY_HEAD),
    "mul as a method, other=": lambda q, k: (q @ k.mT).mul(other=BY_HEAD),
    "add, other=": lambda q, k: torch.add(input=BIAS, other=q @ k.mT),
    "add, alpha=": lambda q, k: torch.add(input=BIAS, other=q @ k.mT, alpha=0.5),
    "sub, other=": lambda q, k: torch.sub(input=BIAS, other=q @ k.mT),
    "sub, input=": lambda q, k: torch.sub(input=q @ k.mT, other=BIAS),
    "div, input=": lambda q, k: torch.div(input=q @ k.mT, other=BY_HEAD),
    "masked_fill, mask=": lambda q, k: torch.masked_fill(
        input=(q @ k.mT) * BY_HEAD, mask=FUTURE, value=-torch.inf
    ),
    "matmul, other=": lambda q, k: torch.matmul(input=q, other=k.mT) * BY_HEAD,
    "baddbmm": in_parts,
    "baddbmm, beta=0": lambda q, k: torch.baddbmm(ZERO, q[:, 0], batch2=k[:, 0].mT, beta=0)[:, None] * BY_HEAD,
}


class Attending(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.map, self.form = nn.Linear(WIDTH, 3 * WIDTH), form

    def forward(self, x, masked=lambda scores: scores):
        q, k, v = self.map(x)[:, None].chunk(3, -1)
        return masked(self.form(q, k)).softmax(-1) @ v


def made(form):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Attending(FORMS[form]).double(), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)


def by_loops(rule):
    """A mask (B, H, L, L): each query's largest scores, or the nearest keys, row by row."""

    def masked(scores):
        kept = torch.zeros_like(scores, dtype=torch.bool)
        both_sides = bool((scores[..., FUTURE] > -torch.inf).any())
        for place in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).tolist():
            row, i = scores[tuple(place)].tolist(), place[2]
            keys = [j for j in range(LENGTH) if row[j] > -torch.inf]
            if rule.window:
                before = rule.window // 2 if both_sides else rule.window - 1
                some = [j for j in keys if -(rule.window - 1 - before) <= i - j <= before]
            else:
                some = sorted(keys, key=lambda j: (-row[j], j))[: rule.k]
            kept[(*place, some)] = True
        return scores.masked_fill(~kept, -torch.inf)

    return masked


@pytest.mark.parametrize("rule", [TopK(2), Window(3)], ids=["topk", "window"])
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_under_a_mask_are_those_of_loops(form, rule):
    model, x = made(form)
    expected = model(x, by_loops(rule))
    with sparsify(model, rule) as masked:
        found = model(x)
    assert (found - expected).abs().max() < 1e-12
    slopes = [torch.autograd.grad(each.square().sum(), model.map.weight)[0] for each in (found, expected)]
    assert (slopes[0] - slopes[1]).abs().max() < 1e-11
    assert masked.calls == 1
    assert not masked.unmasked


@pytest.mark.parametrize("form", FORMS)
def test_every_head_is_captured_with_its_own_scores(form):
    model, x = made(form)
    q, k, _ = model.map(x)[:, None].chunk(3, -1)
    scores = FORMS[form](q, k).detach()
    with torch.no_grad(), semdiag.capture(model, k=1) as calls:
        model(x)
    assert calls.audit.empty
    found = calls.dispersion().set_index(["sample", "head", "query"])["dispersion"]
    assert len(found) == scores.shape[:3].numel()
    for place, value in found.items():
        row = scores[place]
        row = row[row > -torch.inf]
        assert value == pytest.approx(float(row.max() - row.min()), abs=1e-12)
