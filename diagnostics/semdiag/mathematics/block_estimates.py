"""Scores of blocks of keys for tiles of queries: exact ones, and the estimates by which engines choose blocks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Estimate = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


def _cut(rows: Tensor, size: int, value: float = 0.0, axis: int = -2) -> Tensor:
    """Return rows with an axis of n entries as two, ⌈n / size⌉ and size, the last part filled up."""
    filled = F.pad(rows, (*(0, 0) * (-1 - axis), 0, -rows.shape[axis] % size), value=value)
    return torch.unflatten(filled, axis, (-1, size))


def _grouped(k: Tensor, heads: int) -> Tensor:
    return k.repeat_interleave(heads // len(k), 0)


def block_scores(scores: Tensor, block: int, by: str = "weight") -> Tensor:
    """Return scores (…, ⌈n / block⌉) that rank blocks of consecutive keys for single queries, from scores (…, n).

    ``weight``: ln Σ_{j in block} exp(z_ij);  ``best``: max_j z_ij;  ``mean``: the mean z_ij of its visible keys,
    all in nats; -inf for hidden keys, and for blocks without a visible one. The last block may have fewer keys.

    Source: docs/theory.md#blocks. Deviation: none.

    Example:
        >>> block_scores(torch.tensor([0.0, 1.0, 5.0]), 2, "best").tolist()
        [1.0, 5.0]
    """
    if block == 1:
        return scores
    blocks = _cut(scores, block, -torch.inf, -1)
    if by == "weight":
        return blocks.logsumexp(-1)
    if by == "best":
        return blocks.amax(-1)
    visible_keys = (blocks > -torch.inf).sum(-1) + blocks.isnan().sum(-1)
    return (blocks.nan_to_num(torch.nan, torch.inf, 0).sum(-1) / visible_keys).masked_fill(
        visible_keys == 0, -torch.inf
    )


@dataclass(frozen=True, eq=False)
class TileSums:
    """What the queries of tiles find in blocks of keys, added up strip by strip; tensors (B, H, T + 1, N).

    Over the visible pairs of a query i of the tile and a key j of the block, with scores z_ij in nats and weights
    p_ij: gap = max_i (max_{j in block} z_ij − max_{j in this or an earlier block} z_ij), ≤ 0. A kernel that goes
    through the blocks in order skips a tile whose gap is below −λ.

    Source: Yuan et al. 2025, BLASST (arXiv 2512.12087). Deviation: the running maximum is without sinks.
    """

    weight: Tensor  # Σ p_ij; over all blocks, the number of queries less the weight of sinks
    best: Tensor  # max z_ij; -inf without a pair
    total: Tensor  # Σ z_ij
    pairs: Tensor  # number of pairs
    gap: Tensor  # -inf without a pair

    @classmethod
    def zeros(cls, like: Tensor, *size: int) -> "TileSums":
        """Return sums over nothing, (B, H, T + 1, N): the last tile is for queries that do not count."""
        none = like.new_zeros(size)
        hidden = like.new_full(size, -torch.inf)
        return cls(none, hidden, none.clone(), none.clone(), hidden.clone())

    def add_(self, scores: Tensor, tiles: Tensor, block: int, sinks: Tensor | None = None) -> None:
        """Add queries: scores (B, H, r, n), -inf for hidden keys; tiles (B, r), T where one does not count."""
        log_sum = scores.logsumexp(-1, keepdim=True)
        if sinks is not None:
            log_sum = torch.logaddexp(log_sum, sinks.to(scores.dtype)[:, None, None])
        weights = (block_scores(scores, block) - log_sum).exp().nan_to_num(0)
        best = block_scores(scores, block, "best")
        visible = (scores > -torch.inf).to(scores.dtype)
        gap = (best - best.cummax(-1).values).masked_fill(best == -torch.inf, -torch.inf)
        total, pairs = (_cut(x, block, axis=-1).sum(-1) for x in (scores.where(visible > 0, 0), visible))
        at = tiles[:, None, :, None].expand(best.shape)
        for sums, part in ((self.weight, weights), (self.total, total), (self.pairs, pairs)):
            sums[..., : part.shape[-1]].scatter_add_(2, at, part)
        for most, part in ((self.best, best), (self.gap, gap)):
            most[..., : part.shape[-1]].scatter_reduce_(2, at, part, "amax")

    def ranking(self, by: str) -> Tensor:
        """Return scores (B, H, T, N) that rank blocks, -inf where no query sees one: weight, best, mean or gap."""
        values = {"weight": self.weight, "best": self.best, "gap": self.gap}.get(by)
        values = self.total / self.pairs.clamp(min=1) if values is None else values
        return values.masked_fill(self.pairs == 0, -torch.inf)[:, :, :-1]


def mean_estimate(q: Tensor, k: Tensor, positions: Tensor, query_block: int, block: int) -> Tensor:
    """Return the product of the mean query of each tile and the mean key of each block.

    e_tn = (mean_{i in tile t} q_i) · (mean_{j in block n} k_j), the mean score of all pairs of the two, nats:
    (H, ⌈Lq / query_block⌉, ⌈Lk / block⌉). Queries (H, Lq, D) are times the scale of the scores; keys are
    (Hk, Lk, D), Hk divides H; positions (Lq,) int64 are the last key that each query may see.

    Source: docs/theory.md#blocks; Jiang et al. 2024, MInference (block-sparse heads); Gao et al. 2024,
    SeerAttention. Deviation: no gate is learned; positions are not used.

    Example:
        >>> mean_estimate(torch.ones(1, 2, 1), torch.tensor([[[1.0], [3.0], [4.0]]]), torch.tensor([1, 2]), 2, 2)
        tensor([[[2., 4.]]])
    """
    means = []
    for rows, size in ((q, query_block), (k, block)):
        parts = _cut(rows, size)
        number = torch.arange(0, rows.shape[1], size, device=q.device)
        means.append(parts.sum(2) / (rows.shape[1] - number).clamp(max=size)[:, None])
    return means[0] @ _grouped(means[1], len(q)).mT


def quest_estimate(q: Tensor, k: Tensor, positions: Tensor, query_block: int, block: int) -> Tensor:
    """Return an upper bound of the scores in each block, from the smallest and largest entries of its keys.

    e_tn = max_{i in tile t} Σ_d max(q_id · min_{j in n} k_jd, q_id · max_{j in n} k_jd) ≥ max q_i · k_j.
    Arguments, result and unit as of :func:`mean_estimate`.

    Source: docs/theory.md#blocks; Tang et al. 2024, Quest. Deviation: a tile has its queries' largest bound.

    Example:
        >>> keys = torch.tensor([[[1.0, -1.0], [-1.0, 1.0]]])
        >>> quest_estimate(torch.ones(1, 1, 2), keys, torch.tensor([1]), 1, 2)  # both scores are 0
        tensor([[[2.]]])
    """
    most = _grouped(_cut(k, block, -torch.inf).amax(2), len(q))
    least = _grouped(_cut(k, block, torch.inf).amin(2), len(q))
    return _cut(q.clamp(min=0) @ most.mT + q.clamp(max=0) @ least.mT, query_block, -torch.inf).amax(2)


def antidiagonal_estimate(q: Tensor, k: Tensor, positions: Tensor, query_block: int, block: int) -> Tensor:
    """Return the weight of each block, from the scores on one antidiagonal of every small square.

    With s the largest number up to 16 that divides both block sizes, a_uv = (1/s) Σ_{m<s} q_{su+s−1−m} · k_{sv+m},
    and e_tn = Σ_{u in t} Σ_{v in n} softmax_v(a_uv). Arguments as of :func:`mean_estimate`.

    Source: docs/theory.md#blocks; Xu et al. 2025, XAttention. Deviation: blocks are ranked, not cut at a share.

    Example:
        >>> one = torch.ones(1, 4, 1)
        >>> antidiagonal_estimate(one, one, torch.tensor([0, 1, 2, 3]), 2, 2)
        tensor([[[1.0000, 0.0000],
                 [0.5000, 0.5000]]])
    """
    size = math.gcd(query_block, block)
    step = max(s for s in range(1, 17) if size % s == 0)
    rows = _cut(q, step).flip(2).flatten(2)
    keys = _grouped(_cut(k, step).flatten(2), len(q))
    last = F.pad(positions, (0, -len(positions) % step), value=-1).view(-1, step).amax(1)
    visible = torch.arange(0, k.shape[1], step, device=q.device) <= last[:, None]
    weights = (rows @ keys.mT / step).masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0)
    across = _cut(weights, query_block // step).sum(2)
    return _cut(across.mT, block // step).sum(2).mT


def last_tile_estimate(q: Tensor, k: Tensor, positions: Tensor, query_block: int, block: int) -> Tensor:
    """Return the weight of each block, if all queries attended as the last tile of them does.

    From the weights p of the last min(query_block, Lq) queries: vertical lines v_j = mean_i p_ij, and slash lines
    s_o = mean_i p_{i, position(i) − o}, which are left out where queries see every key. Then
    e_tn = Σ_{j in n} v_j + mean_{i in t} Σ_{j in n} s_{position(i) − j}. Arguments as of :func:`mean_estimate`.

    Source: docs/theory.md#blocks; Jiang et al. 2024, MInference (vertical-slash). Deviation: all lines count.

    Example:
        >>> last_tile_estimate(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1), torch.tensor([0, 1]), 1, 1)
        tensor([[[1.0000, 0.5000],
                 [1.0000, 1.0000]]])
    """
    length = k.shape[1]
    device = q.device
    first = max(0, q.shape[1] - query_block)
    scores = q[:, first:] @ _grouped(k, len(q)).mT
    back = positions[first:, None] - torch.arange(length, device=device)
    weights = scores.masked_fill(back < 0, -torch.inf).softmax(-1)
    vertical = _cut(weights.mean(1)[..., None], block).sum(2)[..., 0][:, None]
    tiles = -(-q.shape[1] // query_block)
    if q.shape[1] > 1 and not bool((positions.diff() > 0).all()):
        return vertical.expand(-1, tiles, -1)
    slash = weights.new_zeros(len(q), length)
    slash.scatter_add_(1, back.clamp(min=0).flatten().expand(len(q), -1), weights.flatten(1))
    upto = F.pad((slash / weights.shape[1]).cumsum(1), (1, 0))  # weight of all offsets below
    start = torch.arange(0, length, block, device=device)
    ends = (positions[:, None] + 1 - torch.stack([start, start + block])[:, None]).clamp(0, length)
    lines = upto[:, ends[0]] - upto[:, ends[1]]
    number = (q.shape[1] - torch.arange(tiles, device=device) * query_block).clamp(max=query_block)
    return vertical + _cut(lines, query_block).sum(2) / number[:, None]


ESTIMATES: dict[str, Estimate] = {
    "mean": mean_estimate,
    "quest": quest_estimate,
    "antidiagonal": antidiagonal_estimate,
    "last": last_tile_estimate,
}
