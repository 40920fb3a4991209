"""One strategy a rule: keys chosen for their scores, by tiles of queries, by a draw, or by an earlier layer."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.capturing import call_strips
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.call_strips import QueryReach, Strip
from semdiag.capturing.kept_keys import Choice, hide, without_fixed
from semdiag.capturing.rules import ByIndexer, Keep, RandomK, Rule, SameAs, SkipTiles, TopK, TopP
from semdiag.capturing.tiles import GroupedMask, Tiles
from semdiag.mathematics.block_estimates import TileSums, block_scores
from semdiag_files import InputError


class TopKeys(Choice):
    """The largest scores of each query, or of heads that share a choice: single keys, or blocks."""

    rule: TopK

    def __init__(self, rule: TopK, call: AttentionCall, hold: bool = False) -> None:
        super().__init__(rule, call, rule.k)
        self.keeps_all = min(self.counts) * rule.block >= call.k.shape[2]
        if self.keeps_all:
            return
        if rule.shared == "group":
            self.key_heads = call_strips.different_key_heads(call.k)
        if hold:
            self._hold()
        self._prepare(rule)

    def _prepare(self, rule: TopK) -> None:
        """Find the blocks and the keys kept for their position."""
        if rule.block > 1 or rule.sinks or rule.window:
            reach = call_strips.query_reach(self.call)
            if rule.block > 1:
                self._align_blocks(reach)
            self._fix(rule, reach)

    def _fix(self, rule: TopK, reach: QueryReach) -> None:
        if rule.sinks:
            self._fix_sinks(rule.sinks, reach)
        if rule.window:
            self._fix_window(rule.window, rule.centred, reach)

    @property
    def by_threshold(self) -> bool:
        """Whether single keys are chosen, by each head for itself."""
        single = self.rule.block == 1 and (self.rule.shared == "head" or self.by_position)
        return single and self._unconstrained

    @property
    def by_table(self) -> bool:
        """Whether blocks are chosen."""
        return self.rule.block > 1 and not self.by_position and self._unconstrained

    def table(self) -> GroupedMask:
        """Return the blocks that each query keeps."""
        block = self.rule.block
        device = self.call.k.device
        length = self.call.k.shape[2]
        size = (*self.call.q.shape[:3], -(-length // block))
        mask = torch.empty(size, dtype=torch.bool, device=device)
        for strip in self.strips():
            chosen = self._chosen(strip, self.scores(strip), self.allowed(strip), self.fixed(strip))
            columns = call_strips.ordered(chosen, self.order(strip))
            columns = F.pad(columns, (0, size[3] * block - columns.shape[3]))
            mask[strip.rows] = torch.unflatten(columns, 3, (-1, block)).any(-1)
        queries = torch.arange(self.call.q.shape[2], device=device)[None]
        places = torch.arange(length, device=device)[None] if self._order is None else self._order.argsort(-1)
        return GroupedMask(mask, queries, places // block)

    def _chosen(self, strip: Strip, scores: Tensor | None, allowed: Tensor, fixed: Tensor | None) -> Tensor:
        assert scores is not None
        rule = self.rule
        total = None
        if fixed is not None:
            if rule.shared != "head":
                total = scores.masked_fill(~allowed, -torch.inf).logsumexp(-1, keepdim=True)
            scores = scores.clone()
        free = without_fixed(allowed, fixed)
        scores = hide(scores, free)
        if rule.shared == "head":
            mask = self._largest(scores, self._k[strip.heads], strip)
        else:
            mask = self._shared_choice(scores, strip, total)
        return mask if rule.block == 1 and rule.shared == "head" else mask & free

    def _shared_choice(self, scores: Tensor, strip: Strip, total: Tensor | None) -> Tensor:
        """Return the k largest mean weights over the heads of a set.

        ``total``: logsumexp of each row's allowed scores, where some of them are not among ``scores``.
        """
        sinks = self.call.sinks
        heads = scores.shape[1]
        sets = 1 if self.rule.shared == "layer" else heads * self.key_heads // self.call.q.shape[1]
        k = self._k[strip.heads]
        if sets < heads:
            scores_by_set = scores.view(len(scores), sets, heads // sets, *scores.shape[2:])
            if total is None:
                total = scores.logsumexp(-1, keepdim=True)
            if sinks is not None:
                total = torch.logaddexp(total, sinks[strip.heads].to(total.dtype)[:, None, None])
            weights = (scores_by_set - total.view(*scores_by_set.shape[:-1], 1)).exp().nan_to_num(0).mean(2)
            hidden = scores_by_set.amax(2) == -torch.inf
            # A weight that underflows must not become -inf, which means a hidden key.
            smallest = torch.finfo(weights.dtype).tiny
            scores = weights.clamp(min=smallest).log().masked_fill(hidden, -torch.inf)
            k = k[:1]
        mask = self._largest(scores, k, strip)
        return mask.repeat_interleave(heads // sets, 1) if self.rule.shared == "group" else mask

    def _largest(self, scores: Tensor, k: Tensor, strip: Strip) -> Tensor:
        """Return the keys with the k largest scores, or in the k best blocks."""
        rule = self.rule
        order = self.order(strip)
        values = block_scores(call_strips.ordered(scores, order), rule.block, rule.by)
        mask = call_strips.mark_largest(values, k)
        if rule.block == 1:
            return mask
        mask = mask.repeat_interleave(rule.block, -1)[..., : scores.shape[3]]
        return call_strips.ordered(mask, None if order is None else order.argsort(-1))


class _InTiles(Choice):
    """A choice of blocks for tiles of queries."""

    tiles: Tiles
    block_sums: TileSums  # of the scores, or without them only of the pairs that are visible
    kept_blocks: Tensor  # (B, 1 or H, T, N) bool

    def _cut(self, query_block: int, block: int) -> QueryReach:
        """Cut the call into tiles and blocks; return what its queries see."""
        reach = call_strips.query_reach(self.call)
        self._align_blocks(reach)
        self.tiles = Tiles(self.call, reach, query_block, block, self._order is not None)
        return reach

    def _score_blocks(self, exact: bool = True) -> Tensor:
        """Score each block for each tile, or with exact=False only find the visible ones; return these."""
        self.block_sums = self.tiles.empty_sums()
        for strip in self.strips():
            allowed = self.allowed(strip)
            if exact:
                scores = self.scores(strip)
            else:
                samples, heads, _ = strip.rows
                size = (samples.stop - samples.start, heads.stop - heads.start, *allowed.shape[2:])
                scores = self.call.q.new_zeros(size, dtype=self.tiles.dtype)
            scores = scores.masked_fill_(~allowed, -torch.inf)
            self.tiles.add_scores(self.block_sums, strip, call_strips.ordered(scores, self.order(strip)))
        return self.block_sums.pairs[:, :, :-1] > 0

    @property
    def remark(self) -> str | None:
        """Where tiles begin."""
        if self.call.first_query and not self.keeps_all:
            return "queries follow a cache: tiles begin at the first new query, not at the text's"
        return None

    @property
    def by_threshold(self) -> bool:
        """Never: whole blocks are kept."""
        return False

    @property
    def by_table(self) -> bool:
        """Whether the blocks of tiles are all that matters."""
        return self._unconstrained and not self.keeps_all

    def table(self) -> GroupedMask:
        """Return the blocks that each tile keeps."""
        return self.tiles.grouped(self.kept_blocks, slice(None))

    def _chosen(self, strip: Strip, scores: Tensor | None, allowed: Tensor, fixed: Tensor | None) -> Tensor:
        blocks = self.tiles.grouped(self.kept_blocks, strip.heads)
        return blocks.part(strip.samples, strip.queries, strip.keys) & allowed


class TopTiles(_InTiles, TopKeys):
    """The best blocks of each tile of queries, by exact or estimated scores."""

    rule: TopK

    def _prepare(self, rule: TopK) -> None:
        reach = self._cut(rule.query_block, rule.block)
        self._fix(rule, reach)
        visible = self._score_blocks(exact=rule.estimate is None)
        values = self.block_sums.ranking(rule.by) if rule.estimate is None else self.tiles.estimates(rule.estimate)
        sets = {"head": values.shape[1], "group": self.key_heads, "layer": 1}[rule.shared]
        self.kept_blocks = self.tiles.best(values, visible, self._k, sets, rule.by)


class SkippedTiles(_InTiles):
    """The blocks that a tile does not skip."""

    def __init__(self, rule: SkipTiles, call: AttentionCall, hold: bool = False) -> None:
        super().__init__(rule, call)
        if hold:
            self._hold()
        self._cut(rule.query_block, rule.block)
        visible = self._score_blocks()
        self.kept_blocks = (self.block_sums.ranking("gap") >= -rule.threshold) & visible


class TopShare(Choice):
    """The fewest keys that hold a fraction p of each query's weight."""

    rule: TopP

    def __init__(self, rule: TopP, call: AttentionCall, hold: bool = False) -> None:
        super().__init__(rule, call)
        self.keeps_all = rule.p == 1
        if hold and not self.keeps_all:
            self._hold()

    @property
    def by_threshold(self) -> bool:
        """Whether a threshold a row gives the choice."""
        return self._unconstrained

    def _chosen(self, strip: Strip, scores: Tensor | None, allowed: Tensor, fixed: Tensor | None) -> Tensor:
        assert scores is not None
        ranked, places = hide(scores, allowed).sort(dim=-1, descending=True, stable=True)
        heavy = heaviest(ranked, self.rule.p)
        return torch.zeros_like(heavy).scatter_(-1, places, heavy) & allowed


class DrawnKeys(Choice):
    """Keys drawn at random beside those kept for their position."""

    rule: RandomK

    def __init__(self, rule: RandomK, call: AttentionCall, hold: bool = False) -> None:
        super().__init__(rule, call, rule.k)
        self.keeps_all = min(self.counts) >= call.k.shape[2]
        self._generator = torch.Generator()
        self._rows = slice(0), slice(0)  # heads and queries of the last priorities
        self._priorities = torch.empty(0)
        if self.keeps_all:
            return
        if hold:
            self._hold()
        if rule.sinks or rule.window:
            reach = call_strips.query_reach(call)
            if rule.sinks:
                self._fix_sinks(rule.sinks, reach)
            if rule.window:
                self._fix_window(rule.window, centred=False, reach=reach)

    @property
    def remark(self) -> str | None:
        """Whether other keys are drawn than in one pass."""
        if self.call.first_query and not self.keeps_all:
            return "queries follow a cache: their keys are drawn anew, other ones than in one pass over the text"
        return None

    def _heads_of_strip(self, most: int, banded: bool) -> int:
        return 1  # draws follow one another, head by head

    def _chosen(self, strip: Strip, scores: Tensor | None, allowed: Tensor, fixed: Tensor | None) -> Tensor:
        free = without_fixed(allowed, fixed)
        priorities = self._draw(strip)[..., strip.keys].masked_fill(~free, -torch.inf)
        return call_strips.mark_largest(priorities, self._k[strip.heads]) & free

    def _draw(self, strip: Strip) -> Tensor:
        """Return random numbers for all keys, (h, r, Lk): one sequence over all strips of heads and queries."""
        call = self.call
        h = strip.heads
        r = strip.queries
        if self._rows != (h, r):
            if h.start == r.start == 0:
                self._generator.manual_seed(self.rule.seed * 100_003 + 1009 * call.layer + call.occurrence)
            size = (h.stop - h.start, r.stop - r.start, call.k.shape[2])
            numbers = torch.rand(size, generator=self._generator, dtype=torch.float64, device="cpu")
            self._rows = h, r
            self._priorities = numbers.to(call.q.device, torch.float32 if call.q.device.type == "mps" else None)
        return self._priorities


class IndexedKeys(Choice):
    """The keys that a function of queries and keys scores highest, the same in all heads."""

    rule: ByIndexer

    def __init__(self, rule: ByIndexer, call: AttentionCall, hold: bool = False) -> None:
        super().__init__(rule, call, rule.k)
        self.keeps_all = rule.k >= call.k.shape[2]
        self.heads_together = True
        if hold and not self.keeps_all:
            self._hold()

    def _chosen(self, strip: Strip, scores: Tensor | None, allowed: Tensor, fixed: Tensor | None) -> Tensor:
        call = self.call
        queries = call.q[strip.samples, :, strip.queries].float()
        keys = call.k[strip.samples][:, :, strip.keys].float()
        index_scores = self.rule.score(queries, keys).float()[:, None]
        shared = allowed.any(1, keepdim=True)
        chosen = call_strips.mark_largest(index_scores.masked_fill(~shared, -torch.inf), self._k[:1])
        return chosen.expand(-1, call.q.shape[1], -1, -1) & allowed


class ReusedKeys(Choice):
    """The keys that an earlier layer kept, by its mask (B, 1 or H, Lq, Lk)."""

    def __init__(self, rule: Rule, call: AttentionCall, mask: Tensor) -> None:
        super().__init__(rule, call)
        self._mask = mask

    @property
    def by_table(self) -> bool:
        """Whether the mask is all that matters."""
        return self.call.selected is None

    def table(self) -> GroupedMask:
        """Return the mask as it is."""
        queries, keys = (torch.arange(x.shape[2], device=x.device)[None] for x in (self.call.q, self.call.k))
        return GroupedMask(self._mask.to(keys.device), queries, keys)

    def _chosen(self, strip: Strip, scores: Tensor | None, allowed: Tensor, fixed: Tensor | None) -> Tensor:
        heads = call_strips.heads_of(self._mask, strip)
        return allowed & self._mask[strip.samples, heads, strip.queries, strip.keys].to(allowed.device)


def heaviest(scores: Tensor, p: float) -> Tensor:
    """Return which of sorted scores are the fewest largest ones whose weights add up to p, never -inf."""
    wide = torch.float32 if scores.device.type == "mps" else torch.float64
    weights = (scores - scores[..., :1]).to(wide).exp()
    left = weights.flip(-1).cumsum(-1).flip(-1)  # weight of this key and all behind it, the smallest added first
    light = left <= (1 - p) * left[..., :1]
    return ~light & (scores > -torch.inf)


def choice_of(rule: Rule, call: AttentionCall, hold: bool = False) -> Choice:
    """Return the keys that a rule keeps in a call; ``hold`` their mask for later layers."""
    match rule:
        case TopK():
            return TopKeys(rule, call, hold) if rule.query_block == 1 else TopTiles(rule, call, hold)
        case SkipTiles():
            return SkippedTiles(rule, call, hold)
        case TopP():
            return TopShare(rule, call, hold)
        case RandomK():
            return DrawnKeys(rule, call, hold)
        case ByIndexer():
            return IndexedKeys(rule, call, hold)
    raise TypeError(f"{rule} takes its keys from another layer.")


class SharedChoices:
    """The choices of rules, where layers may reuse the choice of an earlier layer."""

    def __init__(self, keep: Keep | None = None) -> None:
        self._first: Choice | None = None
        rules = keep.values() if isinstance(keep, Mapping) else ()
        self._donors: dict[int, Choice | None] = {rule.layer: None for rule in rules if isinstance(rule, SameAs)}

    def choice(self, rule: Rule, call: AttentionCall) -> Choice:
        """Return the choice for a call; it may be an earlier layer's."""
        every = rule.every if isinstance(rule, TopK) else 1
        if isinstance(rule, SameAs):
            donor = self._donor(rule, call)
        elif self._first is not None and _within(self._first.call, call, every):
            donor = self._first
        else:
            choice = choice_of(rule, call, hold=every > 1 or call.layer in self._donors)
            if every > 1:
                self._first = choice
            if call.layer in self._donors:
                self._donors[call.layer] = choice
            return choice
        if donor.keeps_all:
            return donor
        assert donor.held is not None
        return ReusedKeys(rule, call, donor.held)

    def _donor(self, rule: SameAs, call: AttentionCall) -> Choice:
        """Return the choice of an earlier layer; refuse one of other queries, keys or heads."""
        donor = self._donors.get(rule.layer)
        heads = 0 if donor is None or donor.held is None else donor.held.shape[1]
        if donor is None or not _of_one_size(donor.call, call) or (heads > 1 and heads != call.q.shape[1]):
            raise InputError(
                f"Layer {call.layer} cannot keep the keys of layer {rule.layer}: a donor runs before it on "
                "the same queries and keys, with as many heads, and chooses its own keys."
            )
        return donor


def _within(first: AttentionCall, call: AttentionCall, layers: int) -> bool:
    """Return whether a call is in one of the layers after the first that use its choice."""
    return 0 < call.layer - first.layer < layers and _of_one_size(first, call)


def _of_one_size(one: AttentionCall, call: AttentionCall) -> bool:
    return (len(one.q), one.q.shape[2], one.k.shape[2]) == (len(call.q), call.q.shape[2], call.k.shape[2])
