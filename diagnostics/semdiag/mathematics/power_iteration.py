"""Lower bounds of the norms of Jacobians, from products with vectors alone."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ITERATIONS = 50
_TOLERANCE = 1e-4  # relative growth at which an iteration counts as settled


@dataclass(frozen=True, eq=False)
class JacobianNorm:
    """The result of a power iteration.

    Attributes:
        value: (N,), the largest ratio ‖J x‖ / ‖x‖ found: a lower bound of the norm.
        settled: (N,) bool, whether the last step added less than 1e-4 of it.
    """

    value: Tensor
    settled: Tensor


def token_jacobian_norm(
    jvp: Callable[[Tensor], Tensor],
    vjp: Callable[[Tensor], Tensor],
    start: Tensor,
    iterations: int = ITERATIONS,
) -> JacobianNorm:
    """Bound the norm of a linear map between token matrices from below, in the theory's norm Σ_tokens ‖·‖₂.

    max ‖J x‖ over ‖x‖ = Σ_l ‖x_l‖₂ = 1 is attained with a single nonzero token. Power iteration for this pair of
    norms: y = J x; its dual vectors y_i / ‖y_i‖ are mapped by Jᵀ; the token with the longest image becomes the
    next x. No step lowers the value. It may end in a local maximum, hence a lower bound.

    Source: docs/theory.md#empirical (Boyd, The power method for lᵖ norms, 1974). Deviation: not in the paper.

    Args:
        jvp: x (N, L, d) -> J x (N, L', d'), for each of the N maps.
        vjp: y (N, L', d') -> Jᵀ y (N, L, d).
        start: (N, L, d), not zero.
        iterations: largest number.

    Returns:
        One lower bound per map.

    Example:
        >>> matrix = torch.tensor([[3.0, 0.0], [0.0, 1.0]])  # one token of width 2
        >>> norm = token_jacobian_norm(lambda x: x @ matrix.T, lambda y: y @ matrix, torch.ones(1, 1, 2))
        >>> round(norm.value.item(), 4)
        3.0
    """
    x = start / start.norm(dim=-1).sum(-1)[:, None, None]
    best = torch.zeros_like(x[:, 0, 0])
    settled = torch.zeros_like(best, dtype=torch.bool)
    for _ in range(iterations):
        y = jvp(x)
        lengths = y.norm(dim=-1)
        value = lengths.sum(-1)
        settled = value <= best * (1 + _TOLERANCE)
        best = torch.maximum(best, value)
        if bool(settled.all()):
            break
        back = vjp(y / lengths.clamp(min=torch.finfo(y.dtype).tiny)[..., None])
        reach = back.norm(dim=-1)
        token = reach.argmax(-1)
        rows = torch.arange(len(x), device=x.device)
        moving = reach[rows, token] > 0
        x = torch.zeros_like(x).index_put(
            (rows[moving], token[moving]),
            back[rows[moving], token[moving]] / reach[rows[moving], token[moving], None],
        )
    return JacobianNorm(best, settled)
