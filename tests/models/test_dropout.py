from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from numpy.random import Generator, Philox
from scipy.stats import chisquare

from semdiag_models import fast_attention as module
from semdiag_models.fast_attention import dropout, dropped_positions

ERRORS = 4.5  # standard errors


@pytest.fixture
def draw_one_gap_at_a_time(monkeypatch):
    """Make the first draw one gap, so that the rare second draw becomes the rule."""
    monkeypatch.setattr(module, "math", SimpleNamespace(sqrt=lambda x: -(x + 18.5) / 8))


def assert_law_of_three_coins(p, draws):
    """Every subset of three elements comes with the probability that independent coins give it."""
    seen = Counter(tuple(dropped_positions(3, p).tolist()) for _ in range(draws))
    law = {}
    for coins in product((0, 1), repeat=3):
        subset = tuple(i for i in range(3) if coins[i])
        law[subset] = p ** len(subset) * (1 - p) ** (3 - len(subset))
    assert set(seen) <= set(law)
    assert chisquare([seen[s] for s in law], [draws * q for q in law.values()]).pvalue > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.2, 0.5, 0.8])
def test_three_elements_are_dropped_like_three_coins(p):
    assert_law_of_three_coins(p, 10_000)


@pytest.mark.usefixtures("draw_one_gap_at_a_time")
def test_three_elements_are_dropped_like_three_coins_when_gaps_run_out():
    assert_law_of_three_coins(0.4, 5_000)


@pytest.mark.usefixtures("draw_one_gap_at_a_time")
def test_drawing_more_goes_on_where_the_first_draw_ended():
    drops = dropped_positions(500, 0.5)
    assert (drops.diff() > 0).all()
    assert 0 <= drops[0] < drops[-1] < 500
    assert abs(len(drops) - 250) < ERRORS * 125**0.5


@pytest.fixture(scope="module")
def many_draws():
    """2000 draws of 1000 coins of probability 0.05, as zeros and ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        coins = torch.zeros(2000, 1000, dtype=torch.float64)
        for row in coins:
            row[dropped_positions(1000, 0.05)] = 1
        return coins


def test_the_number_of_drops_has_the_mean_and_variance_of_a_binomial(many_draws):
    counts, n, p = many_draws.sum(1), 1000, 0.05
    variance = n * p * (1 - p)
    assert abs(counts.mean() - n * p) < ERRORS * (variance / len(counts)) ** 0.5
    assert abs(counts.var() / variance - 1) < ERRORS * (2 / len(counts)) ** 0.5


def test_every_position_is_dropped_equally_often(many_draws):
    per_cell = many_draws.sum(0).view(50, 20).sum(1)
    assert chisquare(per_cell.numpy()).pvalue > 1e-5
    for edge in (0, 1, 998, 999):
        assert abs(many_draws[:, edge].mean() - 0.05) < ERRORS * (0.05 * 0.95 / 2000) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 3, 20, 500])
def test_coins_at_a_distance_know_nothing_of_each_other(many_draws, lag):
    deviation = many_draws - 0.05
    products = deviation[:, lag:] * deviation[:, :-lag]  # variance (p(1-p))²
    margin = ERRORS * 0.05 * 0.95 / products.numel() ** 0.5
    assert abs(products.mean()) < margin


def test_successive_gaps_know_nothing_of_each_other():
    gaps = dropped_positions(2_000_000, 0.05).diff().double()
    before, after = gaps[:-1] - gaps.mean(), gaps[1:] - gaps.mean()
    correlation = (before * after).mean() / gaps.var()
    assert abs(correlation) < ERRORS / len(gaps) ** 0.5


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
@pytest.mark.parametrize("p", [1e-9, 0.01, 0.5, 0.999])
def test_positions_increase_and_stay_in_range(n, p):
    drops = dropped_positions(n, p)
    assert drops.dtype == torch.int64
    assert (drops.diff() > 0).all()
    assert all(0 <= position < n for position in drops.tolist())


@pytest.mark.parametrize(("p", "training"), [(0.3, False), (0.0, True)])
def test_nothing_is_dropped_or_drawn_outside_training(p, training):
    x = torch.randn(4, 5)
    before = torch.get_rng_state()
    assert dropout(x, p, training) is x
    assert torch.equal(before, torch.get_rng_state())


def layouts():
    dense = torch.randn(6, 7, 8, dtype=torch.float64)
    return {"contiguous": dense, "transposed": dense.transpose(0, 2), "strided": dense[:, ::2]}


@pytest.mark.parametrize("layout", layouts())
def test_dropped_elements_are_zero_and_the_others_are_divided_by_what_is_kept(layout):
    x, p = layouts()[layout].requires_grad_(), 0.3
    torch.manual_seed(9)
    dropped = dropout(x, p, True)
    torch.manual_seed(9)
    kept = torch.ones(x.numel(), dtype=torch.float64)
    kept[dropped_positions(x.numel(), p)] = 0
    kept = kept.view(x.shape) / (1 - p)
    torch.testing.assert_close(dropped, x * kept, rtol=0, atol=1e-14)
    cotangent = torch.randn_like(dropped)
    gradient = torch.autograd.grad(dropped, x, cotangent)[0]
    torch.testing.assert_close(gradient, cotangent * kept, rtol=0, atol=1e-14)


def test_what_is_added_gets_the_whole_gradient():
    x, rest = (torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sums = []
    for added in (dropout(x, 0.3, True, rest), rest + dropout(x, 0.3, False), dropout(x, 0.3, False, rest)):
        sums.append(torch.autograd.grad(added.sum(), (x, rest)))
    assert all(torch.equal(of_rest, torch.ones_like(rest)) for _, of_rest in sums)
    assert set(sums[0][0].unique().tolist()) == {0, 1 / 0.7}
    torch.manual_seed(5)
    together = dropout(x, 0.3, True, rest)
    torch.manual_seed(5)
    assert torch.equal(together, rest + dropout(x, 0.3, True))


def test_gaps_are_those_of_a_new_generator():
    torch.manual_seed(8)
    found = [dropped_positions(n, 0.02) for n in (5000, 300)]
    torch.manual_seed(8)
    for n, positions in zip((5000, 300), found, strict=True):
        gaps = Generator(Philox(key=int(torch.randint(2**62, ())))).geometric(0.02, n)
        wanted = gaps.cumsum() - 1
        assert positions.tolist() == wanted[wanted < n].tolist()


def test_gradients_are_those_of_finite_differences():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def seeded(x):
        torch.manual_seed(2)
        return dropout(x, 0.4, True)

    assert torch.autograd.gradcheck(seeded, x)


def test_the_input_is_left_as_it_was():
    x = torch.randn(5, 5)
    copy = x.clone()
    dropout(x, 0.5, True)
    assert torch.equal(x, copy)


def test_on_another_device_torch_drops(monkeypatch):
    asked = []
    monkeypatch.setattr(module.F, "dropout", lambda x, p: asked.append(p) or x)
    x = torch.ones(3, device="meta")
    assert dropout(x, 0.25, True).device.type == "meta"
    assert asked == [0.25]
