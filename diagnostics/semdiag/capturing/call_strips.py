"""Strips of calls of attention: their scores' parts, what their queries see, and the largest of their values."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.mathematics.score_strips import largest_scores, part_of

AT_ONCE_ELSEWHERE = 2**26
_SORTED = 512  # keys up to which sorting a row is faster than partitioning it
# Parts of module names whose keys and queries come from different sequences.
CROSS = ("cross", "encoder_attn", "encdec", "enc_dec", "encoder_decoder", "multihead_attn")


@dataclass(frozen=True, eq=False)
class Strip:
    """Some samples, heads, queries and keys of a call."""

    samples: slice
    heads: slice
    queries: slice
    keys: slice | Tensor  # positions, in rising order where they are a tensor
    banded: bool = False  # whether only keys near the queries, and sinks, are in it

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """Index of the strip's rows in a tensor (B, H, Lq, …)."""
        return self.samples, self.heads, self.queries


def number_of_keys(call: AttentionCall) -> Tensor:
    """Return how many keys each query attends to without the mask, int32, broadcastable to (B, H, Lq)."""
    queries = call.q.shape[2]
    length = call.k.shape[2]
    if call.allowed is None and call.selected is None:
        return _numbers(queries, length, call.first_query if call.causal else None, call.q.device)
    return join_strips([count_true(allowed) for allowed in allowed_rows(call)], 2)


@lru_cache(maxsize=16)
def _numbers(queries: int, length: int, first: int | None, device: torch.device) -> Tensor:
    before = length if first is None else first
    numbers = torch.arange(1, queries + 1, dtype=torch.int32, device=device) + before
    return numbers.clamp(max=length)[None, None]


def allowed_rows(call: AttentionCall) -> Iterator[Tensor]:
    """Yield the keys that a few queries may attend to, with one entry for samples or heads that are all alike."""
    step = max(1, AT_ONCE_ELSEWHERE // (call.k.shape[2] * len(call.q)))
    for start in range(0, call.q.shape[2], step):
        yield narrowed(allowed_mask(call.part(slice(None), slice(start, start + step))))


def strip_part(values: Tensor | None, strip: Strip) -> Tensor | None:
    """Return a strip's part of a tensor broadcastable to (B, H, Lq, Lk)."""
    part = part_of(values, strip.samples, strip.queries)
    if part is None:
        return None
    part = part[:, heads_of(part, strip)]
    return part[..., strip.keys] if part.shape[3] > 1 else part


def heads_of(values: Tensor, strip: Strip) -> slice:
    """Return the heads of a strip among those of a tensor that may have one for all."""
    return strip.heads if values.shape[1] > 1 else slice(None)


def key_positions(keys: slice | Tensor, call: AttentionCall) -> Tensor:
    """Return the positions of a strip's keys."""
    return torch.arange(keys.start, keys.stop, device=call.q.device) if isinstance(keys, slice) else keys


def key_heads(values: Tensor, strip: Strip, call: AttentionCall) -> Tensor:
    """Return a strip's part of keys or values, (b, hk, n, D), with one head for the query heads that share it."""
    shared = call.q.shape[1] // call.k.shape[1]
    return values[strip.samples, strip.heads.start // shared : -(-strip.heads.stop // shared)][:, :, strip.keys]


def different_key_heads(k: Tensor) -> int:
    """Return the number of key heads (B, Hk, Lk, D) of which equally many copies follow one another."""
    heads = k.shape[1]
    first = [0, *(n for n in range(1, heads) if not torch.equal(k[:, n], k[:, n - 1]))]
    return len(first) if heads % len(first) == 0 and first == [*range(0, heads, heads // len(first))] else heads


def products(rows: Tensor, columns: Tensor, factor: float = 1.0) -> Tensor:
    """Return factor · rows @ columns, (b, h, r, m) and (b, hk, m, n), where groups of heads share columns."""
    batch, heads, length, width = rows.shape
    shared = columns.shape[1]
    left = rows.reshape(batch * shared, heads * length // shared, width)
    product = torch.bmm(left if factor == 1 else left * factor, columns.flatten(0, 1))
    return product.view(batch, heads, length, columns.shape[3])


def narrowed(mask: Tensor) -> Tensor:
    """Return a mask (B, H, Lq, Lk) before expansion: with one entry for samples, or heads, that are all alike."""
    one = [slice(1) if step == 0 else slice(None) for step in mask.stride()[:2]]
    return mask[tuple(one)]


def count_true(mask: Tensor) -> Tensor:
    """Return the number of true entries in each row, int32; five times faster than summing bools."""
    return mask.view(torch.uint8).sum(-1, dtype=torch.int32)


def is_true_on_cpu(value: Tensor) -> bool:
    """Return whether a tensor on the CPU is true; False on another device, for which we do not wait."""
    return value.device.type == "cpu" and bool(value)


def allowed_mask(part: AttentionCall) -> Tensor:
    """Return the keys that each query attends to without the mask, (B, H, Lq, Lk) bool."""
    size = (*part.q.shape[:3], part.k.shape[2])
    allowed = torch.ones((), dtype=torch.bool, device=part.q.device) if part.allowed is None else part.allowed
    allowed = allowed.expand(size)
    if part.selected is None:
        return allowed
    # the last column takes the position -1
    chosen = torch.zeros(*size[:3], size[3] + 1, dtype=torch.bool, device=part.q.device)
    places = part.selected.where(part.selected >= 0, size[3]).expand(*size[:3], -1)
    return chosen.scatter_(3, places, torch.ones_like(places, dtype=torch.bool))[..., :-1] & allowed


def real_first(real: Tensor, call: AttentionCall) -> Tensor | None:
    """Return an order of the keys that puts those before the first key that a query sees (padding) at the end."""
    first = real.int().argmax(-1, keepdim=True)
    unmasked = call.allowed is None and call.selected is None
    if unmasked or call.first_query or call.keys_before or not bool(first.any()):
        return None
    length = real.shape[-1]
    return (torch.arange(length, device=first.device) + first) % length


def ordered(rows: Tensor, order: Tensor | None) -> Tensor:
    """Return rows (B, …, Lk) with their keys in an order from :func:`real_first`."""
    return rows if order is None else rows.gather(-1, order[:, None, None].expand_as(rows))


def mark_largest(values: Tensor, k: Tensor) -> Tensor:
    """Return which values are among the k largest of their row, k by head; the first of equal ones, never -inf."""
    length = values.shape[-1]
    if values.device.type != "cpu":  # to look for equal values would wait for the device
        places = values.argsort(dim=-1, descending=True, stable=True)
        ranked = (torch.arange(length, device=k.device) < k).expand(values.shape)
        return torch.zeros_like(ranked).scatter_(-1, places, ranked) & (values != -torch.inf)
    mask = ~(values < _bound(values, k.clamp(max=length)))  # NaN counts as the largest
    doubtful = count_true(mask) > k[..., 0]  # some of equal values must go
    if bool(doubtful.any()):
        number = k[..., 0].expand(doubtful.shape)[doubtful][:, None]
        count = min(int(number.max()), length - 1)
        if count == 0:
            return mask & ~doubtful[..., None]
        rows = values[doubtful]
        places = largest_scores(rows, count)[1]
        ranked = (torch.arange(count, device=k.device) < number).expand(places.shape)
        mask[doubtful] = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, places, ranked)
    return mask


def _bound(values: Tensor, k: Tensor) -> Tensor:
    """Return each row's k-th largest value (…, 1), at least the lowest finite number; +inf where k is 0."""
    length = values.shape[-1]
    counts = sorted(set(k.flatten().tolist()) - {0})
    array = values.detach().numpy()  # NumPy sorts with vector instructions
    if length > _SORTED and len(counts) == 1:
        rising = torch.from_numpy(np.partition(array, length - counts[0], -1))
    else:
        rising = torch.from_numpy(np.sort(array, -1))
    places = (length - k).clamp(max=length - 1).expand(*values.shape[:-1], 1)
    bound = rising.gather(-1, places).clamp(min=torch.finfo(values.dtype).min)
    return bound.masked_fill((k == 0).expand(bound.shape), torch.inf)


@lru_cache(maxsize=64)
def integers(*numbers: int, device: torch.device) -> Tensor:
    """Return integers on a device; a tensor made from numbers would wait for the device each time."""
    return torch.tensor(numbers, device=device)


@dataclass(frozen=True, eq=False)
class QueryReach:
    """What the queries of a call see."""

    real: Tensor  # keys that some query sees, (B or 1, Lk) bool
    in_step: bool  # whether the last key that query i sees in any sample is the token at first_query + i
    later: bool  # whether a query sees a key behind its own position


def query_reach(call: AttentionCall) -> QueryReach:
    """Return what the queries of a call see."""
    queries = call.q.shape[2]
    length = call.k.shape[2]
    device = call.q.device
    first = call.first_query
    if call.allowed is None and call.selected is None:
        visible = min(length, first + queries) if call.causal else length
        in_step = first + queries <= length and (call.causal or (queries == 1 and first == length - 1))
        real = (torch.arange(length, device=device) < visible)[None]
        return QueryReach(real, in_step, later=first < visible - 1 and not call.causal)
    parts = [(allowed.any(1).any(1), allowed.any(0).any(0)) for allowed in allowed_rows(call)]
    by_query = join_strips([in_any_sample for _, in_any_sample in parts], 0)
    last = (by_query * torch.arange(1, length + 1, device=device)).amax(-1) - 1
    places = torch.arange(first, first + queries, device=device)
    real = torch.stack([part for part, _ in parts]).any(0)
    return QueryReach(real, torch.equal(last, places), bool((last > places).any()))


def is_square(call: AttentionCall) -> bool:
    """Return whether query i of a call is token i of its keys, as far as one can tell."""
    return call.q.shape[2] == call.k.shape[2] and not any(word in call.module.lower() for word in CROSS)


def join_strips(parts: list[Tensor], axis: int) -> Tensor:
    """Join tensors; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
