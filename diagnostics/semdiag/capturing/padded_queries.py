"""Check against a call's keys whether a mask of tokens applies to its queries."""

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall


def own_part(mask: Tensor, call: AttentionCall) -> Tensor | None:
    """Return the part of a token mask that belongs to a call's queries."""
    (batch, _, length, _), first = call.q.shape, call.first_query
    if len(mask) != batch or mask.shape[1] != call.keys_before + first + length:
        return None
    return mask[:, mask.shape[1] - length :]


def own_part_of_folded(mask: Tensor, call: AttentionCall) -> Tensor | None:
    """Return the same if the batch axis holds several rows per sample; the keys tell their order."""
    times = len(call.q) // max(1, len(mask))
    if times < 2:
        return None
    fitting: list[Tensor] = []
    for rows in (mask.repeat_interleave(times, 0), mask.repeat(times, 1)):
        own = own_part(rows, call)
        if own is not None and true_of_keys(rows, own, call):
            fitting.append(own)
    return fitting[0] if fitting and all(torch.equal(own, fitting[0]) for own in fitting) else None


def true_of_keys(mask: Tensor, queries: Tensor, call: AttentionCall) -> bool:
    """Return whether the keys are the mask's tokens, and no real query may attend to padding."""
    mask = mask[:, call.keys_before :]
    if mask.shape[1] > call.k.shape[2]:
        return False
    if bool(mask.all()):
        return True
    seen = call.part().allowed
    if seen is None:
        return call.selected is not None
    by_some = (seen & queries[:, None, :, None]).any(2).any(1)
    length, keys = mask.shape[1], by_some.shape[1]
    return not bool((by_some[:, :length] & ~mask).any()) or (
        length < keys and bool((by_some[:, keys - length :] == mask).all())
    )


def none_without_keys(queries: Tensor, call: AttentionCall) -> bool:
    """Return whether every real query, (B, Lq) bool, sees some key."""
    seen = call.part().allowed
    return seen is None or not bool((queries & ~seen.any(3).any(1)).any())


def are_learned(call: AttentionCall) -> bool:
    """Return whether the queries are learned rather than tokens: equal in two samples whose keys differ."""
    return len(call.q) > 1 and _alike(call.q) and not _alike(call.k)


def _alike(rows: Tensor) -> bool:
    """Return whether the first two samples differ only by rounding, which depends on a row's position."""
    first, second = rows[:2]
    return bool(((second - first).abs() <= 16 * torch.finfo(rows.dtype).eps * first.abs().amax()).all())


def is_of_pairs(mask: Tensor, call: AttentionCall) -> bool:
    """Return whether a mask with as many samples as tokens is one of queries by keys, (L, L), like a causal one."""
    seen = call.part().allowed
    if seen is None or mask.shape != (call.q.shape[2], call.k.shape[2]) or len(mask) != len(call.q):
        return False
    return not bool((seen & ~mask).any()) and bool((seen & ~mask[:, None, None]).any())


def padded_end(call: AttentionCall) -> str | None:
    """Return the end of samples that looks like padding: forbidden to all queries, while its queries see keys."""
    seen, (batch, _, length, _) = call.allowed, call.q.shape
    if seen is None or call.first_query or len(seen) < batch or not seen.shape[3] == call.k.shape[2] == length > 1:
        return None
    keys = seen.any(2, keepdim=True).any(1, keepdim=True)
    if bool(keys.all()):
        return None
    ends = keys.to(torch.int8).diff(dim=3)  # 1 where padding on the left ends, -1 where it begins on the right
    places = [name for name, step in (("last", -1), ("first", 1)) if bool((ends == step).any())]
    if len(places) != 1 or int((ends != 0).sum(3).max()) > 1:
        return None
    past = torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
    if not (bool((seen == keys).all()) or bool((seen == (keys & past)).all())):
        return None
    counted = seen.any(3) if not call.causal else call.part().allowed.any(3)  # type: ignore[union-attr]
    if not bool((counted & ~keys[:, :, 0]).any()):
        return None  # padded queries see nothing, and are left out anyway
    return places[0]


def padded_by_own_mask(call: AttentionCall) -> Tensor | None:
    """Return which fully masked queries are padding: those whose key no other query sees."""
    full, (batch, _, length, _) = call.fully_masked, call.q.shape
    if full is None or call.allowed is None or call.first_query + length > call.k.shape[2]:
        return None
    rows = full.any(-1).all(1).expand(batch, length)
    seen = call.part().allowed.any(1).any(1).expand(batch, -1)  # type: ignore[union-attr]
    own = slice(call.first_query, call.first_query + length)
    real = ~rows | seen[:, own]
    return real if not bool(real.all()) and bool(real.any(1).all()) else None


def real_by_own_mask(call: AttentionCall) -> Tensor | None:
    """Return which queries attend like real tokens, in self-attention of which only the mask is known."""
    seen, (batch, _, length, _) = call.part().allowed, call.q.shape
    if seen is None or length == 1 or call.first_query + length > call.k.shape[2]:
        return None
    seen = seen.expand(batch, seen.shape[1], length, call.k.shape[2]).any(1)
    place = torch.arange(call.first_query, call.first_query + length, device=seen.device)
    real = seen[:, torch.arange(length, device=seen.device), place]
    if not bool((seen == seen[:, :1]).all()):
        everything = seen.all(2)
        everything &= everything.sum(1, keepdim=True) > 1  # a single one: the last query of causal attention
        by_others = (seen & ~everything[:, :, None])[:, :, place].any(1)
        real &= ~everything | by_others
    if call.fully_masked is not None:  # the mask leaves these no key, but others may see theirs
        real |= call.fully_masked.any(-1).all(1) & seen.any(1)[:, place]
    return real if bool(real.any(1).all()) else None
