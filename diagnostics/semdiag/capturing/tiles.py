"""Tiles of queries and blocks of keys: which blocks a tile sees, and the best of them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.call_strips import QueryReach, Strip, is_square, mark_largest
from semdiag.mathematics.block_estimates import ESTIMATES, Estimate, TileSums
from semdiag_files import InputError


class GroupedMask(NamedTuple):
    """Groups of keys that groups of queries keep."""

    mask: Tensor  # (B or 1, H or 1, R, C) bool
    query_groups: Tensor  # (B or 1, Lq) int64, number of each query's group
    key_groups: Tensor  # (B or 1, Lk) int64

    def part(self, samples: slice, queries: slice, keys: slice | Tensor) -> Tensor:
        """Return which keys are kept, (b or 1, h or 1, r, n) bool."""
        batch = max(map(len, self))
        mask, rows, columns = (x.expand(batch, *x.shape[1:])[samples] for x in self)
        rows = rows[:, queries]
        columns = columns[:, keys]
        mask = mask.gather(2, rows[:, None, :, None].expand(*mask.shape[:2], -1, mask.shape[3]))
        return mask.gather(3, columns[:, None, None].expand(*mask.shape[:3], -1))


class Tiles:
    """Tiles of a call's queries, and blocks of its keys.

    Attributes:
        first_key: position of the first key that is not padding, (B or 1) int64.
        end_key: position behind the last such key, (B or 1) int64.
        key_blocks: number of each key's block, (B or 1, Lk) int64.
        count: number of tiles.
        query_tiles: number of each query's tile, (B or 1, Lq) int64; ``count`` for padding.
        position_blocks: blocks of the tiles' positions, (B or 1, T, N) bool; None where later keys are seen.
    """

    def __init__(self, call: AttentionCall, reach: QueryReach, query_block: int, block: int, moved: bool) -> None:
        self.call = call
        self.query_block = query_block
        self.block = block
        queries = call.q.shape[2]
        length = call.k.shape[2]
        device = call.q.device
        if max(query_block, block) > length:
            raise InputError(f"A tile of {query_block} by {block} is larger than a text of {length} tokens.")
        self.first_key = torch.zeros(1, dtype=torch.int64, device=device)
        if moved:
            self.first_key = reach.real.int().argmax(-1)
        self.end_key = length - reach.real.flip(-1).int().argmax(-1)
        self.key_blocks = (torch.arange(length, device=device) - self.first_key[:, None]) % length // block
        self.count = -(-queries // query_block)
        same_tokens = reach.in_step or is_square(call)
        places = torch.arange(queries, device=device)
        numbers = (places - self.first_key[:, None] * same_tokens).div(query_block, rounding_mode="floor")
        places = (places + call.first_query).clamp(max=length - 1)
        if same_tokens:  # a query whose own key nobody sees is padding
            numbers = numbers.where(reach.real[:, places] & (numbers >= 0), self.count)
        self.query_tiles = numbers
        self.position_blocks: Tensor | None = None
        if same_tokens and not reach.later:
            self.position_blocks = self._blocks_at(places)

    def _blocks_at(self, places: Tensor) -> Tensor:
        """Mark the blocks of keys at the positions of each tile's queries, (B or 1, T, N) bool."""
        batch = max(len(self.query_tiles), len(self.key_blocks))
        blocks = -(-self.key_blocks.shape[1] // self.block)
        entries = self.query_tiles.expand(batch, -1) * blocks + self.key_blocks[:, places].expand(batch, -1)
        marked = torch.zeros(batch, (self.count + 1) * blocks, dtype=torch.bool, device=places.device)
        return marked.scatter_(1, entries, True).view(batch, self.count + 1, blocks)[:, :-1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which blocks are scored."""
        return torch.float64 if self.call.q.dtype == torch.float64 else torch.float32

    def empty_sums(self) -> TileSums:
        """Return sums to which :meth:`add_scores` adds."""
        batch, heads, _, _ = self.call.q.shape
        like = self.call.q.new_empty(0, dtype=self.dtype)
        return TileSums.zeros(like, batch, heads, self.count + 1, -(-self.call.k.shape[2] // self.block))

    def add_scores(self, sums: TileSums, strip: Strip, scores: Tensor) -> None:
        """Add a strip's scores of all keys, -inf where forbidden, those of padding last."""
        samples = strip.samples
        heads = strip.heads
        numbers = self.query_tiles.expand(len(self.call.q), -1)[samples, strip.queries]
        part = TileSums(*(x[samples, heads] for x in vars(sums).values()))
        sinks = None if self.call.sinks is None else self.call.sinks[heads]
        part.add_(scores, numbers, self.block, sinks)

    def best(self, values: Tensor, visible: Tensor, counts: Tensor, sets: int, by: str = "weight") -> Tensor:
        """Return the k best blocks of each tile, (B, 1 or H, T, N) bool, those at its positions among them."""
        heads = values.shape[1]
        values = values.masked_fill(~visible, -torch.inf)
        if sets < heads:
            values_by_set, visible_by_set = (x.reshape(len(x), sets, -1, *x.shape[2:]) for x in (values, visible))
            values = values_by_set.amax(2) if by == "best" else values_by_set.where(visible_by_set, 0).mean(2)
            visible = visible_by_set.any(2)
            counts = counts[:1]
            values = values.masked_fill(~visible, -torch.inf)
        if self.position_blocks is None:
            mask = mark_largest(values, counts)
        else:
            required = self.position_blocks[:, None] & visible
            mask = required | mark_largest(values.masked_fill(required, torch.finfo(values.dtype).max), counts)
        return mask.repeat_interleave(heads // sets, 1) if 1 < sets < heads else mask

    def estimates(self, estimate: str | Estimate) -> Tensor:
        """Return the estimated scores of blocks, (B, H, T, N), text by text without its padding."""
        call = self.call
        compute = ESTIMATES[estimate] if isinstance(estimate, str) else estimate
        batch, heads, _, _ = call.q.shape
        causal = self.position_blocks is not None
        size = (batch, heads, self.count, -(-call.k.shape[2] // self.block))
        estimates = call.q.new_full(size, -torch.inf, dtype=self.dtype)
        numbers = self.query_tiles.expand(batch, -1)
        ends = self.end_key.expand(batch).tolist()
        for sample, start in enumerate(self.first_key.expand(batch).tolist()):
            rows = (numbers[sample] < self.count).nonzero()[:, 0]
            if not len(rows):
                continue
            places = rows + call.first_query - start
            end = start + int(places[-1]) + 1 if causal else ends[sample]
            k = call.k[sample, :, start:end].to(self.dtype)
            if not causal:
                places = places.new_full(places.shape, k.shape[1] - 1)
            q = call.q[sample, :, rows].to(self.dtype) * call.scale
            shape = (heads, -(-len(rows) // self.query_block), -(-k.shape[1] // self.block))
            scores = compute(q, k, places, self.query_block, self.block)
            estimates[sample, :, : shape[1], : shape[2]] = _checked(estimate, scores, shape)
        return estimates

    def grouped(self, blocks: Tensor, heads: slice) -> GroupedMask:
        """Return a mask of blocks (B, 1 or H, T, N) of some heads for single queries; padded queries keep all."""
        mask = blocks[:, heads] if blocks.shape[1] > 1 else blocks
        return GroupedMask(F.pad(mask, (0, 0, 0, 1), value=True), self.query_tiles, self.key_blocks)


def _checked(estimate: str | Estimate, scores: Tensor, shape: tuple[int, ...]) -> Tensor:
    name = estimate if isinstance(estimate, str) else getattr(estimate, "__qualname__", "The estimate")
    got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if got != shape:
        raise InputError(f"{name} must return a score by head, tile and block, shape {shape}. Got {got}.")
    if bool(scores.isnan().any()):
        raise InputError(f"{name} returned scores that are no numbers (NaN).")
    return scores
