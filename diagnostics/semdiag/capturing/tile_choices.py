"""Blocks of keys that tiles of queries keep, by exact scores, by an estimate, or by a threshold."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.call_strips import Reach, integers, is_square, largest, ordered
from semdiag.capturing.rules import SkipTiles, TopK
from semdiag.mathematics.block_estimates import ESTIMATES, Estimate, TileSums
from semdiag_models import InputError

if TYPE_CHECKING:
    from semdiag.capturing.kept_keys import Choice


class Table(NamedTuple):
    """Groups of keys that groups of queries keep."""

    kept: Tensor  # (B or 1, H or 1, R, C) bool
    of_queries: Tensor  # (B or 1, Lq) int64, number of each query's group
    of_keys: Tensor  # (B or 1, Lk) int64

    def part(self, samples: slice, queries: slice, keys: slice | Tensor) -> Tensor:
        """Return which keys are kept, (b or 1, h or 1, r, n) bool."""
        batch = max(map(len, self))
        kept, rows, columns = (x.expand(batch, *x.shape[1:])[samples] for x in self)
        rows, columns = rows[:, queries], columns[:, keys]
        kept = kept.gather(2, rows[:, None, :, None].expand(*kept.shape[:2], -1, kept.shape[3]))
        return kept.gather(3, columns[:, None, None].expand(*kept.shape[:3], -1))


@dataclass(eq=False)
class Tiles:
    """Tiles of a call's queries, and blocks of its keys."""

    call: AttentionCall
    query_block: int
    block: int
    of_queries: Tensor  # (B or 1, Lq) int64, number of each query's tile; the number of tiles for padding
    of_keys: Tensor  # (B or 1, Lk) int64, number of each key's block
    tiles: int
    own: Tensor | None  # (B or 1, T, N) bool, blocks of the tiles' own positions; None: queries see later keys
    first: Tensor  # (B or 1,) int64, position of the first key that is not padding
    kept: Tensor | None = None  # (B, 1 or H, T, N) bool
    found: TileSums | None = None  # from which they were chosen

    @classmethod
    def of(cls, call: AttentionCall, reach: Reach, query_block: int, block: int, moved: bool) -> "Tiles":
        """Cut a call into tiles."""
        queries, length, device = call.q.shape[2], call.k.shape[2], call.q.device
        if max(query_block, block) > length:
            raise InputError(f"A tile of {query_block} by {block} is larger than a text of {length} tokens.")
        first = reach.real.int().argmax(-1) if moved else torch.zeros(1, dtype=torch.int64, device=device)
        of_keys = (torch.arange(length, device=device) - first[:, None]) % length // block
        itself = reach.in_step or is_square(call)
        tiles, own, places = -(-queries // query_block), None, torch.arange(queries, device=device)
        numbers = (places - first[:, None] * itself).div(query_block, rounding_mode="floor")
        places = (places + call.first_query).clamp(max=length - 1)
        if itself:  # a query whose own key nobody sees is padding
            numbers = numbers.where(reach.real[:, places] & (numbers >= 0), tiles)
        if itself and not reach.later:
            batch, count = max(len(numbers), len(of_keys)), -(-length // block)
            at = numbers.expand(batch, -1) * count + of_keys[:, places].expand(batch, -1)
            own = torch.zeros(batch, (tiles + 1) * count, dtype=torch.bool, device=device).scatter_(1, at, True)
            own = own.view(batch, tiles + 1, count)[:, :-1]
        return cls(call, query_block, block, numbers, of_keys, tiles, own, first)

    def sums(self, choice: "Choice", exact: bool = True) -> TileSums:
        """Return what the tiles find in the blocks; not ``exact``: which blocks they see, without any score."""
        call, (batch, heads), like = self.call, self.call.q.shape[:2], self.call.q.new_empty(0, dtype=self._dtype)
        sums = TileSums.zeros(like, batch, heads, self.tiles + 1, -(-call.k.shape[2] // self.block))
        for strip in choice.strips():
            b, h = strip.samples, strip.heads
            allowed = choice.allowed(strip)
            size = (b.stop - b.start, h.stop - h.start, *allowed.shape[2:])
            scores = choice.scores(strip) if exact else like.new_zeros(size)
            scores, order = scores.masked_fill_(~allowed, -torch.inf), choice.order(strip)
            numbers = self.of_queries.expand(batch, -1)[b, strip.queries]
            part = TileSums(*(x[b, h] for x in vars(sums).values()))
            part.add_(ordered(scores, order), numbers, self.block, None if call.sinks is None else call.sinks[h])
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
        counts = integers(*choice.counts, device=values.device)[:, None, None]
        sets = {"head": values.shape[1], "group": choice.key_heads, "layer": 1}[rule.shared]
        return self.best(values, seen, counts, sets, rule.by)

    def best(self, values: Tensor, seen: Tensor, counts: Tensor, sets: int, by: str = "weight") -> Tensor:
        """Return the k best blocks of each tile, (B, 1 or H, T, N) bool, its own among them."""
        heads = values.shape[1]
        values = values.masked_fill(~seen, -torch.inf)
        if sets < heads:
            several, together = (x.reshape(len(x), sets, -1, *x.shape[2:]) for x in (values, seen))
            values = several.amax(2) if by == "best" else several.where(together, 0).mean(2)
            seen, counts = together.any(2), counts[:1]
            values = values.masked_fill(~seen, -torch.inf)
        if self.own is None:
            kept = largest(values, counts)
        else:
            own = self.own[:, None] & seen
            kept = own | largest(values.masked_fill(own, torch.finfo(values.dtype).max), counts)
        return kept.repeat_interleave(heads // sets, 1) if 1 < sets < heads else kept

    def estimates(self, estimate: str | Estimate) -> Tensor:
        """Return the estimated scores of blocks, (B, H, T, N), text by text without its padding."""
        call, compute = self.call, ESTIMATES[estimate] if isinstance(estimate, str) else estimate
        (batch, heads), length, causal = call.q.shape[:2], call.k.shape[2], self.own is not None
        size = (batch, heads, self.tiles, -(-length // self.block))
        found = call.q.new_full(size, -torch.inf, dtype=self._dtype)
        numbers = self.of_queries.expand(batch, -1)
        for sample, start in enumerate(self.first.expand(batch).tolist()):
            rows = (numbers[sample] < self.tiles).nonzero()[:, 0]
            if not len(rows):
                continue
            places = rows + call.first_query - start
            k = call.k[sample, :, start : start + int(places[-1]) + 1 if causal else None].to(self._dtype)
            places = places if causal else places.new_full(places.shape, k.shape[1] - 1)
            q = call.q[sample, :, rows].to(self._dtype) * call.scale
            shape = (heads, -(-len(rows) // self.query_block), -(-k.shape[1] // self.block))
            scores = compute(q, k, places, self.query_block, self.block)
            found[sample, :, : shape[1], : shape[2]] = _checked(estimate, scores, shape)
        return found

    def table(self, heads: slice) -> Table:
        """Return the kept blocks of some heads; padded queries keep all."""
        assert self.kept is not None
        kept = self.kept[:, heads] if self.kept.shape[1] > 1 else self.kept
        return Table(F.pad(kept, (0, 0, 0, 1), value=True), self.of_queries, self.of_keys)


def _checked(estimate: str | Estimate, scores: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return what an estimate returned; refuse another shape, or what is no number."""
    name = estimate if isinstance(estimate, str) else getattr(estimate, "__qualname__", "The estimate")
    got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if got != shape:
        raise InputError(f"{name} must return a score by head, tile and block, shape {shape}. Got {got}.")
    if bool(scores.isnan().any()):
        raise InputError(f"{name} returned scores that are no numbers (NaN).")
    return scores
