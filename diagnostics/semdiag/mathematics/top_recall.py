"""How many of the largest scores a selection finds that does not look at all of them."""

import torch
from torch import Tensor

_STRIP = 2**20  # scores held at a time


@torch.no_grad()
def top_recall(
    q: Tensor, k: Tensor, scale: float, selected: Tensor, top: int, allowed: Tensor | None = None
) -> Tensor:
    """Return the recall of the true top-k: |S_i ∩ T_i| / |T_i|, T_i the keys of the largest scores of query i.

    T_i are ``top`` keys, or all allowed ones if there are fewer. Ties are broken arbitrarily.

    Source: docs/theory.md#hashes-and-clusters; not in the paper. Deviation: none.

    Args:
        q: queries (B, H, L, D).
        k: keys (B, H, Lk, D).
        scale: factor on the scores; a negative one ranks by the smallest products.
        selected: (B, H, L, K) int64 positions of S_i, distinct in a row, -1 for none.
        top: size of T_i, at least 1.
        allowed: bool, broadcastable to (B, H, L, Lk); None means every key.

    Returns:
        (B, H, L) in [0, 1], of q's dtype: 0 for a query that keeps nothing, NaN if no key is allowed.

    Example:
        >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[4.0], [1.0], [3.0]]]])
        >>> top_recall(q, k, 1.0, torch.tensor([[[[0, 1]]]]), 2).item()
        0.5
    """
    parts = []
    top, per_strip = min(top, k.shape[2]), max(1, _STRIP // (q.shape[1] * q.shape[2] * k.shape[2]))
    for start in range(0, len(q), per_strip):
        part = slice(start, start + per_strip)
        scores = (q[part] * scale) @ k[part].transpose(2, 3)
        if allowed is not None:
            scores = scores.masked_fill(~(allowed[part] if len(allowed) > 1 else allowed), -torch.inf)
        kept = torch.zeros(*scores.shape[:-1], scores.shape[-1] + 1, dtype=torch.bool, device=q.device)
        chosen = selected[part]
        kept.scatter_(-1, chosen.where(chosen >= 0, scores.shape[-1]), True)
        best = scores.topk(top, -1)
        wanted = best.values > -torch.inf
        hits = (kept.gather(-1, best.indices) & wanted).sum(-1)
        parts.append(hits.to(q.dtype) / wanted.sum(-1))
    return torch.cat(parts)
