"""Top-k attention whose scores get gradients as if every key were kept."""

import torch
from torch import Tensor

from semdiag_models.dropout import dropout as drop


def straight_through_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, selected: Tensor, dropout: float
) -> Tensor:
    """Mix values with the weights of the selected keys, but differentiate the scores with the weights of all keys."""
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
