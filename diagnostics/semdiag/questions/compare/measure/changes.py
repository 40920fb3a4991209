"""How far two rows of attention weights are apart, and their part in a change of outputs."""

from torch import Tensor


def total_variation(before: Tensor, after: Tensor) -> Tensor:
    r"""Return the total variation of two rows of attention weights.

    Formula: ½ Σ_j |p'_j − p_j| + ½ |Σ_j p'_j − Σ_j p_j|: the largest difference of the weight on any set of keys.
    The rest of a row to 1 lies on a learnt sink, which counts as one more key.

    Source: not in the paper. Deviation: none.

    Args:
        before: p (..., n), each row's sum at most 1.
        after: p', of the same shape.

    Returns:
        (...,), in [0, 1].

    Example:
        >>> import torch
        >>> total_variation(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.5, 0.25, 0.25])).item()
        0.25
    """
    change = after - before
    return (change.abs().sum(-1) + change.sum(-1).abs()) / 2


def output_parts(before: Tensor, after: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    r"""Split the change of attention's outputs into that of the weights and that of the values.

    Formula: P'V' − PV = (P' − P)V + P'(V' − V). The first part is what queries and keys did: the other weights, on
    the same values. The second is what the other values did, under the other weights.

    Source: not in the paper; an identity. Deviation: none.

    Args:
        before: P (..., r, n).
        after: P' (..., r, n).
        values: V (..., n, d).
        others: V' (..., n, d).

    Returns:
        Both parts (..., r, d).

    Example:
        >>> import torch
        >>> one, two = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> v, w = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [5.0]])
        >>> [part.tolist() for part in output_parts(one, two, v, w)]
        [[[1.0]], [[3.0]]]
    """
    return (after - before) @ values, after @ (others - values)
