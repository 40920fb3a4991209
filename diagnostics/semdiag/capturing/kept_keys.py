"""The keys that a rule keeps in a call of attention, strip by strip: what all rules have in common."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from semdiag.capturing import call_strips
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.call_strips import QueryReach, Strip, count_true, is_true_on_cpu, narrowed
from semdiag.capturing.rules import Rule
from semdiag.capturing.tiles import GroupedMask
from semdiag_files import InputError

_AT_ONCE = 2**19  # scores held at a time on a CPU, where they stay near the processor
_BAND = 64, 256  # least and most queries of a strip that looks at a band of keys


class Choice:
    """The keys that a rule keeps in one call: strip by strip of its queries, or all at once.

    Each rule has a subclass in :mod:`semdiag.capturing.choices`, for keys chosen by scores or by a draw.

    Attributes:
        counts: k of each head.
        keeps_all: whether the rule cannot drop a key.
        window: numbers of places before and behind a query where keys are kept for their position; None: none.
        sinks: first keys, kept for their position, (B or 1, Lk) bool; None: none.
        bare: queries that would keep no key and keep all, (B, H, Lq) bool; None: there is none.
        held: mask of a choice that later layers use, (B, 1 or H, Lq, Lk) bool; it fills strip by strip.
        key_heads: number of key heads; of different ones where a choice is shared in their groups.
        heads_together: whether a strip holds all heads, as they share a choice.
    """

    def __init__(self, rule: Rule, call: AttentionCall, k: int | Sequence[int] = 1) -> None:
        heads = call.q.shape[1]
        self.rule = rule
        self.call = call
        self.counts = [k] * heads if isinstance(k, int) else list(k)
        if len(self.counts) != heads:
            raise InputError(f"{call.module} has {heads} heads; k has {len(self.counts)} numbers: {self.counts}.")
        self.keeps_all = False
        self.window: tuple[int, int] | None = None
        self.sinks: Tensor | None = None
        self.bare: Tensor | None = None
        self.held: Tensor | None = None
        self.key_heads = call.k.shape[1]
        self.heads_together = getattr(rule, "shared", "") == "layer"
        self._order: Tensor | None = None
        self._k = call_strips.integers(*self.counts, device=call.q.device)[:, None, None]

    def _hold(self) -> None:
        """Begin a mask for later layers."""
        batch, heads, queries, _ = self.call.q.shape
        size = (batch, 1 if self.heads_together else heads, queries, self.call.k.shape[2])
        self.held = torch.zeros(size, dtype=torch.bool, device=self.call.q.device)

    def _fix_sinks(self, count: int, reach: QueryReach) -> None:
        """Keep the first keys; one that some query sees is not padding."""
        call = self.call
        real = reach.real
        unmasked = call.allowed is None and call.selected is None
        if not unmasked and call.q.shape[2] < real.shape[1] and not bool(real[:, 0].all()):
            raise _unknown(call, "sinks", "its first keys are hidden, by padding or by a window of its own")
        self.sinks = real & (real.cumsum(-1) + call.keys_before <= count)

    def _fix_window(self, width: int, centred: bool, reach: QueryReach) -> None:
        """Keep the keys near a query: on each side less than ``width`` away, or so many in all where centred."""
        if not (reach.in_step or call_strips.is_square(self.call)):  # query i is not the token at first_query + i
            raise _unknown(self.call, "a window", "its queries and keys are different tokens, or follow a cache")
        self.window = (width - 1, width - 1)
        if centred and reach.later:
            self.window = (width // 2, width - 1 - width // 2)

    def _align_blocks(self, reach: QueryReach) -> None:
        """Let blocks begin at the first key that is not padding."""
        call = self.call
        hidden = call.keys_before > 0 or (call.first_query > 0 and not bool(reach.real[:, 0].all()))
        if hidden:
            raise _unknown(call, "blocks", "a cache hides its first keys, by padding or by a window of its own")
        self._order = call_strips.real_first(reach.real, call)

    @property
    def remark(self) -> str | None:
        """What a rule means other than in one pass over the text, where queries follow a cache; None: the same."""
        return None

    @property
    def by_position(self) -> bool:
        """Whether no key is chosen for its score or by a draw."""
        return max(self.counts) == 0

    @property
    def by_threshold(self) -> bool:
        """Whether, beside keys kept for their position, each query keeps its k largest scores."""
        return False

    @property
    def by_table(self) -> bool:
        """Whether :meth:`table` gives the choice; not those of single keys that heads share, nor draws."""
        return False

    @property
    def _unconstrained(self) -> bool:
        """Whether the model selects no keys itself, and no later layer needs the mask."""
        return self.call.selected is None and self.held is None

    def table(self) -> GroupedMask:
        """Return which groups of keys groups of queries keep, beside keys kept for their position."""
        raise NotImplementedError(f"{self.rule} chooses no groups of keys.")

    def strips(self, banded: bool = False) -> Iterator[Strip]:
        """Yield strips that cover the call: rows of scores, or only the keys near their queries and sinks."""
        batch, all_heads, queries, _ = self.call.q.shape
        banded = banded and self.by_position and self.window is not None and self.call.selected is None
        samples, heads, rows = self._strip_size(banded)
        for head in range(0, all_heads, heads):
            for start in range(0, queries, rows):
                r = slice(start, min(start + rows, queries))
                keys = self._band(r) if banded else self.visible_keys(r)
                for first in range(0, batch, samples):
                    b = slice(first, min(first + samples, batch))
                    yield Strip(b, slice(head, head + heads), r, keys, banded)

    def _strip_size(self, banded: bool) -> tuple[int, int, int]:
        """Return the numbers of samples, heads and queries of a strip."""
        batch, _, queries, _ = self.call.q.shape
        length = self.call.k.shape[2]
        most = _AT_ONCE if self.call.q.device.type == "cpu" else call_strips.AT_ONCE_ELSEWHERE
        heads = self._heads_of_strip(most, banded)
        if banded and self.window is not None:
            width = sum(self.window) + 1
            rows = min(max(_BAND[0], width if self.call.causal else width // 2), _BAND[1])
            size = width + rows
        else:
            size = length
            rows = max(1, most // (heads * size))
        rows = min(rows, queries)
        samples = min(batch, max(1, most // (heads * rows * size)))
        return samples, heads, rows

    def _heads_of_strip(self, most: int, banded: bool) -> int:
        batch, heads, queries, _ = self.call.q.shape
        together = heads == 1 or self.heads_together or (self.by_position and not banded)
        if together or batch * heads * queries * self.call.k.shape[2] <= most:
            return heads
        return heads // self.key_heads

    def visible_keys(self, rows: slice) -> slice:
        """Return the keys among which all are that some queries may see."""
        length = self.call.k.shape[2]
        if self.call.causal and self._order is None and self.call.selected is None:
            return slice(0, max(1, min(length, self.call.first_query + rows.stop)))
        return slice(0, length)

    def _band(self, rows: slice) -> slice | Tensor:
        assert self.window is not None
        before, behind = self.window
        stop = min(self.visible_keys(rows).stop, self.call.first_query + rows.stop + behind)
        start = max(0, min(stop - 1, self.call.first_query + rows.start - before))
        if self.sinks is None or start == 0:
            return slice(start, stop)
        device = self.sinks.device
        columns = self.sinks[:, :start].any(0).nonzero()[:, 0]
        return torch.cat([columns, torch.arange(start, stop, device=device)])

    def allowed(self, strip: Strip) -> Tensor:
        """Return the keys that queries attend to without the mask, bool, broadcastable to the strip's scores."""
        call = self.call
        r = strip.queries
        if call.selected is not None:
            heads = call_strips.heads_of(call.selected, strip)
            return narrowed(call_strips.allowed_mask(call.part(strip.samples, r)))[:, heads]
        allowed = call_strips.strip_part(call.allowed, strip)
        places = call_strips.key_positions(strip.keys, call)
        if call.causal:
            query_positions = torch.arange(r.start, r.stop, device=places.device) + call.first_query
            past = places <= query_positions[:, None]
            return past[None, None] if allowed is None else allowed & past
        if allowed is None:
            allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=places.device)
        return allowed.expand(-1, -1, r.stop - r.start, len(places))

    def scores(self, strip: Strip) -> Tensor:
        """Return a strip's scores, (b, h, r, n), those of forbidden keys included."""
        call = self.call
        dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        q = call.q[strip.rows].to(dtype)
        k = call_strips.key_heads(call.k, strip, call).to(dtype)
        scores = call_strips.products(q, k.mT, call.scale)
        if call.softcap is not None:
            scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
        bias = call_strips.strip_part(call.bias, strip)
        return scores if bias is None else scores.add_(bias)

    def fixed(self, strip: Strip) -> Tensor | None:
        """Return the keys kept for their position alone, broadcastable to the strip's scores; None: none."""
        fixed = None
        if self.sinks is not None:
            sinks = self.sinks if len(self.sinks) == 1 else self.sinks[strip.samples]
            fixed = sinks[:, strip.keys][:, None, None]
        if self.window is not None:
            before, behind = self.window
            places = call_strips.key_positions(strip.keys, self.call)
            rows = torch.arange(strip.queries.start, strip.queries.stop, device=places.device)
            back = (rows + self.call.first_query)[:, None] - places
            near = ((back <= before) & (back >= -behind))[None, None]
            fixed = near if fixed is None else fixed | near
        return fixed

    def free(self, strip: Strip) -> Tensor:
        """Return the keys that may be chosen: allowed, and not kept for their position."""
        return without_fixed(self.allowed(strip), self.fixed(strip))

    def kept(self, strip: Strip, scores: Tensor | None, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Return a strip's kept keys and their number in each row; other keys' ``scores`` may become -inf."""
        fixed = self.fixed(strip)
        if self.by_position:
            assert fixed is not None
            mask = fixed & allowed
        else:
            mask = self._chosen(strip, scores, allowed, fixed)
            if fixed is not None:
                mask = mask | (fixed & allowed)
        mask, number = self._fill_bare_rows(strip, mask, allowed)
        if self.held is not None:
            heads = call_strips.heads_of(self.held, strip)
            self.held[strip.samples, heads, strip.queries, strip.keys] = mask[:, : self.held.shape[1]]
        return mask, number

    def _chosen(self, strip: Strip, scores: Tensor | None, allowed: Tensor, fixed: Tensor | None) -> Tensor:
        """Return the allowed keys kept for their scores or by a draw."""
        raise NotImplementedError

    def _fill_bare_rows(self, strip: Strip, mask: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Let a query without any key keep all; return the mask and the number of kept keys in each row."""
        number = count_true(mask)
        if strip.banded or is_true_on_cpu(number.all()):
            return mask, number
        bare = number == 0
        mask = mask | (allowed & bare[..., None])
        number = count_true(mask)
        if self.bare is None:
            self.bare = torch.zeros(self.call.q.shape[:3], dtype=torch.bool, device=bare.device)
        self.bare[strip.rows] = bare & (number > 0)
        return mask, number

    def order(self, strip: Strip) -> Tensor | None:
        """Return the order of a strip's keys that begins with the first that is no padding; None: as it is."""
        return self._order if self._order is None or len(self._order) == 1 else self._order[strip.samples]


def without_fixed(allowed: Tensor, fixed: Tensor | None) -> Tensor:
    """Return the allowed keys that are not kept for their position."""
    return allowed if fixed is None else allowed & ~fixed


def hide(scores: Tensor, free: Tensor) -> Tensor:
    """Set the scores of keys that may not be chosen to -inf, in place."""
    if not is_true_on_cpu(scores.sum().isfinite()):
        return scores.masked_fill_(~free, -torch.inf)
    limit = torch.zeros(free.shape, dtype=scores.dtype, device=scores.device)
    return scores.add_(limit.masked_fill_(~free, -torch.inf))  # adding -inf takes a fifth of the time


def all_kept(choice: Choice) -> tuple[Tensor, Tensor] | None:
    """Return the kept and the allowed keys of a whole call, (B, H, Lq, Lk) bool; None where no key is dropped."""
    if choice.keeps_all:
        return None
    call = choice.call
    size = (*call.q.shape[:3], call.k.shape[2])
    mask = torch.zeros(size, dtype=torch.bool, device=call.q.device)
    for strip in choice.strips():
        scores = None if choice.by_position else choice.scores(strip)
        part, _ = choice.kept(strip, scores, choice.allowed(strip))
        mask[(*strip.rows, strip.keys)] = part  # a part may be one for all samples
    allowed = narrowed(call_strips.allowed_mask(call.part()))
    if not bool((allowed & ~mask).any()):
        return None
    with_key = allowed.any(-1, keepdim=True)
    if not bool(with_key.all()):
        mask = mask | ~with_key
    return mask, allowed.expand(size)


def _unknown(call: AttentionCall, part: str, reason: str) -> InputError:
    return InputError(
        f"{part} cannot be kept in {call.module or 'the model itself'}: {reason}. Leave this kind of "
        "mask out, or give that module a rule of its own (in Python, keep={name: rule})."
    )
