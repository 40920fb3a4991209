"""How much of the dense attention a selection of keys keeps."""

from typing import NamedTuple

import torch
from torch import Tensor


class DenseAgreement(NamedTuple):
    """The result of :func:`dense_agreement` for every query.

    Attributes:
        recalled: (B, H, L) in [0, 1], the share of the dense weight that lies on kept keys.
        hit: (B, H, L) bool, whether the key with the largest dense weight is kept, or one with the same weight.
        best: (B, L), the share that the best choice of as many keys would keep, averaged over heads.
        at_random: (B, L), the expected share kept by a random choice of as many keys.
    """

    recalled: Tensor
    hit: Tensor
    best: Tensor
    at_random: Tensor


@torch.no_grad()
def dense_agreement(scores: Tensor, kept: Tensor, available: Tensor) -> DenseAgreement:
    """Return how much of the dense attention over the available keys a selection, shared by all heads, keeps.

    Formula: p = softmax of z over the available keys A; recalled = Σ_{j ∈ S} p_j, S the kept keys; hit:
    max_{j ∈ S} p_j = max_{j ∈ A} p_j; best: the sum of the |S| largest of p's
    mean over the heads; at random: |S|/|A|.

    Source: not in the paper. DeepSeek-V3.2 trains its indexer towards the heads' mean of p. Deviation: none.

    Args:
        scores: (B, H, L, n) of the dense attention, nats.
        kept: (B, L, n) bool, keys that the selection keeps; unavailable ones do not count.
        available: (B, L, n) bool, keys that it could have kept.

    Returns:
        Four tensors, NaN for queries without an available key.

    Example:
        >>> scores = torch.tensor([[[[4.0, 2.0, 2.0]]]]).log()
        >>> kept = torch.tensor([[[True, False, False]]])
        >>> agreement = dense_agreement(scores, kept, torch.ones_like(kept))
        >>> [round(float(each), 4) for each in agreement]
        [0.5, 1.0, 0.5, 0.3333]
    """
    kept = kept & available
    weights = scores.masked_fill(~available[:, None], -torch.inf).softmax(-1)
    on_kept = weights.masked_fill(~kept[:, None], 0.0)
    ordered = weights.mean(1).sort(-1, descending=True).values.cumsum(-1)
    number, whole = kept.sum(-1), available.sum(-1)
    best = ordered.gather(-1, (number - 1).clamp(min=0)[..., None])[..., 0].masked_fill(number == 0, 0.0)
    return DenseAgreement(
        on_kept.sum(-1), on_kept.amax(-1) == weights.amax(-1), best, number.to(scores.dtype) / whole
    )
