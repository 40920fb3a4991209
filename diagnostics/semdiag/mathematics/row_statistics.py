"""Statistics of every query's scores in one pass: range, gap, mass, heavy hitters, key loads."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semdiag.mathematics import kernels
from semdiag.mathematics.score_strips import Scores, ScoreStrip, largest_scores, rows_of


def _strip_statistics(
    strip: ScoreStrip,
    selected: Tensor | None,
    top: int,
    load: Tensor,
    received: Tensor | None,
    sinks: Tensor | None,
) -> dict[str, Tensor]:
    """Return a strip's statistics, for :func:`_finished`; add to ``load``, ``received``; overwrite its scores."""
    scores = strip.scores
    keys = strip.keys()
    strip.forbid_(-torch.inf)
    statistics = {"keys": keys}
    if top:
        statistics["top"], order = largest_scores(scores, top)
        statistics["order"] = order.to(torch.int32)
    else:
        statistics["top"] = scores.amax(-1, keepdim=True)
    weights = torch.softmax(scores, -1, out=strip.spare)
    largest = weights.gather(-1, order[..., :1]) if top else weights.amax(-1, keepdim=True)
    statistics["largest_weight"] = largest.squeeze(-1)
    if selected is not None:
        statistics |= _selected(strip, selected, statistics["top"][..., 0], load, received, sinks)
    # The largest finite number replaces infinity: 0 · z must be 0 for a weight of 0.
    strip.forbid_(torch.finfo(scores.dtype).max)
    statistics["minimum"] = scores.amin(-1)
    finite = (
        statistics["top"][..., 0].isfinite() & statistics["minimum"].isfinite()
    )  # a NaN would also be the minimum
    clean = not scores.is_cuda and bool(finite.all())  # an accelerator is not waited for
    if not clean and (scores.is_cuda or not bool((finite | (keys == 0)).all())):
        statistics["non_finite"] = (~scores.isfinite()).sum(-1)
    if selected is None:
        if received is not None:
            log_sum_exp = statistics["top"][..., 0] - statistics["largest_weight"].log()
            share = _share(strip, log_sum_exp, sinks)[..., None, :]
            received += (share @ (weights if clean else weights.nan_to_num(0))).squeeze(-2)
        statistics["mean"] = weights.mul_(scores).sum(-1)
    return statistics


def _share(strip: ScoreStrip, log_sum_exp: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the share of each row's softmax that its keys hold, not a sink, (b, H, r); 0 if it does not count."""
    share = log_sum_exp.isfinite()
    share = share if strip.counted is None else share & strip.counted.squeeze(-1)
    if sinks is None:
        return share.to(log_sum_exp.dtype)
    return torch.where(share, (log_sum_exp - sinks[strip.heads, None].to(log_sum_exp.dtype)).sigmoid(), 0)


def _finished(rows: dict[str, Tensor], sinks: Tensor | None) -> dict[str, Tensor]:
    """Return the attributes of :class:`RowStatistics` per query from all strips' statistics, without ``order``."""
    keys = rows["keys"]
    minimum = rows["minimum"]
    none = keys == 0
    # The smallest score is NaN if any score is; the largest need not be.
    maximum = torch.where(minimum.isnan(), minimum, rows["top"][..., 0])
    minimum = minimum.masked_fill(none, torch.inf)
    # The largest weight is 1 / Σ exp(z - max). Rows without keys have no weights.
    log_sum_exp = torch.where(maximum.isfinite(), maximum - rows.pop("largest_weight").log(), maximum)
    rows |= {"minimum": minimum, "maximum": maximum, "log_sum_exp": log_sum_exp}
    rows.setdefault("non_finite", torch.zeros_like(keys))
    if "mean" in rows:
        rows["entropy"] = log_sum_exp - rows.pop("mean")
    if "kept" not in rows:
        rows |= {
            "kept": keys,
            "kept_maximum": maximum,
            "kept_minimum": minimum,
            "kept_log_sum_exp": log_sum_exp,
            "dropped_maximum": torch.full_like(maximum, -torch.inf),
            "entropy": _nan_where(none, rows["entropy"].clamp(min=0)),
        }
    return rows if sinks is None else _with_sinks(rows, sinks)


def _selected(
    strip: ScoreStrip,
    selected: Tensor,
    maximum: Tensor,
    load: Tensor,
    received: Tensor | None,
    sinks: Tensor | None,
) -> dict[str, Tensor]:
    """Return the statistics over S_i, (b, H, r, S); add to the key loads and the weights received (b, H, n)."""
    scores = strip.scores
    present = selected >= 0
    counted = present if strip.counted is None else present & strip.counted
    places = selected.clamp(min=0).flatten(2)
    load.scatter_add_(-1, places, counted.flatten(2).to(torch.int64))
    # Absent entries repeat the row's last position: repeated keys change no maximum or minimum.
    index = torch.where(present, selected, selected.amax(-1, keepdim=True).clamp(min=0))
    some = present.any(-1)
    dropped = scores.scatter(-1, index, -torch.inf).amax(-1)
    chosen = scores.gather(-1, index)
    each = chosen.masked_fill(~present, -torch.inf)
    log_sum_exp = each.logsumexp(-1)
    weights = each.softmax(-1)
    if received is not None:
        share = _share(strip, log_sum_exp, sinks)[..., None]
        received.scatter_add_(-1, places, torch.where(counted & (share > 0), weights * share, 0.0).flatten(2))
    mean = torch.where(present, weights * chosen, 0.0).sum(-1)
    return {
        "kept": present.sum(-1),
        "kept_maximum": torch.where(some, chosen.amax(-1), -torch.inf),
        "kept_minimum": torch.where(some, chosen.amin(-1), torch.inf),
        "kept_log_sum_exp": log_sum_exp,
        "dropped_maximum": torch.where(some, dropped, maximum),
        "entropy": _nan_where(~some, (log_sum_exp - mean).clamp(min=0)),
    }


def _with_sinks(statistics: dict[str, Tensor], sinks: Tensor) -> dict[str, Tensor]:
    """Include a sink of score s_h in the softmax of every row with keys."""
    sink = sinks.to(statistics["maximum"].dtype)[:, None]
    joint = {
        name: torch.where(statistics[name] == -torch.inf, -torch.inf, torch.logaddexp(statistics[name], sink))
        for name in ("log_sum_exp", "kept_log_sum_exp")
    }
    log_kept = statistics["kept_log_sum_exp"]
    log_total = joint["kept_log_sum_exp"]
    mean = (log_kept - log_total).exp() * (log_kept - statistics["entropy"]) + (sink - log_total).exp() * sink
    return statistics | joint | {"entropy": _nan_where(statistics["kept"] == 0, (log_total - mean).clamp(min=0))}


def _nan_where(condition: Tensor, values: Tensor) -> Tensor:
    return values.masked_fill(condition, torch.nan)


_STRIP = 2**21  # scores held at a time: with fewer, the overhead of each strip shows
_LARGER = 8  # factor of the strip size on an accelerator, where starting an operation takes long


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """Statistics of the scores z of each query; all shapes (B, H, Lq) unless stated otherwise.

    A_i are the keys that query i may attend to, S_i the keys that it attends to. Scores are in nats.

    With an attention sink s_h, the softmax has a further outcome, with score s_h and no value. It is not a key:
    counts, ranges, gaps and loads (δ, Δ, l_j) exclude it. Logsumexps, entropy and weights include it.
    """

    keys: Tensor  # int64, n_i = |A_i|
    kept: Tensor  # int64, k_i = |S_i|
    non_finite: Tensor  # int64, number of scores in A_i that are NaN or infinite
    maximum: Tensor  # largest score over A_i; -inf for a row without keys
    minimum: Tensor  # smallest score over A_i; +inf for a row without keys
    log_sum_exp: Tensor  # ln Σ exp(z) over A_i and the sink; -inf for a row without keys
    kept_maximum: Tensor  # largest score over S_i
    kept_minimum: Tensor  # smallest score over S_i
    kept_log_sum_exp: Tensor  # ln Σ exp(z) over S_i and the sink; -inf if S_i is empty
    dropped_maximum: Tensor  # largest score over A_i \ S_i; -inf if S_i = A_i
    entropy: Tensor  # -Σ p ln p of the attention weights over S_i and the sink, nats; NaN for a row without keys
    load: Tensor  # (B, H, Lk) int64, number of queries that attend to the key
    top: Tensor  # (B, H, Lq, K+1), largest scores over A_i in descending order, -inf if there are fewer
    top_keys: Tensor  # (B, H, Lq, K) int32, positions of the keys of the K largest, -1 if there are fewer
    top_load: Tensor  # (K, B, H, Lk) int32; entry k-1 is the key load if every query kept its k largest scores
    received: Tensor  # (B, H, Lk), Σ_i p_ij over queries that count with finite scores; (B, H, 0) unless asked for

    def dispersion(self, k: int | None = None) -> Tensor:
        """Return the semantic dispersion δ: the range of the scores that a query attends to.

        δ(i) = max_{S_i} z - min_{S_i} z, (B, H, Lq), ≥ 0, nats; NaN for a row without keys. With k, 1 … K, each
        query keeps its k largest scores instead of S_i; another k is a ValueError.

        Source: paper, eq. 19. Deviation: none.
        """
        if k is None:
            return _nan_where(self.kept == 0, self.kept_maximum - self.kept_minimum)
        self._check(k)
        smallest = torch.where(self.keys >= k, self.top[..., k - 1], self.minimum)
        return _nan_where(self.keys == 0, self.top[..., 0] - smallest)

    def separation(self, k: int | None = None) -> Tensor:
        r"""Return the semantic separation Δ: the gap between the kept and the dropped scores, (B, H, Lq), nats.

        Δ(i) = min_{S_i} z - max_{A_i \ S_i} z; +inf if nothing is dropped. ``k`` as of :meth:`dispersion`.

        Source: paper, Def. 3 and eq. 22. Deviation: none.
        """
        if k is None:
            gap = torch.where(self.kept < self.keys, self.kept_minimum - self.dropped_maximum, torch.inf)
            return _nan_where(self.kept == 0, gap)
        self._check(k)
        gap = torch.where(self.keys > k, self.top[..., k - 1] - self.top[..., k], torch.inf)
        return _nan_where(self.keys == 0, gap)

    def largest_weight(self) -> Tensor:
        """Return the largest attention weight of each query, max_j p_j over S_i, in [1/k_i, 1]; NaN without keys.

        Source: docs/theory.md#local-stability. Deviation: none.
        """
        return _nan_where(self.kept == 0, (self.kept_maximum - self.kept_log_sum_exp).exp())

    def mass_kept(self, k: int) -> Tensor:
        """Return the share of the softmax over all of A_i held by the k largest scores, (B, H, Lq), in (0, 1].

        m_i(k) = Σ_{j among the k largest} exp(z_j) / Σ_{A_i} exp(z_j), a sink counted in the denominator; NaN for
        a row without keys. ``k`` and its error as of :meth:`dispersion`.
        """
        self._check(k)
        share = (self.top[..., :k].logsumexp(-1) - self.log_sum_exp).exp()
        return _nan_where(self.keys == 0, share.clamp(max=1.0))

    def key_load(self, k: int | None = None) -> Tensor:
        """Return the key load l_j = #{i : j ∈ S_i}, a raw count, (B, H, Lk) int64; ``k`` as of :meth:`dispersion`.

        Source: paper, Theorem 5 (the loads behind β). Deviation: none.
        """
        if k is None:
            return self.load
        self._check(k)
        return self.top_load[k - 1].long()

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
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
    first_query: int = 0,
    places: Tensor | None = None,
    received: bool = False,
) -> RowStatistics:
    """Return the statistics of every query's scores z, in one pass and in strips of two million scores.

    z_ij = scale · q_i · k_j; z_ij ← softcap · tanh(z_ij / softcap); z_ij ← z_ij + bias_ij.
    Nothing of size Lq × Lk is held. Half precision is scored in float32, also under autocast; no gradient is
    recorded. Among equal scores, the lower key position ranks first.

    Source: paper, Def. 3 and eqs. 19, 22. Deviation: none.

    Args:
        q: queries (B, H, Lq, D).
        k: keys (B, Hk, Lk, D), same dtype; Hk divides H, query head h uses key head h // (H / Hk).
        scale: factor on the scores.
        allowed: bool, broadcastable to (B, H, Lq, Lk): keys in A_i; None means every key.
        selected: (B, H, Lq, S) int64, positions of the keys in S_i ⊆ A_i, -1 for none; None means S_i = A_i.
        queries: (B, Lq) bool, queries that count towards key loads; None means all.
        top: K, the largest number of heavy hitters for counterfactuals.
        bias: term added to the scores, broadcastable to (B, H, Lq, Lk), finite, nats; None means none.
        softcap: limit of the scores before the bias; None means none.
        sinks: (H,) a further logit per head in the softmax's denominator; None means none.
        causal: whether query i may only attend to keys j ≤ first_query + i, in addition to ``allowed``.
        first_query: position of query 0 among the keys.
        places: (B, H, R) int64, positions of the queries to look at in every head, -1 for none; the statistics
            then have R queries, and loads count only these. None means all queries, in order.
        received: whether to sum the weight that each key receives.

    Returns:
        The statistics, in float64 if q is in float64, else in float32; top below 0, shapes that do not fit, and no
        query or key at all are a ValueError.

    Example:
        >>> q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[4.0], [1.0], [3.0]]]])
        >>> s = row_statistics(q, k, scale=1.0, top=2)
        >>> s.dispersion().item(), s.dispersion(2).item(), s.separation(2).item()
        (3.0, 1.0, 2.0)
        >>> s.key_load(2).tolist()
        [[[1, 0, 1]]]
    """
    _check_shapes(q, k, top)
    batch, heads = q.shape[:2]
    k_length = k.shape[2]
    scores = Scores(q, k, scale, allowed, bias, softcap, causal, first_query, queries, places)
    if q.is_cuda and kernels.refusal(q, selected, top) is None:
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            rows, load, weights = kernels.rows_by_kernels(scores, top, sinks, received)
    else:
        rows, load, weights = _strip_rows(scores, selected, top, sinks, received)
    ranks = torch.zeros(batch, heads, top, k_length, dtype=torch.int32, device=q.device)
    with torch.no_grad():
        if top:
            _count_ranks_(ranks, rows["order"], rows["top"], scores.counted())
            rows["order"].masked_fill_(rows["top"][..., :top] == -torch.inf, -1)
        order = rows.pop("order", ranks.new_zeros(*rows["keys"].shape, 0))
        rows = _finished(rows, sinks)
    if q.is_cuda:
        ranks.cumsum_(2)  # one operation
    for rank in range(1, 0 if q.is_cuda else top):  # in place: the ranks are the largest tensor here, K × Lk
        ranks[:, :, rank] += ranks[:, :, rank - 1]
    return RowStatistics(**rows, load=load, top_keys=order, top_load=ranks.movedim(2, 0), received=weights)


def _strip_rows(
    scores: Scores, selected: Tensor | None, top: int, sinks: Tensor | None, received: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the statistics of all rows, key loads and the weights received, from strips of scores."""
    q = scores.q
    k = scores.k
    allowed = scores.allowed
    places = scores.places
    batch, heads, length = q.shape[:3] if places is None else places.shape
    k_length = k.shape[2]
    rows: dict[str, Tensor] = {}
    # Inference mode saves a fifth of a strip's overhead; the results are ordinary tensors.
    with torch.inference_mode(), torch.autocast(q.device.type, enabled=False):
        if q.dtype in (torch.float16, torch.bfloat16):
            q = q.float()
            k = k.float()
        if allowed is not None and not q.is_cuda and bool(allowed.all()):
            allowed = None  # the usual mask of a batch without padding
        scores = replace(scores, q=q, k=k.contiguous(), allowed=allowed)
        with torch.inference_mode(False):
            weights = torch.zeros(batch, heads, k_length * received, dtype=q.dtype, device=q.device)
            none = torch.zeros(batch, heads, k_length, dtype=torch.int64, device=q.device)
            load = scores.loads() if selected is None else none
        for strip in scores.strips(_STRIP if q.device.type == "cpu" else _STRIP * _LARGER):
            b = strip.samples
            h = strip.heads
            r = strip.queries
            keys = strip.scores.shape[3]
            strip_selected = None
            if selected is not None:
                strip_selected = selected[b, h, r] if places is None else rows_of(selected[b, h], places[b, h, r])
            part = weights[b, h, :keys] if received else None
            for name, values in _strip_statistics(
                strip, strip_selected, top, load[b, h, :keys], part, sinks
            ).items():
                # One tensor for all strips: thousands of small ones would fragment memory.
                if name not in rows:
                    with torch.inference_mode(False):
                        shape = batch, heads, length, *values.shape[3:]
                        rows[name] = torch.zeros(shape, dtype=values.dtype, device=values.device)
                rows[name][b, h, r] = values
    return rows, load, weights


def _count_ranks_(ranks: Tensor, order: Tensor, top: Tensor, counted: Tensor | None) -> None:
    """Count how often each key has each rank, a few samples at a time because positions take 64 bits."""
    size = max(1, _STRIP // order[0].numel())
    for first in range(0, len(ranks), size):
        part = slice(first, first + size)
        present = top[part, ..., : order.shape[3]] > -torch.inf
        if counted is not None:
            present &= counted[part]
        positions = order[part].transpose(2, 3).long()
        ranks[part].scatter_add_(-1, positions, present.transpose(2, 3).to(torch.int32))


def _check_shapes(q: Tensor, k: Tensor, top: int) -> None:
    if top < 0:
        raise ValueError(f"top must not be negative. Got top={top}.")
    got = f"Got {tuple(q.shape)}, {tuple(k.shape)}."
    grouped = q.ndim == k.ndim == 4 and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    if not grouped or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch, width and heads (those of k may be a divisor). {got}")
    if not (q.numel() and k.numel()):
        raise ValueError(f"There must be at least one query and one key. {got}")
