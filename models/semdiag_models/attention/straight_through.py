"""Top-k attention whose scores get gradients as if every key were kept."""

import torch
from torch import Tensor

from semdiag_models.dropout import dropout as drop


def straight_through_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, selected: Tensor, dropout: float
) -> Tensor:
    """Mix values with the weights of the selected keys, but differentiate the scores with the weights of all keys.

    With scores s = scale · q kᵀ, selected keys S, w the softmax of s over S (0 elsewhere), p the softmax of s over
    all valid keys, m the dropout (0, or 1/(1 - dropout)) and g the gradient of a query's output:

    - forward: Σ_j m_j w_j v_j, as in :func:`~semdiag_models.attention.selected_attention.selected_attention`;
    - gradient of v_j: m_j w_j g, that of the forward pass;
    - gradient of s: (diag(p) - p pᵀ) a with a_j = m_j ⟨g, v_j⟩ **for all valid keys j**, where the derivative of
      the forward pass has w instead of p. Keys outside S also have a gradient.

    In other words, the weights are p + stop_gradient(w - p): the straight-through estimator of Bengio, Léonard and
    Courville (2013) for the selection. Deviation: not in the paper.

    Args:
        q: queries (B, H, L, D).
        k: keys (B, H, L, D).
        v: values (B, H, L, D).
        scale: factor on the scores.
        valid: (B, L) bool, keys that may be attended to; None means all.
        selected: (B, H, L, K) int64 positions of the selected keys, valid ones, distinct in a row; -1 for none.
        dropout: probability with which a weight is dropped; 0 outside training.

    Returns:
        Mixed values (B, H, L, D); zero for a query without a selected key. All scores are held, (B, H, L, L).

    Example:
        >>> q, k, v = torch.randn(3, 1, 1, 4, 2, dtype=torch.float64)
        >>> one_key = torch.tensor([[[[0], [2], [1], [3]]]])  # its weight is 1 whatever its score
        >>> mixed = straight_through_attention(q.requires_grad_(), k, v, 1.0, None, one_key, 0.0)
        >>> torch.equal(mixed[0, 0], v[0, 0, [0, 2, 1, 3]])
        True
        >>> bool(torch.autograd.grad(mixed.sum(), q)[0].any())
        True
    """
    length, least = k.shape[2], torch.finfo(q.dtype).min
    scores = scale * (q @ k.mT)
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, None, :], least)
    of_all = scores.softmax(-1)
    with torch.no_grad():
        places = selected.masked_fill(selected < 0, length)
        kept = scores.new_zeros(*scores.shape[:-1], length + 1, dtype=torch.bool).scatter_(-1, places, True)
        left_out = ~kept[..., :length]
        of_selected = scores.masked_fill(left_out, least).softmax(-1).masked_fill_(left_out, 0)
    weights = of_selected + (of_all - of_all.detach())  # the difference is 0, exactly
    return drop(weights, dropout, training=dropout > 0) @ v
