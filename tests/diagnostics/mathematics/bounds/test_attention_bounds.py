"""λ_A and λ_M against measured secants of attention maps, random and adversarial, for every kind of mask."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from semdiag.mathematics.bounds.attention_bounds import (
    HeadNorms,
    attention_map_bound,
    attention_map_bound_from_load,
    bilinear_form_bound,
    paper_attention_map_bound,
    paper_bilinear_form_bound,
)
from semdiag.mathematics.bounds.block_bounds import Bound
from semdiag.mathematics.score_strips import AttentionRows, fixed_mask_rows, heavy_hitter_rows

LENGTH, WIDTH, K = 8, 3, 3
SLACK = 1 + 1e-6
KINDS = ("full", "banded", "global block", "top-k", "ragged top-k")


def fixed_mask(kind: str) -> Tensor:
    """Allowed keys (for top-k kinds) or unmasked keys (for the others) of each query."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
    if kind == "banded":  # ragged at both ends
        return (i - j).abs() <= 1
    if kind == "global block":  # token 0 sees and is seen by everyone
        return (i // 2 == j // 2) | (i == 0) | (j == 0)
    if kind == "ragged top-k":  # causal: query i has i + 1 allowed keys
        return j <= i
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool)


@dataclass(frozen=True)
class End:
    """One attention call: tokens u, form M of shape (d + 1, d), and what follows from them."""

    tokens: Tensor
    form: Tensor
    kind: str

    @property
    def query_side(self) -> Tensor:
        return torch.cat([self.tokens, torch.ones_like(self.tokens[..., :1])], -1)

    @property
    def scores(self) -> Tensor:
        return self.query_side @ self.form @ self.tokens.mT

    @property
    def selected(self) -> Tensor:
        allowed = fixed_mask(self.kind).expand(self.scores.shape)
        if "top-k" not in self.kind:
            return allowed
        best = self.scores.masked_fill(~allowed, -math.inf).topk(K, dim=-1).indices
        return torch.zeros_like(allowed).scatter(-1, best, True) & allowed

    @property
    def dispersion(self) -> Tensor:
        high = self.scores.masked_fill(~self.selected, -math.inf).amax(-1)
        return high - self.scores.masked_fill(~self.selected, math.inf).amin(-1)

    @property
    def separation(self) -> Tensor:
        passed_over = fixed_mask(self.kind) & ~self.selected
        low = self.scores.masked_fill(~self.selected, math.inf).amin(-1)
        return low - self.scores.masked_fill(~passed_over, -math.inf).amax(-1)

    @property
    def output(self) -> Tensor:
        return torch.softmax(self.scores.masked_fill(~self.selected, -math.inf), -1) @ self.tokens


def rows_over(a: End, b: End) -> AttentionRows:
    delta = torch.maximum(a.dispersion, b.dispersion)
    keys = a.selected.sum(-1)
    if "top-k" in a.kind:
        return heavy_hitter_rows(delta, torch.minimum(a.separation, b.separation), keys)
    return fixed_mask_rows(delta, keys)


def norms_over(a: End, b: End) -> HeadNorms:
    gamma = torch.maximum(*(torch.linalg.matrix_norm(e.form, ord=2) for e in (a, b)))
    token = torch.maximum(*(e.tokens.norm(dim=-1).amax(-1) for e in (a, b)))
    return HeadNorms(gamma, torch.ones_like(gamma), token, (token**2 + 1).sqrt())


def token_sum(x: Tensor) -> Tensor:
    return x.norm(dim=-1).sum(-1)


def input_ratio(a: End, b: End) -> Tensor:
    """Measured change over what λ_A allows; must be at most 1."""
    bound = attention_map_bound(rows_over(a, b), a.selected | b.selected, norms_over(a, b))
    measured = token_sum(a.output - b.output) / token_sum(a.tokens - b.tokens)
    return measured / bound.log_value.exp()


def form_ratio(a: End, b: End) -> Tensor:
    """Measured change over what λ_M allows (Υ = 1); must be at most 1."""
    bound = bilinear_form_bound(rows_over(a, b), norms_over(a, b))
    measured = token_sum(a.output - b.output) / torch.linalg.matrix_norm(a.form - b.form, ord=2)
    return measured / bound.log_value.exp()


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_pair(generator: torch.Generator, cases: int, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = randn(generator, cases, LENGTH, WIDTH) * 10 ** randn(generator, cases, 1, 1).clamp(-1, 0.5)
    form = randn(generator, cases, WIDTH + 1, WIDTH) * 10 ** randn(generator, cases, 1, 1).clamp(-2, 0.7)
    size = 10 ** (-4 * torch.rand(cases, 1, 1, generator=generator, dtype=torch.float64))
    direction = randn(generator, cases, LENGTH, WIDTH)
    one_token = torch.arange(LENGTH) == torch.randint(LENGTH, (cases, 1), generator=generator)
    direction = torch.where(
        torch.rand(cases, 1, 1, generator=generator) < 0.5, direction, direction * one_token[..., None]
    )
    return tokens, form, tokens + size * direction, form + size * randn(generator, cases, WIDTH + 1, WIDTH)


@pytest.mark.parametrize("kind", KINDS)
def test_no_random_secant_exceeds_the_bounds(kind):
    tokens, form, moved, reformed = random_pair(torch.Generator().manual_seed(len(kind)), 3000, kind)
    here = End(tokens, form, kind)
    assert input_ratio(here, End(moved, form, kind)).max().item() <= SLACK
    assert form_ratio(here, End(tokens, reformed, kind)).max().item() <= SLACK


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [input_ratio, form_ratio])
def test_no_hill_climber_gets_past_the_bounds(kind, ratio):
    generator = torch.Generator().manual_seed(5)
    tokens, form, moved, reformed = random_pair(generator, 64, kind)
    state = [tokens, form, moved - tokens, reformed - form]

    def score(t: Tensor, m: Tensor, t_step: Tensor, m_step: Tensor) -> Tensor:
        other = End(t + t_step, m, kind) if ratio is input_ratio else End(t, m + m_step, kind)
        return ratio(End(t, m, kind), other).nan_to_num()

    best = score(*state)
    start = best.median().item()
    for _ in range(150):
        size = 10 ** (-3 * torch.rand(64, 1, 1, generator=generator, dtype=torch.float64))
        trial = [s + size * randn(generator, *s.shape) * s.abs().mean((1, 2), keepdim=True) for s in state]
        found = score(*trial)
        better = (found > best)[:, None, None]
        state = [torch.where(better, new, old) for new, old in zip(trial, state, strict=True)]
        best = torch.maximum(best, found)
    assert best.median().item() > 1.5 * start
    assert best.max().item() <= SLACK


def test_full_attention_attains_the_weight_constant_whatever_the_dispersion():
    """Half the tokens at +x, half at −x, scores equal: λ_M = ΥΞ³L is attained (no bias)."""
    x = torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64)
    tokens = torch.stack([x, -x] * (LENGTH // 2))
    flat = torch.zeros(WIDTH + 1, WIDTH, dtype=torch.float64)
    turned = flat.clone()
    turned[0, 0] = 1e-4
    here, there = End(tokens, flat, "full"), End(tokens, turned, "full")
    measured = token_sum(here.output - there.output) / 1e-4
    norms = HeadNorms(gamma=1e-4, upsilon=1.0, token=2.0, query=2.0)
    for delta in (1e-3, 5.0, 700.0):
        bound = bilinear_form_bound(fixed_mask_rows([delta] * LENGTH, LENGTH), norms)
        assert 0.99 * bound.log_value.exp() <= measured <= bound.log_value.exp() * SLACK


def test_a_query_that_nobody_attends_to_attains_its_own_term():
    """Query 0 looks at tokens at +x and −x, which look at themselves: only ΓΞ²·row_0 covers its move."""
    count, gamma = 40, 50.0
    tokens = torch.zeros(count + 1, 2, dtype=torch.float64)
    tokens[1:, 0] = torch.tensor([1.0, -1.0]).repeat(count // 2)
    selected = torch.eye(count + 1, dtype=torch.bool)
    selected[0] = torch.arange(count + 1) > 0
    moved = tokens.clone()
    moved[0, 0] = 1e-5

    def output(u: Tensor) -> Tensor:
        return torch.softmax((gamma * u[:, :1] @ u[:, :1].T).masked_fill(~selected, -math.inf), -1) @ u

    measured = token_sum(output(tokens) - output(moved)) / token_sum(tokens - moved)
    delta = torch.zeros(count + 1, dtype=torch.float64)
    delta[0] = 2 * gamma * 1e-5
    rows = fixed_mask_rows(delta, selected.sum(-1))
    bound = attention_map_bound(rows, selected, HeadNorms(gamma, 1.0, 1.0, 1.0)).log_value.exp()
    assert 0.99 * bound <= measured <= bound * SLACK


def naive_map_bound(p: list, xi: list, row: list, selected: Tensor, norms: HeadNorms) -> float:
    best = 0.0
    length = len(p)
    for token in range(length):
        users = [i for i in range(length) if selected[i, token]]
        as_query = norms.gamma * norms.token * row[token]
        as_key = norms.gamma * norms.query * sum(xi[i] for i in users)
        best = max(best, sum(p[i] for i in users) + norms.token * (as_query + as_key))
    return best


def test_matches_a_loop_with_ragged_rows_and_a_global_token():
    generator = torch.Generator().manual_seed(1)
    delta = 3 * torch.rand(LENGTH, generator=generator, dtype=torch.float64)
    gap = torch.rand(LENGTH, generator=generator, dtype=torch.float64)
    selected = fixed_mask("global block")
    norms = HeadNorms(gamma=0.7, upsilon=1.3, token=2.0, query=5**0.5)
    keys = selected.sum(-1)
    for rows in (fixed_mask_rows(delta, keys), heavy_hitter_rows(delta, gap, keys)):
        p, xi, row = (v.exp().tolist() for v in (rows.log_weight, rows.log_xi, rows.log_row))
        split = rows.log_split.exp().tolist()
        bound = attention_map_bound(rows, selected, norms).log_value.exp().item()
        assert bound == pytest.approx(naive_map_bound(p, xi, split, selected, norms), rel=1e-12)
        form = bilinear_form_bound(rows, norms).log_value.exp().item()
        assert form == pytest.approx(1.3 * 4 * 5**0.5 * sum(row), rel=1e-12)


@pytest.mark.parametrize("heavy", [False, True])
def test_equal_rows_give_the_closed_form(heavy):
    """Equal k and load βk: at most βk p̄ + m k (1 + β) ΓΞΞ̃ξ, m = 1 or 2."""
    k, beta, gap = 2, 2.0, 0.05
    delta = torch.full((LENGTH,), 1.5, dtype=torch.float64)
    rows = heavy_hitter_rows(delta, gap, k) if heavy else fixed_mask_rows(delta, k)
    norms = HeadNorms(gamma=0.7, upsilon=1.0, token=2.0, query=5**0.5)
    m = 2 if heavy else 1
    p, xi = rows.log_weight[0].exp().item(), rows.log_xi[0].exp().item()
    closed = beta * k * p + m * k * (1 + beta) * 0.7 * 2 * 5**0.5 * xi
    from_load = attention_map_bound_from_load(rows, beta * k, norms, heavy_hitter=heavy)
    assert from_load.log_value.exp().item() <= closed * (1 + 1e-12)
    selected = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    selected[:, :2] = torch.tensor([[True, True], [True, False]] * (LENGTH // 2))
    by_token = attention_map_bound(rows, selected[:, :], norms)
    everything = attention_map_bound_from_load(rows, LENGTH, norms, heavy_hitter=False)
    assert by_token.log_value <= everything.log_value + 1e-12


def test_padded_queries_are_left_out():
    delta, keys = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([2, 2, 0])
    selected = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    norms = HeadNorms(gamma=0.7, upsilon=1.0, token=2.0, query=2.0)
    padded = attention_map_bound(fixed_mask_rows(delta, keys), selected, norms)
    cut = attention_map_bound(fixed_mask_rows(delta[:2], keys[:2]), selected[:2, :2], norms)
    assert padded.log_value.item() == pytest.approx(cut.log_value.item())
    form = bilinear_form_bound(heavy_hitter_rows(delta, [0.1, 0.1, -1.0], keys), norms)
    assert form.holds
    assert math.isfinite(form.log_value.item())


def test_a_separation_of_zero_is_reported_and_leaves_no_guarantee():
    rows = heavy_hitter_rows([1.0, 1.0], [0.5, 0.0], 1)
    norms = HeadNorms(gamma=0.7, upsilon=1.0, token=2.0, query=2.0)
    for bound in (
        attention_map_bound(rows, torch.eye(2, dtype=torch.bool), norms),
        bilinear_form_bound(rows, norms),
        attention_map_bound_from_load(rows, 2, norms, heavy_hitter=True),
    ):
        assert bound.log_value.item() == math.inf
        assert not bound.holds
        assert bound.unmet[0].measured == {"smallest": 0.0, "rows not positive": 1}


def test_finite_at_a_dispersion_of_700():
    rows = heavy_hitter_rows([700.0] * LENGTH, 1e-9, K)
    norms = HeadNorms(gamma=44.0, upsilon=3.0, token=8.0, query=65**0.5)
    everything = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    bounds = [
        attention_map_bound(rows, everything, norms),
        bilinear_form_bound(rows, norms),
        paper_attention_map_bound(700.0, norms, 2.0, 1e-9),
        paper_attention_map_bound(800.0, norms),
        paper_bilinear_form_bound(800.0, norms, LENGTH, 1e-9),
    ]
    assert all(math.isfinite(b.log_value.item()) for b in bounds)


def test_paper_forms_by_hand():
    norms = HeadNorms(gamma=0.5, upsilon=3.0, token=2.0, query=2.0)  # ΓΞ² = 2

    def value(bound: Bound) -> float:
        assert bound.holds
        return bound.log_value.exp().item()

    e = math.exp(1.5)
    assert value(paper_attention_map_bound(1.5, norms)) == pytest.approx(e * 5)
    assert value(paper_attention_map_bound(1.5, norms, 1.5)) == pytest.approx(e * (1.5 + 2 * 2.5))
    heavy = value(paper_attention_map_bound(1.5, norms, 1.5, 0.25))
    assert heavy == pytest.approx(e * (1.5 + 4 * 2.5 * 5))
    assert value(paper_bilinear_form_bound(1.5, norms, 7)) == pytest.approx(3 * 8 * 7 * e)
    assert value(paper_bilinear_form_bound(1.5, norms, 7, 0.25)) == pytest.approx(2 * 3 * 8 * 7 * e * 5)
    assert paper_bilinear_form_bound(1.5, norms, 7, -0.1).log_value.item() == math.inf
    biased = HeadNorms(gamma=0.5, upsilon=3.0, token=2.0, query=5**0.5)
    assert [a.statement for a in paper_attention_map_bound(1.5, biased).unmet] == [
        "the query projection has no bias"
    ]


def test_worst_case_dispersion_is_never_exceeded():
    tokens, form, *_ = random_pair(torch.Generator().manual_seed(2), 500, "full")
    here = End(tokens, form, "full")
    norms = norms_over(here, here)
    assert (here.dispersion.amax(-1) <= 2 * norms.gamma * norms.token * norms.query * SLACK).all()


def test_a_mask_has_a_row_per_token():
    with pytest.raises(ValueError, match="one row of the mask per token"):
        attention_map_bound(
            fixed_mask_rows([1.0, 1.0], 2), torch.ones(2, 3, dtype=torch.bool), HeadNorms(1.0, 1.0, 1.0, 1.0)
        )
