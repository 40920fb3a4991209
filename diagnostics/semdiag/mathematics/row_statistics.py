"""What one pass over the scores of every query tells: range, gap, mass, heavy hitters, key loads."""

from dataclasses import dataclass

import torch
from torch import Tensor

_STRIP = 2**20  # scores held at a time


@dataclass(frozen=True, eq=False)
class RowStatistics:
    r"""Statistics of the scores z of each query; all shapes (B, H, Lq) unless said otherwise.

    A_i are the keys query i may attend to, S_i those it does attend to. Scores are in nats.

    Attributes:
        keys: int64, n_i = |A_i|.
        kept: int64, k_i = |S_i|.
        non_finite: int64, scores in A_i that are NaN or infinite.
        maximum: largest score over A_i; -inf for a row without keys.
        minimum: smallest score over A_i; +inf for a row without keys.
        log_sum_exp: ln Σ exp(z) over A_i.
        kept_maximum: largest score over S_i.
        kept_minimum: smallest score over S_i.
        kept_log_sum_exp: ln Σ exp(z) over S_i; -inf if S_i is empty.
        dropped_maximum: largest score over A_i \ S_i; -inf if S_i = A_i.
        load: (B, H, Lk) int64, number of queries that attend to the key.
        top: (B, H, Lq, K+1), the largest scores over A_i in falling order, -inf where there are fewer.
        top_load: (K, B, H, Lk) int64; entry k-1 is the key load if every query kept its k largest scores.
    """

    keys: Tensor
    kept: Tensor
    non_finite: Tensor
    maximum: Tensor
    minimum: Tensor
    log_sum_exp: Tensor
    kept_maximum: Tensor
    kept_minimum: Tensor
    kept_log_sum_exp: Tensor
    dropped_maximum: Tensor
    load: Tensor
    top: Tensor
    top_load: Tensor

    def dispersion(self, k: int | None = None) -> Tensor:
        """Semantic dispersion δ: the range of the scores that a query attends to.

        δ(i) = max_{S_i} z - min_{S_i} z; with k, what it would be if the query kept its k largest scores.

        Source: paper, eq. 19. Deviation: none.

        Args:
            k: heavy hitters kept, 1 … K; None for the model's own S_i.

        Returns:
            (B, H, Lq), ≥ 0, nats; NaN for a row without keys.

        Raises:
            ValueError: if k is beyond the K that was asked for.
        """
        if k is None:
            return _nan_where(self.kept == 0, self.kept_maximum - self.kept_minimum)
        self._check(k)
        smallest = torch.where(self.keys >= k, self.top[..., k - 1], self.minimum)
        return _nan_where(self.keys == 0, self.top[..., 0] - smallest)

    def separation(self, k: int | None = None) -> Tensor:
        r"""Semantic separation Δ: the gap between the kept and the dropped scores.

        Δ(i) = min_{S_i} z - max_{A_i \ S_i} z; with k, what it would be under top-k.

        Source: paper, Def. 3 and eq. 22. Deviation: none.

        Args:
            k: heavy hitters kept, 1 … K; None for the model's own S_i.

        Returns:
            (B, H, Lq), nats; +inf where nothing is dropped; can be ≤ 0 for input-agnostic masks and for
            bottom-k only.

        Raises:
            ValueError: if k is beyond the K that was asked for.
        """
        if k is None:
            gap = torch.where(self.kept < self.keys, self.kept_minimum - self.dropped_maximum, torch.inf)
            return _nan_where(self.kept == 0, gap)
        self._check(k)
        gap = torch.where(self.keys > k, self.top[..., k - 1] - self.top[..., k], torch.inf)
        return _nan_where(self.keys == 0, gap)

    def largest_weight(self) -> Tensor:
        """Largest attention weight of each query, max_j p_j over S_i.

        Source: docs/theory.md#local-stability. Deviation: none.

        Returns:
            (B, H, Lq), in [1/k_i, 1]; NaN for a row without keys.
        """
        return _nan_where(self.kept == 0, (self.kept_maximum - self.kept_log_sum_exp).exp())

    def key_load(self, k: int | None = None) -> Tensor:
        """Key load l_j = #{i : j ∈ S_i}, a raw count; with k, under top-k.

        Source: paper, Theorem 5 (the loads behind β). Deviation: none.

        Args:
            k: heavy hitters kept, 1 … K; None for the model's own S_i.

        Returns:
            (B, H, Lk) int64.

        Raises:
            ValueError: if k is beyond the K that was asked for.
        """
        if k is None:
            return self.load
        self._check(k)
        return self.top_load[k - 1]

    def _check(self, k: int) -> None:
        if not 1 <= k <= len(self.top_load):
            raise ValueError(f"k must lie in 1 … {len(self.top_load)}, the K these statistics hold. Got k={k}.")


def row_statistics(
    q: Tensor,
    k: Tensor,
    scale: float,
    allowed: Tensor | None = None,
    selected: Tensor | None = None,
    queries: Tensor | None = None,
    top: int = 0,
) -> RowStatistics:
    """Statistics of the scores z = scale · q kᵀ, in one pass and in strips of about a million scores.

    Nothing of size Lq × Lk is ever held. Half precision is scored in float32. Ties among the largest scores
    are broken in favour of the lower key position, in every strip and for every k.

    Args:
        q: queries (B, H, Lq, D).
        k: keys (B, H, Lk, D), same dtype.
        scale: factor on the scores.
        allowed: bool, broadcastable to (B, H, Lq, Lk): A_i; None means every key.
        selected: (B, H, Lq, S) int64 key positions: S_i, -1 for none; None means S_i = A_i.
        queries: (B, Lq) bool: queries that count towards key loads; None means all.
        top: K, the number of heavy hitters for which counterfactuals can be asked; at most Lk - 1 are of use.

    Returns:
        The statistics; float64 if q is, else float32.

    Raises:
        ValueError: if top is negative or shapes do not fit.

    Example:
        >>> q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[4.0], [1.0], [3.0]]]])
        >>> s = row_statistics(q, k, scale=1.0, top=2)
        >>> s.dispersion().item(), s.dispersion(2).item(), s.separation(2).item()
        (3.0, 1.0, 2.0)
        >>> s.key_load(2).tolist()
        [[[1, 0, 1]]]
    """
    if top < 0:
        raise ValueError(f"top must not be negative. Got top={top}.")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch, heads and width. Got {tuple(q.shape)}, {tuple(k.shape)}.")
    if q.dtype in (torch.float16, torch.bfloat16):
        q, k = q.float(), k.float()
    (batch, heads, q_length, _), k_length = q.shape, k.shape[2]
    if allowed is not None:
        allowed = allowed[(None,) * (4 - allowed.ndim)].expand(-1, -1, -1, k_length)
    load = torch.zeros(batch, heads, k_length, dtype=torch.int64, device=q.device)
    ranks = torch.zeros(top, batch, heads, k_length, dtype=torch.int64, device=q.device)
    per_query: dict[str, list[list[Tensor]]] = {}
    samples = max(1, _STRIP // (heads * q_length * k_length))
    rows = q_length if heads * q_length * k_length <= _STRIP else max(1, _STRIP // (heads * k_length))
    for b in (slice(i, i + samples) for i in range(0, batch, samples)):
        parts: dict[str, list[Tensor]] = {}
        for r in (slice(i, i + rows) for i in range(0, q_length, rows)):
            scores = (q[b, :, r] * scale) @ k[b].transpose(2, 3)
            counted = _part(queries[:, None, :, None] if queries is not None else None, b, r)
            strip = _strip(scores, _part(allowed, b, r), _part(selected, b, r), top, load[b], ranks[:, b], counted)
            for name, value in strip.items():
                parts.setdefault(name, []).append(value)
        for name, values in parts.items():
            per_query.setdefault(name, []).append(values)
    joined = {name: torch.cat([torch.cat(v, 2) for v in values]) for name, values in per_query.items()}
    return RowStatistics(**joined, load=load, top_load=ranks.cumsum(0))


def _strip(
    scores: Tensor,
    allowed: Tensor | None,
    selected: Tensor | None,
    top: int,
    load: Tensor,
    ranks: Tensor,
    counted: Tensor | None,
) -> dict[str, Tensor]:
    """Statistics of one strip of scores (b, H, r, Lk); adds to load (b, H, Lk) and ranks (K, b, H, Lk)."""
    non_finite = ~scores.isfinite()
    if allowed is not None:
        non_finite &= allowed
        high, low = scores.masked_fill(~allowed, -torch.inf), scores.masked_fill(~allowed, torch.inf)
        keys = allowed.sum(-1).expand(scores.shape[:3])
    else:
        high = low = scores
        keys = torch.full(scores.shape[:3], scores.shape[-1], device=scores.device)
    found = {
        "keys": keys,
        "non_finite": non_finite.sum(-1),
        "maximum": high.amax(-1),
        "minimum": low.amin(-1),
        "log_sum_exp": high.logsumexp(-1),
    }
    found["top"], order = _largest(high, top + 1)
    if top:
        ranked = _count(order[..., :top], found["top"][..., :top] > -torch.inf, counted, scores.shape[-1])
        ranks += ranked.movedim(2, 0)
    return found | _kept(high, low, found, allowed, selected, load, counted)


def _kept(
    high: Tensor,
    low: Tensor,
    found: dict[str, Tensor],
    allowed: Tensor | None,
    selected: Tensor | None,
    load: Tensor,
    counted: Tensor | None,
) -> dict[str, Tensor]:
    if selected is None:
        attended = torch.ones((), dtype=torch.bool, device=high.device) if allowed is None else allowed
        if counted is not None:
            attended = attended & counted
        load += attended.expand(high.shape).sum(2)
        nothing = torch.full_like(found["maximum"], -torch.inf)
        return {
            "kept": found["keys"],
            "kept_maximum": found["maximum"],
            "kept_minimum": found["minimum"],
            "kept_log_sum_exp": found["log_sum_exp"],
            "dropped_maximum": nothing,
        }
    present = selected >= 0
    load += _count(selected.clamp(min=0), present, counted, high.shape[-1]).sum(2)
    # Absent entries repeat the row's last position: repeating a key changes no maximum and no minimum.
    index = torch.where(present, selected, selected.amax(-1, keepdim=True).clamp(min=0))
    some = present.any(-1)
    dropped = high.scatter(-1, index, -torch.inf).amax(-1)
    chosen = high.gather(-1, index)
    return {
        "kept": present.sum(-1),
        "kept_maximum": torch.where(some, chosen.amax(-1), -torch.inf),
        "kept_minimum": torch.where(some, low.gather(-1, index).amin(-1), torch.inf),
        "kept_log_sum_exp": chosen.masked_fill(~present, -torch.inf).logsumexp(-1),
        "dropped_maximum": torch.where(some, dropped, found["maximum"]),
    }


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest scores of each row and their positions, lower position first among equals."""
    length = scores.shape[-1]
    best = scores.topk(min(count, length), -1)
    values, positions = best.values, best.indices
    tied = (values[..., 1:] == values[..., :-1]).any(-1)
    if bool(tied.any()):
        again = scores[tied].sort(dim=-1, descending=True, stable=True).indices[:, : values.shape[-1]]
        positions[tied] = again
    missing = count - values.shape[-1]
    if missing > 0:
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        positions = torch.nn.functional.pad(positions, (0, missing))
    return values, positions


def _count(positions: Tensor, present: Tensor, counted: Tensor | None, length: int) -> Tensor:
    """How often each key stands in each column: (b, H, r, S) -> (b, H, S, Lk)."""
    if counted is not None:
        present = present & counted
    counts = torch.zeros(
        *positions.shape[:2], positions.shape[3], length, dtype=torch.int64, device=positions.device
    )
    return counts.scatter_add_(-1, positions.transpose(2, 3), present.transpose(2, 3).to(torch.int64))


def _part(mask: Tensor | None, b: slice, r: slice) -> Tensor | None:
    """The strip's part of a tensor (B or 1, H or 1, Lq or 1, …)."""
    if mask is None:
        return None
    if mask.shape[0] > 1:
        mask = mask[b]
    return mask[:, :, r] if mask.shape[2] > 1 else mask


def _nan_where(condition: Tensor, values: Tensor) -> Tensor:
    return values.masked_fill(condition, torch.nan)
