"""Where queries stand among keys of which the first may be a cache's, and the last of no tokens."""

import torch
from torch import Tensor


def first_query(allowed: Tensor | None, queries: int, keys: int) -> int:
    """Position of query 0 among the keys of tokens.

    Query i is the first to see the key of its own token, so each key j that query i sees first speaks for j - i.
    Most keys decide. Keys in front of the queries' own, which are all seen at once, are in one accord with each
    other nowhere; nor are those behind them that sum up several tokens. Where as many speak for the last key that
    the last query sees, or nothing is masked, that is its own: the rule of a cache that may have room left.

    Args:
        allowed: (B, H, Lq, Lk) bool, or broadcastable to it; None means all.
        queries: Lq.
        keys: Lk.

    Example:
        >>> seen = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 1], [1, 1, 1, 0, 1]])  # one key sums up two tokens
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
    found, first = by_any.to(torch.uint8).max(1)  # (B, Lk): whether a query sees a key, and the first that does
    place = torch.arange(keys, device=first.device) - first
    place = place[found.bool() & (place >= 0) & (place <= keys - queries)]
    votes = torch.bincount(place, minlength=keys - queries + 1)
    best = (votes == votes.max()).nonzero().flatten()
    return last if last in best else int(best[-1])


def others_behind(allowed: Tensor | None, end: int, keys: int) -> bool:
    """Whether queries attend to keys behind those of their tokens; a cache's room they do not.

    Args:
        allowed: as in :func:`first_query`.
        end: position behind the last query's own key.
        keys: Lk.
    """
    return end < keys and (allowed is None or bool(allowed[..., end:].any()))
