"""Find the positions of queries among keys, some of which come from a cache or belong to no token."""

import torch
from torch import Tensor


def first_query(allowed: Tensor | None, queries: int, keys: int) -> int:
    """Return the position of query 0 among the tokens' keys.

    Query i is the first to see its own token's key, so each key j that query i is the first to see votes for j -
    i, and the most votes win. Keys from a cache are all seen first by query 0, so their votes scatter, as do those
    of later keys that sum up several tokens. If the votes tie with the position at which the last query sees its
    own key last, or nothing is masked, that position is taken: the rule of a cache that may have unused room.

    Args:
        allowed: (B, H, Lq, Lk) bool, or broadcastable to it; None means all.
        queries: Lq.
        keys: Lk.

    Example:
        >>> seen = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 1], [1, 1, 1, 0, 1]])  # key 4 sums up two tokens
        >>> first_query(seen.bool()[None, None], 3, 5), first_query(None, 3, 5)
        (0, 2)
    """
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
    """Return whether queries attend to keys after their tokens', which a cache's unused room would not allow.

    Args:
        allowed: as in :func:`first_query`.
        end: position after the last query's own key.
        keys: Lk.
    """
    return end < keys and (allowed is None or bool(allowed[..., end:].any()))
