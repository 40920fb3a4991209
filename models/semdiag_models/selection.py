"""Which keys a query attends to, for each kind of attention."""

from functools import lru_cache

import torch
from torch import Tensor

_STRIP = 2**20  # scores held at a time


def select_keys(
    attention: str, k: int | None, q: Tensor, keys: Tensor, scale: float, valid: Tensor | None
) -> Tensor | None:
    """Positions of the keys that each query attends to.

    Args:
        attention: a key of ``ATTENTIONS``.
        k: keys per query; None for full attention.
        q: queries (B, H, L, D).
        keys: keys (B, H, L, D).
        scale: factor on the scores.
        valid: (B, L) bool, keys that may be attended to; None means all.

    Returns:
        None if every valid key is attended to; else (B, H, L, k) int64 positions, -1 where a query has fewer
        than k valid candidates. Banded and block-local positions come in increasing order, top-k ones by
        falling score.
    """
    if k is None:
        return None
    batch, heads, length, _ = q.shape
    if attention == "topk":
        return _heavy_hitters(q, keys, scale, valid, min(k, length))
    fixed = _banded(length, min(k, length)) if attention == "banded" else _block_local(length, k)
    selected = fixed.to(q.device).expand(batch, heads, length, -1)
    if valid is None:
        return selected
    allowed = valid[:, None, None, :].expand(batch, heads, length, length).gather(3, selected.clamp(min=0))
    return selected.masked_fill(~allowed, -1)


@torch.no_grad()
def _heavy_hitters(q: Tensor, keys: Tensor, scale: float, valid: Tensor | None, k: int) -> Tensor:
    batch, heads, length, _ = q.shape
    selected = torch.empty(batch, heads, length, k, dtype=torch.int64, device=q.device)
    per_strip = max(1, _STRIP // (heads * length**2))
    for start in range(0, batch, per_strip):
        s = slice(start, start + per_strip)
        scores = (q[s] * scale) @ keys[s].transpose(2, 3)  # (b, H, L, L)
        if valid is not None:
            scores.masked_fill_(~valid[s, None, None, :], float("-inf"))
        best = scores.topk(k, -1)
        selected[s] = best.indices if valid is None else best.indices.masked_fill(best.values == float("-inf"), -1)
    return selected


@lru_cache(maxsize=32)
def _banded(length: int, k: int) -> Tensor:
    """(L, k): k consecutive keys, (k - 1) // 2 of them left of the query, shifted inward at the ends."""
    start = (torch.arange(length) - (k - 1) // 2).clamp(0, length - k)
    return start[:, None] + torch.arange(k)


@lru_cache(maxsize=32)
def _block_local(length: int, k: int) -> Tensor:
    """(L, k): the keys of the query's own block of k; the last block may be short (-1)."""
    keys = (torch.arange(length) // k * k)[:, None] + torch.arange(k)
    return keys.masked_fill(keys >= length, -1)
