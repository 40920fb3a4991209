"""Power iteration in the sum over tokens of the 2-norm, against all matrices written out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semdiag.mathematics.power_iteration import token_jacobian_norm

LENGTH, WIDTH = 4, 3


def maps(count, seed):
    """(N, L', d', L, d)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, LENGTH, WIDTH, LENGTH, WIDTH)
    spread = 10 ** torch.empty(count, LENGTH, 1, LENGTH, 1, dtype=torch.float64).uniform_(
        -2, 2, generator=generator
    )
    return spread * torch.randn(shape, generator=generator, dtype=torch.float64)


def found_of(j, seed=0, iterations=50):
    start = torch.randn(len(j), LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return token_jacobian_norm(
        lambda x: torch.einsum("naibj,nbj->nai", j, x),
        lambda y: torch.einsum("naibj,nai->nbj", j, y),
        start,
        iterations,
    )


def upper(j):
    """Sum over output tokens of the spectral norms of the blocks, largest over input tokens: an upper bound."""
    return torch.linalg.matrix_norm(j.permute(0, 1, 3, 2, 4), ord=2).sum(1).amax(-1)


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_no_value_is_above_the_norm_and_none_below_what_is_easily_found(seed):
    j = maps(5, seed)
    found = found_of(j, seed)
    assert (found.value <= upper(j) * (1 + 1e-9)).all()
    tokens = torch.einsum("naibj->nabij", j)
    single = tokens.norm(dim=-2).sum(1)  # ‖J x‖ of every single coordinate of every token: (N, L, d)
    several = torch.stack([found_of(j, s).value for s in range(8)]).amax(0)
    assert (several >= 0.9 * single.amax((-1, -2))).all()


def test_one_output_token_is_the_spectral_norm():
    generator = torch.Generator().manual_seed(0)
    j = torch.zeros(3, LENGTH, WIDTH, LENGTH, WIDTH, dtype=torch.float64)
    j[:, 2] = torch.randn(3, WIDTH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    spectral = torch.linalg.matrix_norm(j[:, 2].permute(0, 2, 1, 3), ord=2).amax(-1)
    found = torch.stack([found_of(j, seed, 500).value for seed in range(5)]).amax(0)
    torch.testing.assert_close(found, spectral, rtol=1e-2, atol=0)
    assert (found <= spectral * (1 + 1e-12)).all()


def test_more_steps_never_lower_the_value():
    j = maps(20, 3)
    values = torch.stack([found_of(j, 1, steps).value for steps in (1, 2, 3, 5, 10, 50)])
    assert (values.diff(dim=0) >= 0).all()


def test_a_zero_map_settles_at_zero():
    found = found_of(torch.zeros(2, LENGTH, WIDTH, LENGTH, WIDTH, dtype=torch.float64))
    assert found.value.tolist() == [0.0, 0.0]
    assert found.settled.all()
