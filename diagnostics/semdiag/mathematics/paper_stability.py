"""The paper's forms of ξ, the effect of keeping only the k largest scores, and the recall of the true top-k."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from semdiag.mathematics.bounds.block_bounds import Assumption, Bound
from semdiag.mathematics.score_strips import Scores, ScoreStrip, as_mask
from semdiag.mathematics.softmax_stability import fixed_mask_stability, heavy_hitter_stability, positive_separation
from semdiag.mathematics.spectral_norms import Real, float64, log_one_plus_inverse


def paper_fixed_mask_stability(dispersion: Real, keys: Real) -> Bound:
    """Return the paper's ξ of full attention (k = n) and of masks that ignore the input: ξ = e^δ / k.

    Arguments and errors as of :func:`~semdiag.mathematics.softmax_stability.fixed_mask_stability`.

    Source: paper (docs/theory.md#paper-stability). Deviation: none; too small below :func:`paper_form_threshold`.

    Example:
        >>> bound = paper_fixed_mask_stability([1.0, 90.0], 40)
        >>> bound.log_value
        tensor([-2.6889, 86.3111], dtype=torch.float64)
        >>> bound.unmet[0].measured["rows below the sound form"]
        1
    """
    sound = fixed_mask_stability(dispersion, keys).log_value
    log_xi = float64(dispersion) - torch.log(float64(keys))
    return Bound(log_xi, (_not_below(log_xi, sound),), "paper, ξ of standard attention")


def paper_heavy_hitter_stability(dispersion: Real, separation: Real, keys: Real) -> Bound:
    """Return the paper's ξ of heavy-hitter masks: ξ_h = (e^δ_h / k)(1 + 1/Δ_h).

    Arguments, +inf and errors as of :func:`~semdiag.mathematics.softmax_stability.heavy_hitter_stability`.

    Source: paper, Thm 5 (docs/theory.md#paper-stability). Deviation: none.

    Example:
        >>> paper_heavy_hitter_stability(2.0, 0.01, 5).log_value.exp().item()
        149.2589...
    """
    sound = heavy_hitter_stability(dispersion, separation, keys).log_value
    log_xi = log_paper_heavy_hitter(dispersion, separation, keys)
    assumptions = (positive_separation(separation), _not_below(log_xi, sound))
    return Bound(log_xi, assumptions, "paper, Thm 5")


def log_paper_heavy_hitter(dispersion: Real, separation: Real, keys: Real) -> Tensor:
    """Return ln ξ_h of :func:`paper_heavy_hitter_stability`, without checks and assumptions.

    Source: paper, Thm 5 (docs/theory.md#paper-stability). Deviation: none.
    """
    gap = float64(separation).clamp(min=0)
    return float64(dispersion) - torch.log(float64(keys)) + log_one_plus_inverse(gap)


def paper_form_threshold(keys: Real) -> Tensor:
    """Return the dispersion in nats below which some pairs of rows of n ≥ 1 keys exceed e^δ/n.

    The largest δ with e^δ/n < ξ*(δ, n): e^δ < sqrt(2n(n − 1)) − (n − 1); 0 for n ≤ 2. ValueError if n < 1.

    Source: docs/theory.md#where-the-paper-form-fails. Deviation: not in the paper.

    Example:
        >>> paper_form_threshold([40, 600])
        tensor([2.8248, 5.5167], dtype=torch.float64)
    """
    n = float64(keys)
    if not bool((n >= 1).all()):
        raise ValueError(f"A softmax row has at least one key. Got {n.min().item()}.")
    # sqrt(2n(n−1)) − (n−1) as a quotient of sums, which does not cancel.
    reach = (n - 1) * (n + 1) / (torch.sqrt(2 * n * (n - 1)) + n - 1)
    return torch.where(n <= 2, 0.0, torch.log(reach.clamp(min=1.0)))


def _not_below(log_paper: Tensor, log_sound: Tensor) -> Assumption:
    """Return the assumption that the paper's constant is at least the sound one, as an upper bound must be."""
    below = ~(log_paper >= log_sound - 1e-12)
    ratio = torch.where(below, log_sound - log_paper, 0.0).exp()
    most = ratio.max().item() if ratio.numel() else math.nan
    numbers = {"rows below the sound form": int(below.sum()), "sound over paper, at most": most}
    statement = "the paper's form is not below the sound form (as an ℓ1 constant)"
    return Assumption(statement, numbers, holds=not bool(below.any()))


_MOST = 2**19  # numbers of truncated outputs held at a time, to fit the CPU cache
_LARGER = 64  # times as many on a device, where starting an operation takes long
_SCORES = 2**27  # scores held at a time there, twice


@dataclass(frozen=True, eq=False)
class Truncations:
    """The effect of truncation at each of n values of k, and the weight on keys other than the first."""

    change: Tensor  # (B, H, R, n), ‖o(k) − o‖
    size: Tensor  # (B, H, R), ‖o‖
    projected: Tensor | None  # (B, H, R, n), ‖(o(k) − o) W‖; None without a projection
    log_other_keys: Tensor  # (B, H, R), ln Σ exp(z) over the sink and all keys but the first


@torch.no_grad()
def truncations(
    scores: Scores,
    values: Tensor,
    largest: tuple[Tensor, Tensor],
    log_sum_exp: Tensor,
    ks: Sequence[int],
    first: Tensor,
    sinks: Tensor | None = None,
    projection: Tensor | None = None,
) -> Truncations:
    """Return the change of each query's output if the query keeps its k largest scores, for each k of ``ks``.

    o(k) − o = τ (μ_kept − μ_dropped), with τ the dropped weight, and μ the weighted means of the values over kept
    and dropped keys. A sink counts as a kept key of value 0. NaN for rows without keys.

    Source: docs/theory.md#truncation; not in the paper. Deviation: computed as the equal μ_kept − o.

    Args:
        scores: scores of R queries (those at its ``places``, if given), in float32 or float64.
        values: (B, Hk, Lk, D); Hk divides H.
        largest: the largest scores of each row in descending order (B, H, R, ≥ K), and their keys (B, H, R, K).
        log_sum_exp: (B, H, R), logsumexp of each row, including the sink.
        ks: values of k in ascending order, from 1 to K.
        first: (B, H), position of the first key.
        sinks: (H,) a further logit per head in the softmax's denominator, without a value.
        projection: (H, D, d), map of each head's output into the residual stream.

    Example:
        >>> scores = Scores(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 2, 1), 1.0)  # weights of 1/2 each
        >>> two, top = torch.tensor([[[[1.0], [3.0]]]]), (torch.zeros(1, 1, 1, 2), torch.tensor([[[[0, 1]]]]))
        >>> truncated = truncations(scores, two, top, torch.tensor([[[2.0]]]).log(), [1], torch.tensor([[0]]))
        >>> round(truncated.change.item(), 5), round(truncated.size.item(), 5)  # 1/2 · (1 − 3), and their mean, 2
        (1.0, 2.0)
    """
    values = values.to(log_sum_exp.dtype)
    change = log_sum_exp.new_empty(*log_sum_exp.shape, len(ks))
    log_other_keys = torch.empty_like(log_sum_exp)
    size = torch.empty_like(log_other_keys)
    projected = None if projection is None else torch.empty_like(change)
    shared = scores.q.shape[1] // scores.k.shape[1]
    most = max(1, _MOST // (len(ks) * values.shape[3])) * scores.k.shape[2]
    if values.device.type != "cpu":
        most = max(most, min(_LARGER * most, _SCORES))
    for strip in scores.strips(most):
        b = strip.samples
        h = strip.heads
        r = strip.queries
        head_values = values[b, h.start // shared : h.stop // shared]
        log_sum = log_sum_exp[b, h, r]
        score = torch.full_like(log_sum_exp[b, h, r], -torch.inf)
        if sinks is not None:
            score = sinks.to(score.dtype)[h, None].expand_as(score)
        sink = (score - log_sum).exp()
        weights = (largest[0][b, h, r, : ks[-1]] - log_sum[..., None]).exp()
        sums, mass = _kept(weights, largest[1][b, h, r], head_values, ks)
        strip.forbid_(-torch.inf)
        keys = torch.arange(strip.scores.shape[3], device=first.device)
        besides = strip.scores.masked_fill(keys == first[b, h][..., None, None], -torch.inf)
        log_other_keys[b, h, r] = torch.logaddexp(score, besides.logsumexp(-1))
        output = _whole(strip, log_sum, head_values, sink)
        moved = sums.div_(mass.add_(sink[..., None])[..., None]).sub_(output[..., None, :])
        size[b, h, r] = output.norm(dim=-1)
        change[b, h, r] = moved.norm(dim=-1)
        if projected is not None and projection is not None:
            by_head = moved.transpose(0, 1)
            written = by_head.flatten(1, 3) @ projection[h].to(moved.dtype)
            projected[b, h, r] = written.norm(dim=-1).view(by_head.shape[:4]).transpose(0, 1)
    return Truncations(change, size, projected, log_other_keys)


def _kept(weights: Tensor, places: Tensor, values: Tensor, ks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sum weights times values (b, h, r, n, D), and weights (b, h, r, n), over the k largest scores."""
    batch, heads, _, count = weights.shape
    key_heads, length = values.shape[1:3]
    head = torch.arange(heads, device=values.device) // (heads // key_heads)
    table = torch.arange(batch, device=values.device)[:, None] * key_heads + head  # rows of the keys' table
    index = (table[..., None, None] * length + places[..., :count].clamp(min=0)).flatten()
    starts = torch.arange(0, weights.numel(), count, device=values.device)[:, None]
    starts = (starts + torch.tensor([0, *ks[:-1]], device=values.device)).flatten()
    sums = torch.nn.functional.embedding_bag(  # holds nothing of size K × D
        index, values.reshape(-1, values.shape[3]), starts, mode="sum", per_sample_weights=weights.flatten()
    )
    mass = torch.stack([weights[..., low:high].sum(-1) for low, high in pairwise((0, *ks))], -1)
    return sums.view(*mass.shape, -1).cumsum_(-2), mass.cumsum_(-1)


def _whole(strip: ScoreStrip, log_sum: Tensor, values: Tensor, sink: Tensor) -> Tensor:
    """Return the output over all keys, (b, h, r, D); overwrite the strip, whose forbidden scores are -inf."""
    weights = strip.scores.sub_(log_sum[..., None]).exp_()
    batch, heads, rows, keys = weights.shape
    sums = weights.view(batch, values.shape[1], -1, keys) @ values[:, :, :keys]
    return sums.view(batch, heads, rows, -1) / (weights.sum(-1) + sink)[..., None]


_STRIP = 2**20  # scores held at a time


@torch.no_grad()
def top_recall(
    q: Tensor, k: Tensor, scale: float, selected: Tensor, top: int, allowed: Tensor | None = None
) -> Tensor:
    """Return the recall of the true top-k, (B, H, L) in [0, 1]: |S_i ∩ T_i| / |T_i|, T_i the largest scores' keys.

    T_i are ``top`` ≥ 1 keys, or all allowed ones if there are fewer. q is (B, H, L, D), k (B, H, Lk, D); S_i are
    positions (B, H, L, K) int64, distinct in a row, -1 for none; ``allowed`` is broadcastable to (B, H, L, Lk). 0
    for a query that keeps nothing, NaN if no key is allowed.

    Source: docs/theory.md#hashes-and-clusters; not in the paper. Deviation: none.

    Example:
        >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[4.0], [1.0], [3.0]]]])
        >>> top_recall(q, k, 1.0, torch.tensor([[[[0, 1]]]]), 2).item()
        0.5
    """
    parts = []
    top = min(top, k.shape[2])
    per_strip = max(1, _STRIP // (q.shape[1] * q.shape[2] * k.shape[2]))
    for start in range(0, len(q), per_strip):
        part = slice(start, start + per_strip)
        scores = (q[part] * scale) @ k[part].transpose(2, 3)
        if allowed is not None:
            scores = scores.masked_fill(~(allowed[part] if len(allowed) > 1 else allowed), -torch.inf)
        mask = as_mask(selected[part], scores.shape[-1])
        best = scores.topk(top, -1)
        available = best.values > -torch.inf
        hits = (mask.gather(-1, best.indices) & available).sum(-1)
        parts.append(hits.to(q.dtype) / available.sum(-1))
    return torch.cat(parts)
