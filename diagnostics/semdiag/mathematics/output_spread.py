"""How much the outputs of attention differ from query to query."""

from torch import Tensor


def output_spread(mixed: Tensor, counted: Tensor) -> Tensor:
    """Return the fraction of the attention outputs' squared norm that varies from query to query.

    spread = Σ_i ‖o_i − ō‖² / Σ_i ‖o_i‖² with ō the mean of the o_i, over the queries i of a sample and head: 0 if
    all queries get the same mixture of values, as under uniform weights.

    Source: none; rank collapse (Dong et al. 2021) measured by its residual. Deviation: in the Frobenius norm.

    Args:
        mixed: outputs o (B, H, L, D).
        counted: bool, broadcastable to (B, H, L), false for queries that do not count, such as padding.

    Returns:
        (B, H), in [0, 1], in float64; NaN if no query counts or all outputs are 0.

    Example:
        >>> import torch
        >>> output_spread(torch.tensor([[[[1.0, 0.0], [1.0, 2.0]]]]), torch.tensor(True)).tolist()
        [[0.3333333333333333]]
    """
    outputs = mixed.double()
    weight = counted.expand(outputs.shape[:-1]).double()[..., None]
    mean = (weight * outputs).sum(2, keepdim=True) / weight.sum(2, keepdim=True)
    apart = (weight * (outputs - mean).square()).sum((2, 3))
    return apart / (weight * outputs.square()).sum((2, 3))
