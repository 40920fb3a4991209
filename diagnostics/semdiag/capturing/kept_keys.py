"""The keys that a rule keeps in a call of attention, and the blocks of keys that tiles of queries keep."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.capturing import call_strips
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.call_strips import QueryReach, Strip, count_true, is_true_on_cpu, narrowed
from semdiag.capturing.rules import Keep, RandomK, Rule, SameAs, SkipTiles, TopK, TopP
from semdiag.mathematics.block_estimates import ESTIMATES, Estimate, TileSums, block_scores
from semdiag_files import InputError

_AT_ONCE = 2**19  # scores held at a time on a CPU, where they stay near the processor
_BAND = 64, 256  # least and most queries of a strip that looks at a band of keys


class GroupedMask(NamedTuple):
    """Groups of keys that groups of queries keep."""

    kept: Tensor  # (B or 1, H or 1, R, C) bool
    of_queries: Tensor  # (B or 1, Lq) int64, number of each query's group
    of_keys: Tensor  # (B or 1, Lk) int64

    def part(self, samples: slice, queries: slice, keys: slice | Tensor) -> Tensor:
        """Return which keys are kept, (b or 1, h or 1, r, n) bool."""
        batch = max(map(len, self))
        kept, rows, columns = (x.expand(batch, *x.shape[1:])[samples] for x in self)
        rows = rows[:, queries]
        columns = columns[:, keys]
        kept = kept.gather(2, rows[:, None, :, None].expand(*kept.shape[:2], -1, kept.shape[3]))
        return kept.gather(3, columns[:, None, None].expand(*kept.shape[:3], -1))


class Tiles:
    """Tiles of a call's queries, and blocks of its keys."""

    def __init__(self, call: AttentionCall, reach: QueryReach, query_block: int, block: int, moved: bool) -> None:
        self.call = call
        self.query_block = query_block
        self.block = block
        self.kept: Tensor | None = None  # (B, 1 or H, T, N) bool
        self.found: TileSums | None = None  # from which they were chosen
        queries = call.q.shape[2]
        length = call.k.shape[2]
        device = call.q.device
        if max(query_block, block) > length:
            raise InputError(f"A tile of {query_block} by {block} is larger than a text of {length} tokens.")
        # Position of the first key that is not padding, and the number of each key's block, (B or 1, …) int64.
        self.first = reach.real.int().argmax(-1) if moved else torch.zeros(1, dtype=torch.int64, device=device)
        self.end = length - reach.real.flip(-1).int().argmax(-1)  # position behind the last such key
        self.of_keys = (torch.arange(length, device=device) - self.first[:, None]) % length // block
        itself = reach.in_step or call_strips.is_square(call)
        self.tiles = -(-queries // query_block)
        places = torch.arange(queries, device=device)
        numbers = (places - self.first[:, None] * itself).div(query_block, rounding_mode="floor")
        places = (places + call.first_query).clamp(max=length - 1)
        if itself:  # a query whose own key nobody sees is padding
            numbers = numbers.where(reach.real[:, places] & (numbers >= 0), self.tiles)
        self.of_queries = (
            numbers  # number of each query's tile, (B or 1, Lq) int64; the number of tiles for padding
        )
        self.own: Tensor | None = (
            None  # (B or 1, T, N) bool, blocks of the tiles' positions; None: later keys are seen
        )
        if itself and not reach.later:
            batch = max(len(numbers), len(self.of_keys))
            count = -(-length // block)
            at = numbers.expand(batch, -1) * count + self.of_keys[:, places].expand(batch, -1)
            own = torch.zeros(batch, (self.tiles + 1) * count, dtype=torch.bool, device=device)
            self.own = own.scatter_(1, at, True).view(batch, self.tiles + 1, count)[:, :-1]

    def sums(self, choice: "Choice", exact: bool = True) -> TileSums:
        """Return what the tiles find in the blocks; not ``exact``: which blocks they see, without any score."""
        call, (batch, heads), like = self.call, self.call.q.shape[:2], self.call.q.new_empty(0, dtype=self._dtype)
        sums = TileSums.zeros(like, batch, heads, self.tiles + 1, -(-call.k.shape[2] // self.block))
        for strip in choice.strips():
            b = strip.samples
            h = strip.heads
            allowed = choice.allowed(strip)
            size = (b.stop - b.start, h.stop - h.start, *allowed.shape[2:])
            scores = choice.scores(strip) if exact else like.new_zeros(size)
            scores = scores.masked_fill_(~allowed, -torch.inf)
            order = choice.order(strip)
            numbers = self.of_queries.expand(batch, -1)[b, strip.queries]
            part = TileSums(*(x[b, h] for x in vars(sums).values()))
            sinks = None if call.sinks is None else call.sinks[h]
            part.add_(call_strips.ordered(scores, order), numbers, self.block, sinks)
        return sums

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.call.q.dtype == torch.float64 else torch.float32

    def chosen(self, rule: "TopK | SkipTiles", choice: "Choice") -> Tensor:
        """Return the blocks that each tile keeps."""
        self.found = sums = self.sums(choice, getattr(rule, "estimate", None) is None)
        seen = sums.pairs[:, :, :-1] > 0
        if isinstance(rule, SkipTiles):
            return (sums.ranking("gap") >= -rule.threshold) & seen
        values = sums.ranking(rule.by) if rule.estimate is None else self.estimates(rule.estimate)
        counts = call_strips.integers(*choice.counts, device=values.device)[:, None, None]
        sets = {"head": values.shape[1], "group": choice.key_heads, "layer": 1}[rule.shared]
        return self.best(values, seen, counts, sets, rule.by)

    def best(self, values: Tensor, seen: Tensor, counts: Tensor, sets: int, by: str = "weight") -> Tensor:
        """Return the k best blocks of each tile, (B, 1 or H, T, N) bool, its own among them."""
        heads = values.shape[1]
        values = values.masked_fill(~seen, -torch.inf)
        if sets < heads:
            several, together = (x.reshape(len(x), sets, -1, *x.shape[2:]) for x in (values, seen))
            values = several.amax(2) if by == "best" else several.where(together, 0).mean(2)
            seen = together.any(2)
            counts = counts[:1]
            values = values.masked_fill(~seen, -torch.inf)
        if self.own is None:
            kept = call_strips.mark_largest(values, counts)
        else:
            own = self.own[:, None] & seen
            kept = own | call_strips.mark_largest(values.masked_fill(own, torch.finfo(values.dtype).max), counts)
        return kept.repeat_interleave(heads // sets, 1) if 1 < sets < heads else kept

    def estimates(self, estimate: str | Estimate) -> Tensor:
        """Return the estimated scores of blocks, (B, H, T, N), text by text without its padding."""
        call = self.call
        compute = ESTIMATES[estimate] if isinstance(estimate, str) else estimate
        (batch, heads), length, causal = call.q.shape[:2], call.k.shape[2], self.own is not None
        size = (batch, heads, self.tiles, -(-length // self.block))
        found = call.q.new_full(size, -torch.inf, dtype=self._dtype)
        numbers = self.of_queries.expand(batch, -1)
        ends = self.end.expand(batch).tolist()
        for sample, start in enumerate(self.first.expand(batch).tolist()):
            rows = (numbers[sample] < self.tiles).nonzero()[:, 0]
            if not len(rows):
                continue
            places = rows + call.first_query - start
            end = start + int(places[-1]) + 1 if causal else ends[sample]
            k = call.k[sample, :, start:end].to(self._dtype)
            places = places if causal else places.new_full(places.shape, k.shape[1] - 1)
            q = call.q[sample, :, rows].to(self._dtype) * call.scale
            shape = (heads, -(-len(rows) // self.query_block), -(-k.shape[1] // self.block))
            scores = compute(q, k, places, self.query_block, self.block)
            found[sample, :, : shape[1], : shape[2]] = _checked(estimate, scores, shape)
        return found

    def table(self, heads: slice) -> GroupedMask:
        """Return the kept blocks of some heads; padded queries keep all."""
        assert self.kept is not None
        kept = self.kept[:, heads] if self.kept.shape[1] > 1 else self.kept
        return GroupedMask(F.pad(kept, (0, 0, 0, 1), value=True), self.of_queries, self.of_keys)


def _checked(estimate: str | Estimate, scores: Tensor, shape: tuple[int, ...]) -> Tensor:
    name = estimate if isinstance(estimate, str) else getattr(estimate, "__qualname__", "The estimate")
    got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if got != shape:
        raise InputError(f"{name} must return a score by head, tile and block, shape {shape}. Got {got}.")
    if bool(scores.isnan().any()):
        raise InputError(f"{name} returned scores that are no numbers (NaN).")
    return scores


class Choice:
    """The keys that a rule keeps in one call: strip by strip of its queries, or all at once."""

    def __init__(self, rule: Rule, call: AttentionCall, chosen: Tensor | None = None, keep: bool = False) -> None:
        heads = call.q.shape[1]
        length = call.k.shape[2]
        self.rule = rule
        self.call = call
        # Kept for their position: those so many places before and behind a query; first keys, (B or 1, Lk) bool.
        self.near: tuple[int, int] | None = None
        self.sinks: Tensor | None = None
        self.bare: Tensor | None = None  # (B, H, Lq) bool, queries that would keep no key and keep all; None: none
        k = rule.k if isinstance(rule, TopK | RandomK) else 1
        self.counts = [k] * heads if isinstance(k, int) else list(k)  # of each head
        if len(self.counts) != heads:
            raise InputError(f"{call.module} has {heads} heads; k has {len(self.counts)} numbers: {self.counts}.")
        self._block = rule.block if isinstance(rule, TopK) else 1
        # Whether the rule cannot drop a key.
        self.whole = isinstance(rule, TopK | RandomK) and min(self.counts) * self._block >= length
        self.whole |= isinstance(rule, TopP) and rule.p == 1
        self._order: Tensor | None = None
        self.tiles: Tiles | None = None
        self._draws = torch.Generator()
        self._drawn = ((slice(0), slice(0)), torch.empty(0))
        self._k = call_strips.integers(*self.counts, device=call.q.device)[:, None, None]
        grouped = isinstance(rule, TopK) and rule.shared == "group" and not self.whole
        self.key_heads = call_strips.different_key_heads(call.k) if grouped else call.k.shape[1]
        # A choice that later layers use is held as a mask, (B, 1 or H, Lq, Lk) bool.
        self._reused = chosen is not None
        self.chosen = chosen
        if self.whole or self._reused:
            return
        if keep:
            size = (len(call.q), 1 if getattr(rule, "shared", "") == "layer" else heads, call.q.shape[2], length)
            self.chosen = torch.zeros(size, dtype=torch.bool, device=call.q.device)
        tiled = isinstance(rule, SkipTiles) or getattr(rule, "query_block", 1) > 1
        if tiled or (isinstance(rule, TopK | RandomK) and (self._block > 1 or rule.sinks or rule.window)):
            reach = call_strips.query_reach(call)
            blocked = tiled or self._block > 1
            hidden = call.keys_before > 0 or (call.first_query > 0 and not bool(reach.real[:, 0].all()))
            if blocked and hidden:
                raise _unknown(
                    call, "blocks", "a cache hides its first keys, by padding or by a window of its own"
                )
            self._order = call_strips.real_first(reach.real, call) if blocked else None
            if isinstance(rule, TopK | RandomK):
                self._fix(rule, reach)
            if isinstance(rule, SkipTiles | TopK) and tiled:
                self.tiles = Tiles(call, reach, rule.query_block, rule.block, self._order is not None)
                self.tiles.kept = self.tiles.chosen(rule, self)

    def _fix(self, rule: TopK | RandomK, reach: QueryReach) -> None:
        """Find the first keys, and how far before and behind a query keys are kept, for their position alone."""
        call = self.call
        real = reach.real
        if rule.sinks:  # a key that some query sees is not padding
            whole = call.allowed is None and call.selected is None
            if not whole and call.q.shape[2] < real.shape[1] and not bool(real[:, 0].all()):
                raise _unknown(call, "sinks", "its first keys are hidden, by padding or by a window of its own")
            self.sinks = real & (real.cumsum(-1) + call.keys_before <= rule.sinks)
        if rule.window:
            if not (reach.in_step or call_strips.is_square(call)):  # query i is not the token at first_query + i
                raise _unknown(call, "a window", "its queries and keys are different tokens, or follow a cache")
            half = rule.window // 2 if isinstance(rule, TopK) and rule.centred and reach.later else None
            self.near = (rule.window - 1,) * 2 if half is None else (half, rule.window - 1 - half)

    @property
    def remark(self) -> str | None:
        """What a rule means other than in one pass over the text, where queries follow a cache; None: the same."""
        if not self.call.first_query or self.whole:
            return None
        if self.tiles is not None:
            return "queries follow a cache: tiles begin at the first new query, not at the text's"
        if isinstance(self.rule, RandomK):
            return "queries follow a cache: their keys are drawn anew, other ones than in one pass over the text"
        return None

    @property
    def by_position(self) -> bool:
        """Whether no key is chosen for its score or by a draw."""
        return max(self.counts) == 0 and not self._reused

    @property
    def by_threshold(self) -> bool:
        """Whether, beside keys kept for their position, each query keeps its k largest scores."""
        rule = self.rule
        single = isinstance(rule, TopK) and rule.block == 1 and (rule.shared == "head" or self.by_position)
        plain = self.tiles is None and self.chosen is None and self.call.selected is None
        return plain and (single or isinstance(rule, TopP))

    @property
    def by_table(self) -> bool:
        """Whether :meth:`table` gives the choice; not those of single keys that heads share, nor draws."""
        plain = self.call.selected is None and (self.chosen is None or self._reused)
        blocks = self._block > 1 and not self.by_position
        return plain and (self._reused or self.tiles is not None or blocks)

    def table(self) -> GroupedMask:
        """Return which groups of keys groups of queries keep, beside keys kept for their position."""
        queries, keys = (torch.arange(x.shape[2], device=x.device)[None] for x in (self.call.q, self.call.k))
        if self._reused and self.chosen is not None:
            return GroupedMask(self.chosen.to(keys.device), queries, keys)
        if self.tiles is not None:
            return self.tiles.table(slice(None))
        size = (*self.call.q.shape[:3], -(-keys.shape[1] // self._block))
        kept = torch.empty(size, dtype=torch.bool, device=keys.device)
        for strip in self.strips():
            chosen = self._free(strip, self.scores(strip), self.allowed(strip), self.fixed(strip))
            own = call_strips.ordered(chosen, self.order(strip))
            own = F.pad(own, (0, size[3] * self._block - own.shape[3]))
            kept[strip.samples, strip.heads, strip.queries] = torch.unflatten(own, 3, (-1, self._block)).any(-1)
        places = keys if self._order is None else self._order.argsort(-1)
        return GroupedMask(kept, queries, places // self._block)

    def strips(self, banded: bool = False) -> Iterator[Strip]:
        """Yield strips that cover the call: rows of scores, or only the keys near their queries and sinks."""
        call = self.call
        batch, all_heads, queries, _ = call.q.shape
        length = call.k.shape[2]
        elsewhere = call.q.device.type != "cpu"
        most = call_strips.AT_ONCE_ELSEWHERE if elsewhere else _AT_ONCE
        heads = 1 if isinstance(self.rule, RandomK) else all_heads  # draws follow one another, head by head
        banded = banded and self.by_position and self.near is not None and call.selected is None
        together = heads == 1 or getattr(self.rule, "shared", "") == "layer" or (self.by_position and not banded)
        if not together and batch * heads * queries * length > most:
            heads //= self.key_heads
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
                keys = self._band(r) if banded else self.seen(r)
                for first in range(0, batch, samples):
                    b = slice(first, min(first + samples, batch))
                    yield Strip(b, slice(head, head + heads), r, keys, banded)

    def seen(self, rows: slice) -> slice:
        """Return the keys among which all are that some queries may see."""
        call = self.call
        length = self.call.k.shape[2]
        short = call.causal and self._order is None and call.selected is None
        return slice(0, max(1, min(length, call.first_query + rows.stop)) if short else length)

    def _band(self, rows: slice) -> slice | Tensor:
        assert self.near is not None
        before, behind = self.near
        stop = min(self.seen(rows).stop, self.call.first_query + rows.stop + behind)
        start = max(0, min(stop - 1, self.call.first_query + rows.start - before))
        if self.sinks is None or start == 0:
            return slice(start, stop)
        device = self.sinks.device
        columns = self.sinks[:, :start].any(0).nonzero()[:, 0]
        return torch.cat([columns, torch.arange(start, stop, device=device)])

    def allowed(self, strip: Strip) -> Tensor:
        """Return the keys that queries attend to without the mask, bool, broadcastable to the strip's scores."""
        call = self.call
        b = strip.samples
        r = strip.queries
        keys = strip.keys
        if call.selected is not None:
            heads = call_strips.heads_of(call.selected, strip)
            return narrowed(call_strips.allowed_mask(call.part(b, r)))[:, heads]
        allowed = call_strips.strip_part(call.allowed, strip)
        places = call_strips.key_positions(keys, call)
        if call.causal:
            own = torch.arange(r.start, r.stop, device=places.device) + call.first_query
            past = places <= own[:, None]
            return past[None, None] if allowed is None else allowed & past
        allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=places.device) if allowed is None else allowed
        return allowed.expand(-1, -1, r.stop - r.start, len(places))

    def scores(self, strip: Strip) -> Tensor:
        """Return a strip's scores, (b, h, r, n), those of forbidden keys included."""
        call = self.call
        b = strip.samples
        h = strip.heads
        r = strip.queries
        dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        q = call.q[b, h, r].to(dtype)
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
            own = self.sinks if len(self.sinks) == 1 else self.sinks[strip.samples]
            fixed = own[:, strip.keys][:, None, None]
        if self.near is not None:
            places = call_strips.key_positions(strip.keys, self.call)
            rows = torch.arange(strip.queries.start, strip.queries.stop, device=places.device)
            back = (rows + self.call.first_query)[:, None] - places
            near = ((back <= self.near[0]) & (back >= -self.near[1]))[None, None]
            fixed = near if fixed is None else fixed | near
        return fixed

    def free(self, strip: Strip) -> Tensor:
        """Return the keys that may be chosen: allowed, and not kept for their position."""
        allowed = self.allowed(strip)
        fixed = self.fixed(strip)
        return allowed if fixed is None else allowed & ~fixed

    def kept(self, strip: Strip, scores: Tensor | None, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Return a strip's kept keys and their number in each row; some ``scores`` of others become -inf."""
        fixed = self.fixed(strip)
        b = strip.samples
        r = strip.queries
        chosen = self.chosen
        h = slice(None) if chosen is None else call_strips.heads_of(chosen, strip)
        if self._reused and chosen is not None:
            kept = allowed & chosen[b, h, r, strip.keys].to(allowed.device)
        elif self.by_position:
            assert fixed is not None
            kept = fixed & allowed
        else:
            if self.tiles is not None:
                kept = self.tiles.table(strip.heads).part(b, r, strip.keys) & allowed
            else:
                kept = self._free(strip, scores, allowed, fixed)
            if fixed is not None:
                kept = kept | (fixed & allowed)
        number = count_true(kept)
        if not (strip.banded or is_true_on_cpu(number.all())):  # a query without any key keeps all
            bare = number == 0
            kept = kept | (allowed & bare[..., None])
            number = count_true(kept)
            if self.bare is None:
                self.bare = torch.zeros(self.call.q.shape[:3], dtype=torch.bool, device=bare.device)
            self.bare[b, strip.heads, r] = bare & (number > 0)
        if chosen is not None and not self._reused:
            chosen[b, h, r, strip.keys] = kept[:, : chosen.shape[1]]
        return kept, number

    def _free(self, strip: Strip, scores: Tensor | None, allowed: Tensor, fixed: Tensor | None) -> Tensor:
        """Return the keys kept for their scores or by a draw, among those that are not kept for their position."""
        k = self._k[strip.heads]
        free = allowed if fixed is None else allowed & ~fixed
        if isinstance(self.rule, RandomK):
            drawn = self._priorities(self.rule, strip)[..., strip.keys]
            return call_strips.mark_largest(drawn.masked_fill(~free, -torch.inf), k) & free
        assert scores is not None
        assert isinstance(self.rule, TopK | TopP)
        whole = None
        if fixed is not None:
            if getattr(self.rule, "shared", "head") != "head":
                whole = scores.masked_fill(~allowed, -torch.inf).logsumexp(-1, keepdim=True)
            scores = scores.clone()
        if is_true_on_cpu(scores.sum().isfinite()):  # adding -inf takes a fifth of the time
            limit = torch.zeros(free.shape, dtype=scores.dtype, device=scores.device)
            scores.add_(limit.masked_fill_(~free, -torch.inf))
        else:
            scores.masked_fill_(~free, -torch.inf)
        if isinstance(self.rule, TopP):
            scores, places = scores.sort(dim=-1, descending=True, stable=True)
            heavy = heaviest(scores, self.rule.p)
            return torch.zeros_like(heavy).scatter_(-1, places, heavy) & free
        kept = self._ranked(self.rule, k, scores, strip, whole)
        return kept if self.rule.block == 1 and self.rule.shared == "head" else kept & free

    def _ranked(self, rule: TopK, k: Tensor, scores: Tensor, strip: Strip, whole: Tensor | None) -> Tensor:
        """Return the k largest scores, or blocks, of each head or of heads that share a choice.

        ``whole``: logsumexp of each row's allowed scores, where some of them are not among ``scores``.
        """
        call, order, (_, heads, _, length) = self.call, self.order(strip), scores.shape
        sets = {"head": heads, "group": heads * self.key_heads // call.q.shape[1], "layer": 1}[rule.shared]
        if sets < heads:
            several = scores.view(len(scores), sets, heads // sets, *scores.shape[2:])
            whole = scores.logsumexp(-1, keepdim=True) if whole is None else whole
            if call.sinks is not None:
                whole = torch.logaddexp(whole, call.sinks[strip.heads].to(whole.dtype)[:, None, None])
            weights = (several - whole.view(*several.shape[:-1], 1)).exp()
            weights = weights.nan_to_num(0).mean(2)
            hidden = several.amax(2) == -torch.inf
            # A weight that underflows must not become -inf, which means a hidden key.
            smallest = torch.finfo(weights.dtype).tiny
            scores = weights.clamp(min=smallest).log().masked_fill(hidden, -torch.inf)
            k = k[:1]
        kept = call_strips.mark_largest(block_scores(call_strips.ordered(scores, order), rule.block, rule.by), k)
        if rule.block > 1:
            back = None if order is None else order.argsort(-1)
            kept = call_strips.ordered(kept.repeat_interleave(rule.block, -1)[..., :length], back)
        return kept.repeat_interleave(heads // sets, 1) if rule.shared == "group" else kept

    def order(self, strip: Strip) -> Tensor | None:
        """Return the order of a strip's keys that begins with the first that is no padding; None: as it is."""
        return self._order if self._order is None or len(self._order) == 1 else self._order[strip.samples]

    def _priorities(self, rule: RandomK, strip: Strip) -> Tensor:
        """Return random numbers for all keys, (h, r, Lk): one sequence over all strips of heads and queries."""
        h = strip.heads
        r = strip.queries
        call = self.call
        if self._drawn[0] != (h, r):
            if h.start == r.start == 0:
                self._draws.manual_seed(rule.seed * 100_003 + 1009 * call.layer + call.occurrence)
            size = (h.stop - h.start, r.stop - r.start, call.k.shape[2])
            drawn = torch.rand(size, generator=self._draws, dtype=torch.float64, device="cpu")
            self._drawn = (h, r), drawn.to(call.q.device, torch.float32 if call.q.device.type == "mps" else None)
        return self._drawn[1]


def heaviest(scores: Tensor, p: float) -> Tensor:
    """Return which of sorted scores are the fewest largest ones whose weights add up to p, never -inf."""
    wide = torch.float32 if scores.device.type == "mps" else torch.float64
    weights = (scores - scores[..., :1]).to(wide).exp()
    left = weights.flip(-1).cumsum(-1).flip(-1)  # weight of this key and all behind it, the smallest added first
    light = left <= (1 - p) * left[..., :1]
    return ~light & (scores > -torch.inf)


class SharedChoices:
    """The choices of rules, where layers may reuse the choice of an earlier layer."""

    def __init__(self, keep: Keep | None = None) -> None:
        self._first: Choice | None = None
        rules = keep.values() if isinstance(keep, Mapping) else ()
        self._donors: dict[int, Choice | None] = {rule.layer: None for rule in rules if isinstance(rule, SameAs)}

    def choice(self, rule: Rule, call: AttentionCall) -> Choice:
        """Return the choice for a call; it may be an earlier layer's."""
        every = rule.every if isinstance(rule, TopK) else 1
        donor = self._first
        if isinstance(rule, SameAs):
            donor = self._donors.get(rule.layer)
            heads = 0 if donor is None or donor.chosen is None else donor.chosen.shape[1]
            if donor is None or not _alike(donor.call, call) or (heads > 1 and heads != call.q.shape[1]):
                raise InputError(
                    f"Layer {call.layer} cannot keep the keys of layer {rule.layer}: a donor runs before it on "
                    "the same queries and keys, with as many heads, and chooses its own keys."
                )
        elif donor is None or not (0 < call.layer - donor.call.layer < every and _alike(donor.call, call)):
            choice = Choice(rule, call, keep=every > 1 or call.layer in self._donors)
            self._first = choice if every > 1 else self._first
            if call.layer in self._donors:
                self._donors[call.layer] = choice
            return choice
        return donor if donor.whole else Choice(rule, call, donor.chosen)


def _alike(one: AttentionCall, other: AttentionCall) -> bool:
    return (len(one.q), one.q.shape[2], one.k.shape[2]) == (len(other.q), other.q.shape[2], other.k.shape[2])


def all_kept(choice: Choice) -> tuple[Tensor, Tensor] | None:
    """Return the kept and the allowed keys of a whole call, (B, H, Lq, Lk) bool; None where no key is dropped."""
    if choice.whole:
        return None
    call = choice.call
    size = (*call.q.shape[:3], call.k.shape[2])
    kept = torch.zeros(size, dtype=torch.bool, device=call.q.device)
    for strip in choice.strips():
        scores = None if choice.by_position else choice.scores(strip)
        part, _ = choice.kept(strip, scores, choice.allowed(strip))
        kept[strip.samples, strip.heads, strip.queries, strip.keys] = part  # a part may be one for all samples
    allowed = narrowed(call_strips.allowed_mask(call.part()))
    if not bool((allowed & ~kept).any()):
        return None
    some = allowed.any(-1, keepdim=True)
    kept = kept if bool(some.all()) else kept | ~some
    return kept, allowed.expand(size)


def _unknown(call: AttentionCall, what: str, why: str) -> InputError:
    return InputError(
        f"{what} cannot be kept in {call.module or 'the model itself'}: {why}. Leave this kind of "
        "mask out, or give that module a rule of its own (in Python, keep={name: rule})."
    )
