"""Rules that choose keys (top-k, top-p, windows, random), and the keys that they keep in a call."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import whole_number
from semdiag.mathematics.score_strips import largest_scores, part_of
from semdiag_models import InputError

BLOCK_SCORES = "weight", "best", "mean"
SHARING = "head", "group", "layer"


@dataclass(frozen=True)
class TopK:
    """Each query keeps its sinks, its window, and the k largest scores among its other keys.

    Of equal scores, the one at the lower position is kept. A query with no more keys than that keeps all its keys.

    Args:
        k: number of kept keys, 0 or more; or one number for each head.
        sinks: number of first keys, after padding, that are always kept.
        window: keys less than this many positions from the query are always kept; 1 keeps the query's own key.
        block: above 1, k counts blocks of this many consecutive keys, from the first key that is not padding.
        by: score of a block: ``weight``, the attention weight of its keys; ``best``, their largest score;
            ``mean``, the mean of their scores, which is the score of their mean key.
        shared: heads that keep the same keys: ``head``, each its own; ``group``, heads with the same key head;
            ``layer``, all heads of a layer. Keys are then ranked by their mean attention weight over these heads.
        every: with ``shared="layer"``, number of consecutive layers that use the keys of the first of them.
        centred: where queries also see later keys, whether ``window`` is the number of nearest keys in all, not of
            those on each side.

    Raises:
        InputError: if a number is negative, nothing is kept, or a word is unknown.

    Example:
        >>> TopK(16, sinks=4, window=64) == TopK(16, 4, 64), TopK(2, block=16, by="mean").by
        (True, 'mean')
    """

    k: int | Sequence[int]
    sinks: int = 0
    window: int = 0
    block: int = 1
    by: Literal["weight", "best", "mean"] = "weight"
    shared: Literal["head", "group", "layer"] = "head"
    every: int = 1
    centred: bool = False

    def __post_init__(self) -> None:
        _check(self.k, self.sinks, self.window, self.block)
        if self.by not in BLOCK_SCORES or self.shared not in SHARING:
            raise InputError(
                f"by is one of {', '.join(BLOCK_SCORES)}, shared one of {', '.join(SHARING)}. Got {self.by!r}, "
                f"{self.shared!r}."
            )
        if whole_number(self.every, "every") < 1 or (self.every > 1 and self.shared != "layer"):
            raise InputError(f'every is at least 1, and above 1 only with shared="layer". Got {self.every}.')
        if self.shared != "head" and not isinstance(self.k, int):
            raise InputError(f"Heads that share their keys need a single k. Got {self.k}.")


@dataclass(frozen=True)
class TopP:
    """Each query keeps the fewest keys that hold a fraction p of its attention weight.

    K_i holds the largest scores until Σ_{j in K_i} p_ij ≥ p; of equal scores, the one at the lower position comes
    first.

    Source: nucleus sampling's rule, applied to attention (Lin et al. 2025, Twilight). Deviation: none.

    Args:
        p: fraction of the attention weight, above 0, at most 1.

    Raises:
        InputError: if p is outside this range.

    Example:
        >>> TopP(0.9)
        TopP(p=0.9)
    """

    p: float

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise InputError(f"p is a fraction of the attention weight, above 0 and at most 1. Got {self.p}.")


@dataclass(frozen=True)
class RandomK:
    """A control: each query keeps its sinks, its window, and k of its other keys, drawn at random.

    The draw depends on seed, layer, head and position, not on batch or device: it is the same for all samples and
    in every forward pass.

    Args:
        k: number of keys drawn, 0 or more; or one number for each head.
        seed: random seed for the draw.
        sinks: number of first keys that are always kept, as in :class:`TopK`.
        window: distance within which keys are always kept, as in :class:`TopK`.

    Raises:
        InputError: if a number is negative, or nothing is kept.
    """

    k: int | Sequence[int]
    seed: int = 0
    sinks: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        _check(self.k, self.sinks, self.window, 1)


def Window(width: int, sinks: int = 0) -> TopK:  # noqa: N802 (reads as a kind of mask)
    """Each query keeps ``width`` keys in all: the first ``sinks`` keys, and the nearest other keys.

    In a causal model it keeps as many keys as ``TopK(width)``. In other models the window is cut off at both ends
    of the sequence, or covers the sinks; queries there keep fewer.

    Args:
        width: number of kept keys, above ``sinks``; in a causal model, the query's own key and the
            ``width - sinks - 1`` keys before it, otherwise as many on either side.
        sinks: number of first keys, after padding, that are always kept.

    Raises:
        InputError: if width is not above sinks, or sinks are negative.

    Example:
        >>> Window(64, sinks=4) == TopK(0, sinks=4, window=60, centred=True)
        True
    """
    if whole_number(width, "width") <= whole_number(sinks, "sinks"):
        raise InputError(f"A window keeps its sinks and at least 1 key more. Got width={width}, sinks={sinks}.")
    return TopK(0, sinks, width - sinks, centred=True)


Rule = TopK | TopP | RandomK
Keep = Rule | Mapping[int | str | tuple[str, int], Rule]


def check_keep(keep: Any) -> None:
    """Refuse anything but a rule or a dictionary of rules."""
    rules = list(keep.values()) if isinstance(keep, Mapping) else [keep]
    for rule in rules:
        if not isinstance(rule, Rule):
            raise InputError(
                f"keep must be a rule like TopK(3), or a dictionary of rules by layer or module. Got {rule!r}."
            )


def rule_for(keep: Keep, call: AttentionCall) -> Rule:
    """Return the rule for one call: the only rule, or the call's entry in the mapping."""
    if isinstance(keep, Rule):
        return keep
    for key in ((call.module, call.occurrence), call.module, call.layer):
        if key in keep:
            return keep[key]
    raise InputError(
        f"keep has no rule for {call.module or 'the model itself'} (layer {call.layer}, occurrence "
        f"{call.occurrence}); it names {', '.join(map(str, keep)) or 'nothing'}."
    )


def _check(k: int | Sequence[int], sinks: int, window: int, block: int) -> None:
    counts = list(k) if isinstance(k, Sequence) else [k]
    for name, value in (
        *(("k", count) for count in counts),
        ("sinks", sinks),
        ("window", window),
        ("block", block),
    ):
        whole_number(value, name)
    if not counts or min(counts) < 0 or min(sinks, window) < 0 or block < 1:
        raise InputError(
            f"k, sinks and window must be at least 0, block at least 1. Got k={k}, sinks={sinks}, "
            f"window={window}, block={block}."
        )
    if min(counts) == 0 and not sinks and not window:
        raise InputError(f"A mask must keep something: k of at least 1, sinks or a window. Got k={k}.")


_AT_ONCE = 2**19  # scores held at a time on a CPU, where they stay near the processor
_AT_ONCE_ELSEWHERE = 2**26
_BAND = 64, 256  # least and most queries of a strip that looks at a band of keys
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


class Choice:
    """The keys that a rule keeps in one call: strip by strip of its queries, or all at once.

    Attributes:
        rule: the rule.
        call: the call.
        counts: number k of keys for each head.
        near: numbers of positions before and behind a query within which keys are always kept; None: no window.
        sinks: first keys that are always kept, (B or 1, Lk) bool; None: none.
        whole: whether the rule cannot drop a key.
    """

    def __init__(self, rule: Rule, call: AttentionCall, chosen: Tensor | None = None, keep: bool = False) -> None:
        heads, length = call.q.shape[1], call.k.shape[2]
        self.rule, self.call, self.near, self.sinks = rule, call, None, None
        self.counts = [1] * heads if isinstance(rule, TopP) else _counts(rule, call)
        self._block = rule.block if isinstance(rule, TopK) else 1
        self.whole = not isinstance(rule, TopP) and min(self.counts) * self._block >= length
        self._order: Tensor | None = None
        self._draws, self._drawn = torch.Generator(), ((slice(0), slice(0)), torch.empty(0))
        self._k = integers(*self.counts, device=call.q.device)[:, None, None]
        grouped = isinstance(rule, TopK) and rule.shared == "group" and not self.whole
        self._key_heads = different_key_heads(call.k) if grouped else call.k.shape[1]
        # A choice that later layers use is held as a mask, (B, 1, Lq, Lk) bool.
        self._reused, self.chosen = chosen is not None, chosen
        if self.whole or self._reused:
            return
        if keep:
            size = (len(call.q), 1, call.q.shape[2], length)
            self.chosen = torch.zeros(size, dtype=torch.bool, device=call.q.device)
        if not isinstance(rule, TopP) and (self._block > 1 or rule.sinks or rule.window):
            reach = _reach(call)
            self._order = real_first(reach.real, call) if self._block > 1 else None
            self.sinks, self.near = _fixed(rule, call, reach)

    @property
    def by_position(self) -> bool:
        """Whether no key is chosen for its score or by a draw."""
        return max(self.counts) == 0 and not self._reused

    @property
    def by_threshold(self) -> bool:
        """Whether, beside keys kept for their position, each query keeps its k largest scores."""
        rule = self.rule
        single = isinstance(rule, TopK) and rule.block == 1 and (rule.shared == "head" or self.by_position)
        return single and self.chosen is None and self.call.selected is None

    def strips(self, banded: bool = False) -> Iterator[Strip]:
        """Yield strips that cover the call: rows of scores, or only the keys near their queries and sinks."""
        call = self.call
        batch, all_heads, queries, _ = call.q.shape
        length, elsewhere = call.k.shape[2], call.q.device.type != "cpu"
        most = _AT_ONCE_ELSEWHERE if elsewhere else _AT_ONCE
        heads = 1 if isinstance(self.rule, RandomK) else all_heads  # draws follow one another, head by head
        banded = banded and self.by_position and self.near is not None and call.selected is None
        together = heads == 1 or getattr(self.rule, "shared", "") == "layer" or (self.by_position and not banded)
        if not together and batch * heads * queries * length > most:
            heads //= self._key_heads
        if banded and self.near is not None:
            width = sum(self.near) + 1
            rows = min(max(_BAND[0], width if call.causal else width // 2), _BAND[1])
            size = width + rows
        else:
            size = length
            rows = max(1, most // (heads * size))
        rows = min(rows, queries)
        samples = min(batch, max(1, most // (heads * rows * size)))
        for head in range(0, all_heads, heads):
            for start in range(0, queries, rows):
                r = slice(start, min(start + rows, queries))
                keys = self._band(r) if banded else self._seen(r)
                for first in range(0, batch, samples):
                    b = slice(first, min(first + samples, batch))
                    yield Strip(b, slice(head, head + heads), r, keys, banded)

    def widened(self, strip: Strip) -> Strip:
        """Return a strip with all keys that its queries may see."""
        return replace(strip, keys=self._seen(strip.queries), banded=False)

    def _seen(self, rows: slice) -> slice:
        call, length = self.call, self.call.k.shape[2]
        short = call.causal and self._order is None and call.selected is None
        return slice(0, max(1, min(length, call.first_query + rows.stop)) if short else length)

    def _band(self, rows: slice) -> slice | Tensor:
        assert self.near is not None
        before, behind = self.near
        stop = min(self._seen(rows).stop, self.call.first_query + rows.stop + behind)
        start = max(0, min(stop - 1, self.call.first_query + rows.start - before))
        if self.sinks is None or start == 0:
            return slice(start, stop)
        device = self.sinks.device
        columns = self.sinks[:, :start].any(0).nonzero()[:, 0]
        return torch.cat([columns, torch.arange(start, stop, device=device)])

    def allowed(self, strip: Strip) -> Tensor:
        """Return the keys that queries attend to without the mask, bool, broadcastable to the strip's scores."""
        call, b, r, keys = self.call, strip.samples, strip.queries, strip.keys
        if call.selected is not None:
            return narrowed(allowed_keys(call.part(b, r)))[:, _heads(call.selected, strip)]
        allowed = _strip_of(call.allowed, strip)
        places = _places(keys, call)
        if call.causal:
            own = torch.arange(r.start, r.stop, device=places.device) + call.first_query
            past = places <= own[:, None]
            return past[None, None] if allowed is None else allowed & past
        shape = (1, 1, r.stop - r.start, len(places))
        true = torch.ones((), dtype=torch.bool, device=places.device)
        return true.expand(shape) if allowed is None else allowed.expand(*allowed.shape[:2], *shape[2:])

    def scores(self, strip: Strip) -> Tensor:
        """Return a strip's scores, (b, h, r, n), those of forbidden keys included."""
        call, b, h, r = self.call, strip.samples, strip.heads, strip.queries
        dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        q = call.q[b, h, r].to(dtype)
        k = key_heads(call.k, strip, call).to(dtype)
        scores = products(q, k.mT, call.scale)
        if call.softcap is not None:
            scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
        bias = _strip_of(call.bias, strip)
        return scores if bias is None else scores.add_(bias)

    def fixed(self, strip: Strip) -> Tensor | None:
        """Return the keys kept for their position alone, broadcastable to the strip's scores; None: none."""
        fixed = None
        if self.sinks is not None:
            own = self.sinks if len(self.sinks) == 1 else self.sinks[strip.samples]
            fixed = own[:, strip.keys][:, None, None]
        if self.near is not None:
            places = _places(strip.keys, self.call)
            rows = torch.arange(strip.queries.start, strip.queries.stop, device=places.device)
            back = (rows + self.call.first_query)[:, None] - places
            near = ((back <= self.near[0]) & (back >= -self.near[1]))[None, None]
            fixed = near if fixed is None else fixed | near
        return fixed

    def kept(self, strip: Strip, scores: Tensor | None, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Return a strip's kept keys and their number in each row; some ``scores`` of others become -inf."""
        fixed, b, r = self.fixed(strip), strip.samples, strip.queries
        if self._reused:
            assert self.chosen is not None
            kept = allowed & self.chosen[b, :, r, strip.keys].to(allowed.device)
        elif self.by_position:
            assert fixed is not None
            kept = fixed & allowed
        else:
            free = allowed if fixed is None else allowed & ~fixed
            kept = self._free(strip, scores, free, fixed is not None)
            if fixed is not None:
                kept = kept | (fixed & allowed)
        number = counted(kept)
        if not (strip.banded or bool(number.all())):  # a query without any key keeps all
            kept = kept | (allowed & (number == 0)[..., None])
            number = counted(kept)
        if self.chosen is not None and not self._reused:
            self.chosen[b, :, r, strip.keys] = kept[:, :1]
        return kept, number

    def _free(self, strip: Strip, scores: Tensor | None, free: Tensor, others: bool) -> Tensor:
        """Return the keys kept for their scores or by a draw, among those that are free."""
        k = self._k[strip.heads]
        if isinstance(self.rule, RandomK):
            drawn = self._priorities(self.rule, strip)[..., strip.keys]
            return _largest(drawn.masked_fill(~free, -torch.inf), k) & free
        assert scores is not None
        scores = _hide_(scores.clone() if others else scores, free)
        if isinstance(self.rule, TopP):
            return _heaviest(scores, self.rule.p) & free
        order = self._order if self._order is None or len(self._order) == 1 else self._order[strip.samples]
        heads = scores.shape[1]
        groups = {"head": heads, "group": heads * self._key_heads // self.call.q.shape[1], "layer": 1}
        kept = _ranked(self.rule, k, scores, self.call, strip, order, groups[self.rule.shared])
        return kept if self.rule.block == 1 and self.rule.shared == "head" else kept & free

    def _priorities(self, rule: RandomK, strip: Strip) -> Tensor:
        """Return random numbers for all keys, (h, r, Lk): one sequence over all strips of heads and queries."""
        h, r, call = strip.heads, strip.queries, self.call
        if self._drawn[0] != (h, r):
            if h.start == r.start == 0:
                self._draws.manual_seed(rule.seed * 100_003 + 1009 * call.layer + call.occurrence)
            size = (h.stop - h.start, r.stop - r.start, call.k.shape[2])
            drawn = torch.rand(size, generator=self._draws, dtype=torch.float64, device="cpu")
            self._drawn = (h, r), drawn.to(call.q.device, torch.float32 if call.q.device.type == "mps" else None)
        return self._drawn[1]


class SharedChoices:
    """The choices of rules, where layers may reuse the choice of an earlier layer."""

    def __init__(self) -> None:
        self._layer = 0
        self._first: Choice | None = None

    def choice(self, rule: Rule, call: AttentionCall) -> Choice:
        """Return the choice for a call; it may be an earlier layer's."""
        every = rule.every if isinstance(rule, TopK) else 1
        if every == 1:
            return Choice(rule, call)
        first = self._first
        if first is not None and 0 < call.layer - self._layer < every:
            like = (len(call.q), call.q.shape[2], call.k.shape[2])
            if like == (len(first.call.q), first.call.q.shape[2], first.call.k.shape[2]):
                return Choice(rule, call, first.chosen) if not first.whole else first
        self._layer, self._first = call.layer, Choice(rule, call, keep=True)
        return self._first


def kept_keys(rule: Rule, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    """Return the keys that a rule keeps for each query of a call, and those that the call allows; None: all."""
    return all_kept(Choice(rule, call))


def all_kept(choice: Choice) -> tuple[Tensor, Tensor] | None:
    """Return the kept and the allowed keys of a whole call, (B, H, Lq, Lk) bool; None where no key is dropped."""
    if choice.whole:
        return None
    call = choice.call
    size = (*call.q.shape[:3], call.k.shape[2])
    heads: list[list[list[Tensor]]] = []
    for strip in choice.strips():
        if strip.samples.start == 0:
            if strip.queries.start == 0:
                heads.append([])
            heads[-1].append([])
        allowed = choice.allowed(strip)
        kept, _ = choice.kept(strip, None if choice.by_position else choice.scores(strip), allowed)
        heads[-1][-1].append(F.pad(kept, (0, size[3] - kept.shape[3])))
    kept = _cat([_cat([_cat(samples, 0) for samples in rows], 2) for rows in heads], 1)
    allowed = narrowed(allowed_keys(call.part()))
    if not bool((allowed & ~kept).any()):
        return None
    some = allowed.any(-1, keepdim=True)
    kept = kept if bool(some.all()) else kept | ~some
    return kept.expand(size), allowed.expand(size)


def _cat(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def number_of_keys(call: AttentionCall) -> Tensor:
    """Return how many keys each query attends to without the mask, int32, broadcastable to (B, H, Lq)."""
    queries, length = call.q.shape[2], call.k.shape[2]
    if call.allowed is None and call.selected is None:
        return _numbers(queries, length, call.first_query if call.causal else None, call.q.device)
    return _cat([counted(allowed) for allowed in _rows(call)], 2)


@lru_cache(maxsize=16)
def _numbers(queries: int, length: int, first: int | None, device: torch.device) -> Tensor:
    own = torch.arange(1, queries + 1, dtype=torch.int32, device=device) + (length if first is None else first)
    return own.clamp(max=length)[None, None]


def _rows(call: AttentionCall) -> Iterator[Tensor]:
    """Yield the keys that a few queries may attend to, with one entry for samples or heads that are all alike."""
    step = max(1, _AT_ONCE_ELSEWHERE // (call.k.shape[2] * len(call.q)))
    for start in range(0, call.q.shape[2], step):
        yield narrowed(allowed_keys(call.part(slice(None), slice(start, start + step))))


def _strip_of(values: Tensor | None, strip: Strip) -> Tensor | None:
    """Return a strip's part of a tensor broadcastable to (B, H, Lq, Lk)."""
    part = part_of(values, strip.samples, strip.queries)
    if part is None:
        return None
    part = part[:, _heads(part, strip)]
    return part[..., strip.keys] if part.shape[3] > 1 else part


def _heads(values: Tensor, strip: Strip) -> slice:
    return strip.heads if values.shape[1] > 1 else slice(None)


def _places(keys: slice | Tensor, call: AttentionCall) -> Tensor:
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
    (batch, heads, length, width), shared = rows.shape, columns.shape[1]
    left = rows.reshape(batch * shared, heads * length // shared, width)
    product = torch.bmm(left if factor == 1 else left * factor, columns.flatten(0, 1))
    return product.view(batch, heads, length, columns.shape[3])


def narrowed(mask: Tensor) -> Tensor:
    """Return a mask (B, H, Lq, Lk) before expansion: with one entry for samples, or heads, that are all alike."""
    one = [slice(1) if step == 0 else slice(None) for step in mask.stride()[:2]]
    return mask[tuple(one)]


def counted(kept: Tensor) -> Tensor:
    """Return the number of true entries in each row, int32; five times faster than summing bools."""
    return kept.view(torch.uint8).sum(-1, dtype=torch.int32)


def _hide_(scores: Tensor, free: Tensor) -> Tensor:
    """Set the scores of keys that are not free to -inf, in place; adding -inf takes a fifth of the time."""
    if bool(scores.sum().isfinite()):
        limit = torch.zeros(free.shape, dtype=scores.dtype, device=scores.device).masked_fill(~free, -torch.inf)
        return scores.add_(limit)
    return scores.masked_fill_(~free, -torch.inf)


def _counts(rule: TopK | RandomK, call: AttentionCall) -> list[int]:
    heads = call.q.shape[1]
    if isinstance(rule.k, int):
        return [rule.k] * heads
    if len(rule.k) != heads:
        raise InputError(f"{call.module} has {heads} heads; k has {len(rule.k)} numbers: {list(rule.k)}.")
    return list(rule.k)


def allowed_keys(part: AttentionCall) -> Tensor:
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
    if call.first_query or call.keys_before or not bool(first.any()):
        return None
    length = real.shape[-1]
    return (torch.arange(length, device=first.device) + first) % length


def ordered(rows: Tensor, order: Tensor | None) -> Tensor:
    """Return rows (B, …, Lk) with their keys in an order from :func:`real_first`."""
    return rows if order is None else rows.gather(-1, order[:, None, None].expand_as(rows))


def _ranked(
    rule: TopK, k: Tensor, scores: Tensor, call: AttentionCall, strip: Strip, order: Tensor | None, sets: int
) -> Tensor:
    """Return the k largest scores, or blocks, of each head or of heads that share a choice, in so many sets."""
    heads, length = scores.shape[1], scores.shape[3]
    if sets < heads:
        several = scores.view(len(scores), sets, heads // sets, *scores.shape[2:])
        if call.sinks is not None:
            sinks = call.sinks[strip.heads].to(several.dtype).view(1, sets, -1, 1, 1)
            weights = (several - torch.logaddexp(several.logsumexp(-1, keepdim=True), sinks)).exp()
        else:
            weights = several.softmax(-1)
        weights, hidden = weights.nan_to_num(0).mean(2), several.amax(2) == -torch.inf
        # A weight that underflows must not become -inf, which means a hidden key.
        smallest = torch.finfo(weights.dtype).tiny
        scores, k = weights.clamp(min=smallest).log().masked_fill(hidden, -torch.inf), k[:1]
    kept = _largest(block_scores(ordered(scores, order), rule.block, rule.by), k)
    if rule.block > 1:
        back = None if order is None else order.argsort(-1)
        kept = ordered(kept.repeat_interleave(rule.block, -1)[..., :length], back)
    return kept.repeat_interleave(heads // sets, 1) if rule.shared == "group" else kept


def _heaviest(scores: Tensor, p: float) -> Tensor:
    """Return which scores are the fewest largest ones whose weights add up to p."""
    ordered, places = scores.sort(dim=-1, descending=True, stable=True)
    weights = ordered.softmax(-1).nan_to_num(0)
    before = weights.cumsum(-1) - weights  # weight of all keys before
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, places, before < p)


def _largest(values: Tensor, k: Tensor) -> Tensor:
    """Return which values are among the k largest of their row, k by head; the first of equal ones, never -inf."""
    length = values.shape[-1]
    kept = ~(values < _bound(values, k.clamp(max=length)))  # NaN counts as the largest
    doubtful = counted(kept) > k[..., 0]  # some of equal values must go
    if bool(doubtful.any()):
        number = k[..., 0].expand(doubtful.shape)[doubtful][:, None]
        count = min(int(number.max()), length - 1)
        if count == 0:
            return kept & ~doubtful[..., None]
        rows = values[doubtful]
        places = largest_scores(rows, count)[1]
        ranked = (torch.arange(count, device=k.device) < number).expand(places.shape)
        kept[doubtful] = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, places, ranked)
    return kept


def _bound(values: Tensor, k: Tensor) -> Tensor:
    """Return each row's k-th largest value (…, 1), at least the lowest finite number; +inf where k is 0."""
    length, whole = values.shape[-1], sorted(set(k.flatten().tolist()) - {0})
    if values.device.type == "cpu":  # NumPy sorts with vector instructions
        array = values.detach().numpy()
        if length > _SORTED and len(whole) == 1:
            ordered = torch.from_numpy(np.partition(array, length - whole[0], -1))
        else:
            ordered = torch.from_numpy(np.sort(array, -1))
    else:
        ordered = values.sort(-1).values
    places = (length - k).clamp(max=length - 1).expand(*values.shape[:-1], 1)
    bound = ordered.gather(-1, places).clamp(min=torch.finfo(values.dtype).min)
    return bound.masked_fill((k == 0).expand(bound.shape), torch.inf)


def block_scores(scores: Tensor, block: int, by: str = "weight") -> Tensor:
    """Return scores that rank blocks of consecutive keys: ln Σ exp(z), the largest z, or the mean z."""
    if block == 1:
        return scores
    rest = -scores.shape[-1] % block
    padded = F.pad(scores, (0, rest), value=-torch.inf)
    blocks = padded.view(*scores.shape[:-1], -1, block)
    if by == "weight":
        return blocks.logsumexp(-1)
    if by == "best":
        return blocks.amax(-1)
    seen = counted(blocks > -torch.inf) + blocks.isnan().sum(-1)
    return (blocks.nan_to_num(torch.nan, torch.inf, 0).sum(-1) / seen).masked_fill(seen == 0, -torch.inf)


@lru_cache(maxsize=64)
def integers(*numbers: int, device: torch.device) -> Tensor:
    """Return integers on a device; a tensor made from numbers would wait for the device each time."""
    return torch.tensor(numbers, device=device)


@dataclass(frozen=True, eq=False)
class _Reach:
    """What the queries of a call see."""

    real: Tensor  # keys that some query sees, (B or 1, Lk) bool
    in_step: bool  # whether the last key that query i sees in any sample is the token at first_query + i
    later: bool  # whether a query sees a key behind its own position


def _reach(call: AttentionCall) -> _Reach:
    queries, length, device, first = call.q.shape[2], call.k.shape[2], call.q.device, call.first_query
    if call.allowed is None and call.selected is None:
        seen = min(length, first + queries) if call.causal else length
        in_step = first + queries <= length and (call.causal or (queries == 1 and first == length - 1))
        return _Reach(
            (torch.arange(length, device=device) < seen)[None], in_step, first < seen - 1 and not call.causal
        )
    parts = [(allowed.any(1).any(1), allowed.any(0).any(0)) for allowed in _rows(call)]
    last = (_cat([seen for _, seen in parts], 0) * torch.arange(1, length + 1, device=device)).amax(-1) - 1
    places = torch.arange(first, first + queries, device=device)
    real = torch.stack([real for real, _ in parts]).any(0)
    return _Reach(real, torch.equal(last, places), bool((last > places).any()))


def _fixed(
    rule: TopK | RandomK, call: AttentionCall, reach: _Reach
) -> tuple[Tensor | None, tuple[int, int] | None]:
    """Return the first keys, and how far before and behind a query keys are kept, for their position alone."""
    sinks = near = None
    if rule.sinks:  # a key that some query sees is not padding
        real, whole = reach.real, call.allowed is None and call.selected is None
        if not whole and call.q.shape[2] < real.shape[1] and not bool(real[:, 0].all()):
            raise _unknown(
                call, "sinks", "its first keys are hidden: by padding or by a window of the model's own"
            )
        sinks = real & (real.cumsum(-1) <= rule.sinks)
    if rule.window:
        square = call.q.shape[2] == call.k.shape[2] and not any(word in call.module.lower() for word in CROSS)
        if not (reach.in_step or square):  # then query i is not the token at first_query + i
            raise _unknown(
                call, "a window", "its queries and keys are different tokens, or the queries follow a cache"
            )
        near = (rule.window - 1, rule.window - 1)
        if isinstance(rule, TopK) and rule.centred and reach.later:
            near = (rule.window // 2, rule.window - 1 - rule.window // 2)
    return sinks, near


def _unknown(call: AttentionCall, what: str, why: str) -> InputError:
    return InputError(
        f"{what} cannot be kept in {call.module or 'the model itself'}: {why}. Leave this kind of "
        "mask out, or give that module a rule of its own (in Python, keep={name: rule})."
    )
