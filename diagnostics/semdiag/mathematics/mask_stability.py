"""Whether sets of highest-scoring keys survive a change of the scores, and what the change does to the weights."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.bounds.block_bounds import Assumption, Bound, merged
from semdiag.mathematics.score_strips import largest_scores
from semdiag.mathematics.softmax_stability import heavy_hitter_stability
from semdiag.mathematics.spectral_norms import Real, float64


@dataclass(frozen=True, eq=False)
class TopSet:
    """The k highest-scoring allowed keys of each row; k is the same for all rows."""

    positions: Tensor  # (..., k) int64, positions of the keys in S
    boundary: Tensor  # (..., 2) int64, the lowest-scoring key in S and the highest-scoring one outside
    separation: Tensor  # Δ in nats, shape (...); +inf (or NaN) if a row has no more than k keys
    outside: Tensor  # (..., L) of the scores' dtype: 0 for allowed keys outside S, -inf for all others


def top_set(scores: Tensor, k: int, selected: Tensor | None = None) -> TopSet:
    r"""Return the set S of each row's k largest scores, its boundary pair and its separation.

    Δ = min_S z − max_{A\S} z, of scores in nats (..., L), -inf where a key is not allowed; meaningless for rows
    with fewer than k + 1 allowed keys. ``selected`` (..., k) int64 gives the positions of a set that was chosen
    already, -1 for none. A k that is not in 1 … L is a ValueError.

    Source: paper, Def. 3 (docs/theory.md#semantic-separation). Deviation: none.

    Example:
        >>> top = top_set(torch.tensor([3.0, 0.0, 2.5, 1.0]), k=2)
        >>> top.positions.tolist(), top.boundary.tolist(), top.separation.item()
        ([0, 2], [2, 3], 1.5)
    """
    if not 1 <= k <= scores.shape[-1]:
        raise ValueError(f"k must lie in 1 … {scores.shape[-1]}, the number of keys. Got k={k}.")
    positions = largest_scores(scores, k)[1] if selected is None else selected.clamp(min=0)
    outside = torch.zeros_like(scores).masked_fill_(scores == -math.inf, -math.inf)
    outside.scatter_(-1, positions, -math.inf)
    lowest, last = scores.gather(-1, positions).min(-1)
    highest, first = (scores + outside).max(-1)
    boundary = torch.stack([positions.gather(-1, last[..., None]).squeeze(-1), first], -1)
    return TopSet(positions, boundary, lowest - highest, outside)


def score_rounding(q: Tensor, k: Tensor, scale: float, eps: float) -> Tensor:
    """Return how far rounding can move any score of a row, in any order of summation, (..., Lq) in nats.

    ((D + 4)/2) · eps · |scale| · ‖q_i‖ · max_j ‖k_j‖, D the width of a head, q (..., Lq, D), k (..., Lk, D), and
    eps the distance from 1 to the next number in the precision of the scores.

    Source: docs/theory.md#mask-stability (Higham, ch. 3). Deviation: four more roundings: scale, differences.

    Example:
        >>> q, k = torch.ones(1, 64), torch.ones(3, 64)
        >>> score_rounding(q, k, 0.125, torch.finfo(torch.float32).eps)
        tensor([3.2425e-05])
    """
    factor = (q.shape[-1] + 4) / 2 * eps * abs(scale)
    queries: Tensor = torch.linalg.vector_norm(q, dim=-1)
    keys: Tensor = torch.linalg.vector_norm(k, dim=-1)
    return queries * (factor * keys.amax(-1, keepdim=True))


def certified(change: Tensor, separation: Tensor, rounding: Tensor | float = 0.0) -> Tensor:
    """Return whether each row's set provably survives a change of the scores, S' = S, bool (...).

    max_j dz_j − min_j dz_j < Δ, over all allowed keys, in nats: kept keys keep their lead. False decides nothing.

    Source: docs/theory.md#mask-stability. Deviation: Δ and the range are off by at most four ``rounding``.

    Example:
        >>> certified(torch.tensor([0.1, 0.3]), torch.tensor([0.2, 0.2]))
        tensor([ True, False])
    """
    return change + 4 * rounding < separation


def predicted_agreement(separation: Tensor, spread: Tensor) -> Tensor:
    """Return the probability that the two keys at the boundary do not swap under Gaussian changes of the scores.

    P = Φ(Δ / sd), sd ≥ 0 the standard deviation of dz_(k) − dz_(k+1), both in nats: in [½, 1] for Δ ≥ 0; NaN if sd
    is unknown, and with sd = 0 nothing moves.

    Source: docs/theory.md#mask-stability. Deviation: none. Other pairs can swap too.

    Example:
        >>> predicted_agreement(torch.tensor([0.0, 1.0]), torch.tensor(1.0))
        tensor([0.5000, 0.8413])
    """
    ratio = torch.where(spread > 0, separation / spread, torch.inf)
    chance: Tensor = torch.special.ndtr(torch.where(separation == 0, torch.zeros_like(ratio), ratio))
    return torch.where(torch.isnan(spread), torch.nan, chance)


def kept_in_common(scores: Tensor, before: TopSet, out: Tensor | None = None) -> Tensor:
    """Return |S ∩ S'|, int64 (C, ...): how many keys of S are still among the k largest scores after C changes.

    The m largest scores in S and the k − m largest outside make up S' for the largest m with s_(m) ≥ o_(k−m+1); a
    tie leaves the set unchanged. Scores z' (C, ..., L), nats, have over k allowed keys a row; ``out`` is memory.

    Source: docs/theory.md#mask-stability. Deviation: none.

    Example:
        >>> before = top_set(torch.tensor([3.0, 0.0, 2.5, 1.0]), k=2)
        >>> kept_in_common(torch.tensor([[3.0, 0.0, 2.5, 1.0], [3.0, 0.0, 1.0, 2.5]]), before).tolist()
        [2, 1]
    """
    k = before.positions.shape[-1]
    inside = scores.gather(-1, before.positions.expand(*scores.shape[:-1], k))
    beyond = torch.add(scores, before.outside, out=out)
    common = torch.full(scores.shape[:-1], k, device=scores.device)
    rows = (inside.amin(-1) < beyond.amax(-1)).flatten().nonzero().squeeze(-1)  # most lose no key
    if len(rows):
        inside_sorted = inside.flatten(0, -2)[rows].sort(-1).values  # s_(k), …, s_(1)
        best = largest_scores(beyond.flatten(0, -2)[rows], k)[0][:, :k]  # o_(1), …, o_(k)
        common.view(-1)[rows] = k - (inside_sorted < best).sum(-1)
    return common


def heavy_hitter_pair_stability(
    scores: Tensor,
    other_scores: Tensor,
    selected: Tensor,
    other_selected: Tensor,
    allowed: Tensor,
    other_allowed: Tensor,
) -> Bound:
    """Return the sound ξ_h of given pairs of rows, with all assumptions of Theorem 5 checked on the rows.

    Scores z and z' (..., keys) are in nats; bool tensors of that shape name the unmasked keys S and S', at least
    one per row, and the allowed keys of either. ln ξ_h is +inf for pairs that break an assumption.

    Source: docs/theory.md#heavy-hitter-stability. Deviation: δ_h is the larger and Δ_h the smaller of both rows.

    Example:
        >>> z, all_keys = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([True, True, True])
        >>> top, last = torch.tensor([True, True, False]), torch.tensor([False, True, True])
        >>> xi = heavy_hitter_pair_stability(z, z.flip(0), top, last, all_keys, all_keys).log_value.exp()
        >>> round(xi.item(), 12)  # ½ on a common set, and ½ for the swap of the least keys: 1/(kΔ)
        1.0
        >>> print(heavy_hitter_pair_stability(z, z, top, last, all_keys, all_keys).unmet[0])
        assumption not met: each row keeps its highest-scoring allowed keys (rows that do not = 1)
    """
    ranges = []
    gaps = []
    for z, mask, keys_allowed in ((scores, selected, allowed), (other_scores, other_selected, other_allowed)):
        low = torch.where(mask, float64(z), math.inf).amin(dim=-1)
        ranges.append(torch.where(mask, float64(z), -math.inf).amax(dim=-1) - low)
        gaps.append(low - torch.where(keys_allowed & ~mask, float64(z), -math.inf).amax(dim=-1))
    gap = torch.minimum(*gaps)
    sizes = (selected.sum(dim=-1), other_selected.sum(dim=-1))
    bound = heavy_hitter_stability(torch.maximum(*ranges), gap, torch.maximum(*sizes))
    size_differs = sizes[0] != sizes[1]
    allowed_differ = (allowed != other_allowed).any(dim=-1)
    checks = (
        _holds_in_all("both rows have the same number of unmasked keys", "rows that differ", size_differs),
        _holds_in_all("both rows have the same allowed keys", "rows that differ", allowed_differ),
        _holds_in_all("each row keeps its highest-scoring allowed keys", "rows that do not", gap < 0),
    )
    log_xi = torch.where(size_differs | allowed_differ, math.inf, bound.log_value)
    return Bound(log_xi, merged([checks, bound.assumptions]), bound.source)


def _holds_in_all(statement: str, name: str, broken: Tensor) -> Assumption:
    count = int(broken.sum())
    return Assumption(statement, {name: count}, holds=count == 0)


def weight_change_bound(score_range: Real) -> Tensor:
    """Bound the change of the weights of two rows over the same keys: ‖p(z) − p(z')‖₁ ≤ 2 tanh(range(dz)/4).

    range(dz) = max dz − min dz ≥ 0 over the keys, nats. The bound, float64, is no logarithm, and attained.

    Source: docs/theory.md#same-set. Deviation: not in the paper.

    Example:
        >>> weight_change_bound([0.0, 0.02, 100.0])
        tensor([0.0000, 0.0100, 2.0000], dtype=torch.float64)
    """
    return 2 * torch.tanh(float64(score_range) / 4)


def same_set_stability(log_odds: Real, score_range: Real) -> Bound:
    """Return ξ of a pair of rows over the same keys: sup of 2x(1 − x) over the largest weights x between them.

    Between the rows the log odds of the largest weight stay within range(dz)/2 of the mean m of both rows:
    ξ = 2x(1 − x) with |ln(x/(1 − x))| = max(|m| − range(dz)/2, 0). m is that of
    :func:`~semdiag.mathematics.softmax_stability.log_odds_of_largest`, +inf for a single key; nats.

    Source: docs/theory.md#same-set. Deviation: not in the paper.

    Example:
        >>> same_set_stability([3.0, 3.0, 0.0], [0.0, 8.0, 0.0]).log_value.exp()
        tensor([0.0904, 0.5000, 0.5000], dtype=torch.float64)
    """
    away = (float64(log_odds).abs() - float64(score_range) / 2).clamp(min=0)
    log_xi = math.log(2) - away - 2 * torch.log1p(torch.exp(-away))
    return Bound(log_xi, (), "docs/theory.md#same-set")
