"""Queries to which finite constants forbid every key, held against the input of the softmax below Python."""

import pytest
import torch
from recorded_softmaxes import RecordedSoftmaxes, agrees
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import semdiag
from semdiag.capturing.attention_calls import watch_attention

LENGTH, WIDTH = 6, 4
LOWEST = torch.finfo(torch.float32).min
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
ONE = CAUSAL & (torch.arange(LENGTH) != 2)[:, None]  # query 2 is left no key; queries 3 to 5 see its key
BEFORE = CAUSAL.tril(-1)  # likewise query 0
BLANK = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)


def assigned(z, seen, constant):
    z = z.clone()
    z[..., ~seen] = constant
    return z


def term(seen, constant):
    return torch.zeros(seen.shape).masked_fill(~seen, constant)


WAYS = {
    "masked_fill": lambda z, seen, c: z.masked_fill(~seen, c),
    "masked_fill, then scaled": lambda z, seen, c: z.masked_fill(~seen, c) / 2,
    "masked_fill twice": lambda z, seen, c: z.masked_fill(~CAUSAL, c).masked_fill(~seen, c),
    "where": lambda z, seen, c: torch.where(seen, z, torch.tensor(c)),
    "assigned": assigned,
    "added": lambda z, seen, c: z + term(seen, c),
    "multiplied, then added": lambda z, seen, c: z + (1.0 - seen.float()) * c,
    "filled, then biased": lambda z, seen, c: z.masked_fill(~seen, c) + torch.arange(LENGTH) / 8,
    "after an operation that is not followed": lambda z, seen, c: z.relu().masked_fill(~seen, c),
}


class Attention(nn.Module):
    """One head; its mask is put in as a way says."""

    def __init__(self, way, seen, constant):
        super().__init__()
        self.way, self.seen, self.constant = way, seen, constant

    def forward(self, x):
        if self.way == "fused":
            mask = term(self.seen, self.constant)
            return scaled_dot_product_attention(x, x.flip(-1), x, attn_mask=mask)
        return WAYS[self.way](x @ x.flip(-1).mT, self.seen, self.constant).softmax(-1) @ x


def stream():
    return torch.randn(2, 1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def measured(model, *inputs, **options):
    """δ of every row that counts and has keys, by (sample, query); and the remarks."""
    with torch.no_grad(), semdiag.capture(model, k=1, **options) as calls:
        model(*inputs)
    assert not calls.residual["residual"].max() > 1e-5  # float32, sums of six terms; NaN where the model is
    rows = calls.dispersion().dropna(subset="dispersion")
    return rows.set_index(["sample", "query"])["dispersion"].to_dict(), list(calls.audit["reason"])


@pytest.mark.parametrize("constant", [LOWEST, -1e30, -1e9, -1e5, -1e4])
@pytest.mark.parametrize("seen", [CAUSAL, ONE, BEFORE, BLANK])
@pytest.mark.parametrize("way", [*WAYS, "fused"])
def test_they_attend_to_what_the_softmax_was_given(way, seen, constant):
    model, calls = Attention(way, seen, constant), []
    if constant > -2e4 and "scaled" in way:
        constant = model.constant = 2 * constant  # below -9,999 after it, too
    with torch.no_grad(), RecordedSoftmaxes() as truth:
        model(stream())
    with torch.no_grad(), watch_attention(model, calls.append):
        model(stream())
    assert len(calls) == 1
    # Scores up to 10 beside a constant c: what float32 leaves of them is off by eps · |c| / 2.
    assert agrees(calls[0], truth.seen[0], tolerance=1e-5 + torch.finfo(torch.float32).eps * min(-constant, 1e6))
    found, _ = measured(model, stream())
    assert len(found) == 2 * LENGTH


@pytest.mark.parametrize("constant", [LOWEST, -1e30, -1e9, -1e5, -1e4])
@pytest.mark.parametrize("way", ["masked_fill", "where", "assigned"])
def test_where_a_constant_is_filled_in_the_range_is_zero_and_a_remark_says_so(way, constant):
    found, said = measured(Attention(way, ONE, constant), stream())
    assert found[0, 2] == found[1, 2] == 0.0
    assert sum("forbids every key of some real queries" in text for text in said) == 1
    assert sum("instead of -inf" in text for text in said) == (constant > -1e36)


@pytest.mark.parametrize("constant", [LOWEST, -1e30, -1e9])
@pytest.mark.parametrize("way", ["added", "fused", "multiplied, then added"])
def test_where_a_constant_that_swallows_the_scores_is_added_the_range_is_zero(way, constant):
    found, said = measured(Attention(way, ONE, constant), stream())
    assert found[0, 2] == found[1, 2] == 0.0
    assert not any("counts as a bias" in text for text in said)


@pytest.mark.parametrize("way", [*WAYS, "fused"])
def test_a_row_at_minus_infinity_has_no_softmax(way):
    if way == "multiplied, then added":
        pytest.skip("0 · inf is no number")
    found, _ = measured(Attention(way, ONE, -torch.inf), stream())
    assert len(found) == 2 * (LENGTH - 1)


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("constant", [LOWEST, -1e9])
def test_padding_on_the_left_stays_padding(filled, constant):
    """Its keys are forbidden to all others: told by no mask of tokens, the first two queries of sample 1."""
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, :2] = False
    seen = CAUSAL & real[:, None, None]
    model = Attention("masked_fill" if filled else "added", seen, constant)
    found, said = measured(model, stream())
    assert set(found) == {(int(i), int(j)) for i, j in real.nonzero()}
    assert any("are taken for padding" in text for text in said)
    assert not any("some real queries" in text for text in said)
    told, said = measured(model, stream(), real=real)
    assert told == found
    assert not any("padding" in text for text in said)


class Named(nn.Module):
    """Takes a mask of queries by keys under a well-known name, and adds or fills in the lowest number."""

    def __init__(self, filled):
        super().__init__()
        self.filled = filled

    def forward(self, x, attention_mask):
        z = x @ x.flip(-1).mT
        forbidden = attention_mask < 0
        z = z.masked_fill(forbidden, LOWEST) if self.filled else z + attention_mask
        return z.softmax(-1) @ x


@pytest.mark.parametrize("filled", [False, True])
def test_a_mask_of_four_axes_tells_them_from_padding(filled):
    """Query 2 of sample 0 is left no key and others see its own; query 0 of sample 1 is padding."""
    seen = torch.stack([ONE, CAUSAL & (torch.arange(LENGTH) > 0)])[:, None]
    found, _ = measured(Named(filled), stream(), term(seen, LOWEST))
    assert set(found) == {(0, i) for i in range(LENGTH)} | {(1, i) for i in range(1, LENGTH)}
    assert found[0, 2] == 0.0
