"""How far two rows of attention weights are apart, and their part in a change of outputs."""

from torch import Tensor


def total_variation(before: Tensor, after: Tensor) -> Tensor:
    r"""Return the total variation of two rows of attention weights."""
    change = after - before
    return (change.abs().sum(-1) + change.sum(-1).abs()) / 2


def output_parts(before: Tensor, after: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    r"""Split the change of attention's outputs into that of the weights and that of the values."""
    return (after - before) @ values, after @ (others - values)
