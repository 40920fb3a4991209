"""Power iteration in the sum over tokens of the 2-norm, against all matrices written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag.mathematics.spectral_norms import jacobian_spectral_norm, token_jacobian_norm

LENGTH, WIDTH = 4, 3


def maps(count, seed):
    """(N, L', d', L, d)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, LENGTH, WIDTH, LENGTH, WIDTH)
    spread = 10 ** torch.empty(count, LENGTH, 1, LENGTH, 1, dtype=torch.float64).uniform_(
        -2, 2, generator=generator
    )
    return spread * torch.randn(shape, generator=generator, dtype=torch.float64)


def random_start(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def found_of(j, seed=0, iterations=50):
    return found_from(j, random_start(len(j), seed), iterations)


def found_from(j, start, iterations=50):
    return token_jacobian_norm(
        lambda x: torch.einsum("naibj,nbj->nai", j, x),
        lambda y: torch.einsum("naibj,nai->nbj", j, y),
        start,
        iterations,
    )


def upper(j):
    """Sum over output tokens of the spectral norms of the blocks, largest over input tokens: an upper bound."""
    return torch.linalg.matrix_norm(j.permute(0, 1, 3, 2, 4), ord=2).sum(1).amax(-1)


ROUNDING = 1e-12  # relative: sums of at most 12 products of float64 numbers, a few times over
SEEDS = st.integers(0, 2**31)


def best_coordinate(j):
    """‖J x‖ of the single coordinate of a single token that J stretches most, and that x."""
    size = j.norm(dim=2).sum(1).flatten(1)  # (N, L d)
    x = torch.nn.functional.one_hot(size.argmax(1), LENGTH * WIDTH).double().view(-1, LENGTH, WIDTH)
    return size.amax(1), x


@pytest.mark.slow
@given(SEEDS)
def test_no_value_is_above_the_norm_and_none_below_that_of_its_start(seed):
    """Both by definition: a value is a ratio ‖J x‖ / ‖x‖ that was met, and the start's is the first one."""
    j = maps(5, seed)
    assert (found_of(j, seed).value <= upper(j) * (1 + ROUNDING)).all()
    size, start = best_coordinate(j)
    assert (found_from(j, start).value >= size * (1 - ROUNDING)).all()


@pytest.mark.slow
@given(SEEDS)
def test_no_step_lowers_the_ratio(seed):
    """‖J x'‖ ≥ ⟨y*, J x'⟩ = max_l ‖(Jᵀy*)_l‖ ≥ ⟨Jᵀy*, x⟩ = ‖J x‖, y* the dual of y = J x (Boyd 1974)."""
    j, ratios = maps(5, seed), []

    def jvp(x):
        torch.testing.assert_close(x.norm(dim=-1).sum(-1), torch.ones(5, dtype=torch.float64))
        y = torch.einsum("naibj,nbj->nai", j, x)
        ratios.append(y.norm(dim=-1).sum(-1))
        return y

    token_jacobian_norm(jvp, lambda y: torch.einsum("naibj,nai->nbj", j, y), random_start(5, seed), 20)
    ratios = torch.stack(ratios)
    assert (ratios[1:] >= ratios[:-1] * (1 - ROUNDING)).all()


@pytest.mark.processor
def test_a_few_random_starts_find_what_a_single_coordinate_shows():
    """No theorem: it may settle on a local maximum. With 8 starts 2 of 2000 random maps fell short; here 10 of
    200 may, which a rate of 2 in 2000 exceeds with a probability below 1e-14."""
    j = maps(200, 0)
    found = torch.stack([found_of(j, seed).value for seed in range(8)]).amax(0)
    assert int((found < best_coordinate(j)[0]).sum()) <= 10


@given(SEEDS)
def test_one_token_has_the_spectral_norm(seed):
    """Singular values 3, 1, 0.2. One of the three coordinates has a share of at least 1/√3 in the first singular
    vector: from there the rest dies out by 1/9 a step in the square."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.linalg.qr(torch.randn(2, WIDTH, WIDTH, generator=generator, dtype=torch.float64)).Q
    j = torch.zeros(1, LENGTH, WIDTH, LENGTH, WIDTH, dtype=torch.float64)
    j[0, 2, :, 1] = left @ torch.diag(torch.tensor([3.0, 1.0, 0.2], dtype=torch.float64)) @ right
    starts = torch.zeros(WIDTH, LENGTH, WIDTH, dtype=torch.float64)
    starts[:, 1] = torch.eye(WIDTH)
    found = found_from(j.expand(WIDTH, -1, -1, -1, -1), starts).value.amax().item()
    assert 3 * (1 - 1e-4) <= found <= 3 * (1 + ROUNDING)  # settled: the last step added less than 1e-4


@pytest.mark.processor
def test_one_output_token_mostly_has_the_largest_spectral_norm_of_its_inputs():
    """No theorem, since a step may be stuck at the wrong input. Of 900 random maps about 15 were, with 5 starts;
    here 20 of 200 may, which a rate of 15 in 900 exceeds with a probability below 1e-9."""
    generator = torch.Generator().manual_seed(0)
    j = torch.zeros(200, LENGTH, WIDTH, LENGTH, WIDTH, dtype=torch.float64)
    j[:, 2] = torch.randn(200, WIDTH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    spectral = torch.linalg.matrix_norm(j[:, 2].permute(0, 2, 1, 3), ord=2).amax(-1)
    found = torch.stack([found_of(j, seed, 200).value for seed in range(5)]).amax(0)
    assert int((found < 0.99 * spectral).sum()) <= 20
    assert (found <= spectral * (1 + ROUNDING)).all()


def test_more_steps_never_lower_the_value():
    j = maps(20, 3)
    values = torch.stack([found_of(j, 1, steps).value for steps in (1, 2, 3, 5, 10, 50)])
    assert (values.diff(dim=0) >= 0).all()


def test_a_zero_map_settles_at_zero():
    found = found_of(torch.zeros(2, LENGTH, WIDTH, LENGTH, WIDTH, dtype=torch.float64))
    assert found.value.tolist() == [0.0, 0.0]
    assert found.settled.all()


@pytest.mark.slow
@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 9))
def test_bidiagonalisation_never_exceeds_and_soon_reaches_the_spectral_norm(seed, rows, columns):
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** torch.empty(2, 3, rows, columns, dtype=torch.float64).uniform_(-3, 3, generator=generator)
    matrices = spread * torch.randn(2, 3, rows, columns, generator=generator, dtype=torch.float64)
    exact = torch.linalg.matrix_norm(matrices, 2)

    def found(steps):
        return jacobian_spectral_norm(
            lambda w: (matrices @ w[..., None])[..., 0],
            lambda u: (matrices.mT @ u[..., None])[..., 0],
            torch.randn(2, 3, rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
            steps,
        ).value

    few, many = found(2), found(12)
    assert (few <= many * (1 + 1e-12)).all()
    assert (many <= exact * (1 + 1e-12)).all()
    assert (many >= exact * (1 - 1e-6)).all()


def test_bidiagonalisation_has_settled_where_a_step_adds_nothing():
    matrices = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrices[2] = 0
    start = torch.ones(3, 6, dtype=torch.float64)

    def settled(steps):
        return jacobian_spectral_norm(
            lambda w: (matrices @ w[..., None])[..., 0],
            lambda u: (matrices.mT @ u[..., None])[..., 0],
            start,
            steps,
        ).settled.tolist()

    assert settled(1) == [False, False, True]  # the third is zero
    assert settled(12) == [True, True, True]
