"""Find the positions of queries among keys, some of which come from a cache or belong to no token."""

import torch
from torch import Tensor


def first_query(allowed: Tensor | None, queries: int, keys: int) -> int:
    """Return the position of query 0 among the tokens' keys."""
    if allowed is None or queries == keys:
        return keys - queries
    by_any = allowed.any(1)
    seen = by_any[:, -1].any(0).nonzero()
    last = max(0, int(seen.max()) + 1 - queries) if len(seen) else keys - queries
    if by_any.shape[1] < 2 or keys < queries:
        return last
    is_seen, first = by_any.to(torch.uint8).max(1)  # (B, Lk): is a key seen, and by which query first
    place = torch.arange(keys, device=first.device) - first
    place = place[is_seen.bool() & (place >= 0) & (place <= keys - queries)]
    votes = torch.bincount(place, minlength=keys - queries + 1)
    best = (votes == votes.max()).nonzero().flatten()
    return last if last in best else int(best[-1])


def others_behind(allowed: Tensor | None, end: int, keys: int) -> bool:
    """Return whether queries attend to keys after their tokens', which a cache's unused room would not allow."""
    return end < keys and (allowed is None or bool(allowed[..., end:].any()))
