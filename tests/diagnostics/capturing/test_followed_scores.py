"""What was followed from the product is held against the softmax's input, in every row, before it is believed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import semdiag
from semdiag.capturing.attention_calls import watch_attention

LENGTH, WIDTH = 7, 8
PLACES = torch.arange(LENGTH)
LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
UP = torch.where(LATER, 1e9, 0.0)
ONE_KEY = torch.zeros(LENGTH, LENGTH).index_put((torch.tensor([2, 0]), torch.tensor([5, 3])), torch.tensor(2e9))
LOWEST = torch.finfo(torch.float32).min


def fill(z, value=-torch.inf):
    return z.masked_fill(LATER, value)


def put(z, value):
    z = z.clone()
    z[LATER.expand(z.shape)] = value
    return z


FORMS = {
    "nan_to_num": lambda z: torch.nan_to_num(fill(z), neginf=-1.0),
    "nan_to_num, 0": lambda z: torch.nan_to_num(fill(z), neginf=0.0),
    "nan_to_num, method": lambda z: fill(z).nan_to_num(neginf=-1.0),
    "nan_to_num, in place": lambda z: fill(z).nan_to_num_(neginf=-1.0),
    "nan_to_num, scaled": lambda z: fill(z).nan_to_num(nan=0.0, neginf=-20_000.0) * 1e-4,
    "maximum": lambda z: torch.maximum(fill(z), torch.tensor(-2.0)),
    "maximum of a constant": lambda z: torch.maximum(fill(z, -1e9), torch.full_like(z, -2.0)),
    "clamp": lambda z: fill(z).clamp(min=-2.0),
    "a boost": lambda z: fill(z, -1e9) + ONE_KEY,
    "a boost in place": lambda z: fill(z, -1e9).add_(ONE_KEY),
    "a boost of a sum": lambda z: z - UP + ONE_KEY,
    "a boost of all": lambda z: fill(z, -1e9) + UP,
    "a boost of -1e4": lambda z: fill(z, -1e4) + UP / 1e5,
    "half a boost of -1e4": lambda z: fill(z, -1e4) + UP / 2e5,
    "less a low term": lambda z: fill(z, -1e9) - (-UP),
    "where, a boost": lambda z: torch.where(LATER, torch.tensor(-1e9), z) + ONE_KEY,
    "written, shifted": lambda z: put(z, -1e9) + 6e8,
    "written, shifted by key": lambda z: put(z, -1e4) + 1e4 * (PLACES == 5),
    "written, less a term": lambda z: put(z, -1e9) + 0.999_999_999 * UP,
    "written, scaled": lambda z: put(z, -1e4) * 1e-4,
    "written, divided": lambda z: put(z, -1e5) / 1e5,
    "written back": lambda z: put(put(z, -torch.inf), 0.4),
    "filled, negated": lambda z: -fill(z, -1e9),
    "filled, scaled by key": lambda z: fill(z, -1e9) * torch.where(LATER, 1e-9, 1.0),
    "the lowest number, scaled": lambda z: fill(z, LOWEST) * 1e-38,
    "in bfloat16": lambda z: fill(z.bfloat16(), torch.finfo(torch.bfloat16).min).float() * 1e-38,
    "tanh": lambda z: 5 * torch.tanh(fill(z) / 5),
    "logaddexp": lambda z: torch.logaddexp(fill(z), torch.tensor(-1.0)),
    "leaky ReLU": lambda z: F.leaky_relu(fill(z, -1e4), 1e-4),
    "filled": fill,
    "filled, scaled, biased": lambda z: fill(z, -1e9) / 2 - PLACES,
}


class Attention(nn.Module):
    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.change = nn.Linear(WIDTH, 3 * WIDTH), change

    def scores(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.change(q @ k.mT), v

    def forward(self, x):
        z, v = self.scores(x)
        return z.softmax(-1) @ v


def stream(length=LENGTH, batch=2):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1))


def of_row(row):
    """The keys that a row of a softmax's input attends to."""
    best = max(row)
    return [j for j, z in enumerate(row) if z > -1e36 and z - best > -9_000]


def expected(model, x, choose):
    """The output with the keys that ``choose`` takes from those of each query, written out row by row."""
    z, v = model.scores(x)
    keep = torch.zeros_like(z, dtype=torch.bool)
    rows = z.detach().reshape(-1, LENGTH).tolist()
    both_sides = any(j > n % LENGTH for n, row in enumerate(rows) for j in of_row(row))
    for n, row in enumerate(rows):
        query, keys = n % LENGTH, of_row(row)
        keep.view(-1, LENGTH)[n, choose(query, row, keys, both_sides) or keys] = True
    return z.masked_fill(~keep, -torch.inf).log_softmax(-1).exp() @ v


def top_three(query, row, keys, both_sides):
    return sorted(keys, key=lambda j: (-row[j], j))[:3]


def near(query, row, keys, both_sides):
    return [j for j in keys if (abs(query - j) <= 1 if both_sides else 0 <= query - j <= 2)]


@pytest.mark.parametrize("form", FORMS)
def test_a_capture_has_the_keys_of_the_softmax(form):
    model, x = Attention(FORMS[form]), stream()
    with torch.no_grad(), watch_attention(model, (calls := []).append):
        model(x)
        z = model.scores(x)[0]
    (call,) = (call.averaged() for call in calls)
    allowed = torch.ones(()) if call.part().allowed is None else call.part().allowed
    counts = allowed.expand(2, 1, LENGTH, LENGTH).sum(-1).flatten().tolist()
    assert counts == [len(of_row(row)) for row in z.reshape(-1, LENGTH).tolist()]


@pytest.mark.parametrize(
    ("rule", "choose"), [(semdiag.TopK(3), top_three), (semdiag.Window(3), near)], ids=["TopK", "Window"]
)
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_chooses_among_the_scores_that_are_really_there(form, rule, choose):
    model, x = Attention(FORMS[form]), stream()
    with semdiag.sparsify(model, rule) as masked:
        output = model(x)
    assert masked.unmasked == []
    truth = expected(model, x, choose)
    torch.testing.assert_close(output, truth, rtol=1e-5, atol=1e-5)
    found, slopes = (torch.autograd.grad(y.square().sum(), model.qkv.weight)[0] for y in (output, truth))
    torch.testing.assert_close(found, slopes, rtol=1e-4, atol=1e-4 * float(slopes.abs().max()))


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("kind", ["filled", "written"])
def test_one_row_among_many_that_gets_a_forbidden_key_back_is_seen(batch, kind):
    """Of 64 rows and more, a few at random were compared."""
    length, later = 64, torch.ones(64, 64, dtype=torch.bool).triu(1)
    term = torch.zeros(length, length).index_put((torch.tensor(5), torch.tensor(9)), torch.tensor(2e9))

    def change(z):
        if kind == "filled":
            return z.masked_fill(later, -1e9) + term
        z = z.clone()
        z[:, later] = -1e9
        return z + term

    model, x = Attention(change), stream(length, batch)
    for _ in range(3):
        with torch.no_grad(), semdiag.capture(model, k=2) as calls:
            model(x)
        keys = calls.dispersion().query("query == 5")["keys"]
        assert keys.tolist() == [1] * batch


USUAL = (fill, FORMS["filled, scaled, biased"], lambda z: z, lambda z: 3 * torch.tanh(z / 3))


@pytest.mark.parametrize("change", USUAL)
def test_an_agreeing_history_keeps_queries_and_keys(change):
    """A false alarm would put all scores into the bias."""
    with torch.no_grad(), watch_attention(model := Attention(change), (calls := []).append):
        model(stream())
    assert calls[0].q.shape[-1] == WIDTH
