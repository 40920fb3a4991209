"""Statistics of one strip of scores."""

import torch
from torch import Tensor

from semdiag.mathematics.largest_scores import largest_scores
from semdiag.mathematics.score_strips import ScoreStrip


def strip_statistics(strip: ScoreStrip, selected: Tensor | None, top: int, load: Tensor) -> dict[str, Tensor]:
    """Compute a strip's statistics; this overwrites its scores.

    Args:
        strip: the scores.
        selected: (b, H, r, S) int64, S_i; None means S_i = A_i.
        top: K.
        load: (b, H, n) int64, the key loads, added to in place.

    Returns:
        Per query, for :func:`finished`: ``keys``; ``top``, for K = 0 just the largest score; ``minimum``, NaN if
        any score is NaN; ``largest_weight``; for K > 0 ``order`` (b, H, r, K) int32, the position of the key of
        each rank; ``non_finite`` if there are such scores; with S_i what depends on it, else ``mean``, Σ p z.
    """
    scores, keys = strip.scores, strip.keys()
    strip.forbid_(-torch.inf)
    found = {"keys": keys}
    if top:
        found["top"], order = largest_scores(scores, top)
        found["order"] = order.to(torch.int32)
    else:
        found["top"] = scores.amax(-1, keepdim=True)
    weights = torch.softmax(scores, -1, out=strip.spare)
    largest = weights.gather(-1, order[..., :1]) if top else weights.amax(-1, keepdim=True)
    found["largest_weight"] = largest.squeeze(-1)
    if selected is not None:
        found |= _selected(strip, selected, found["top"][..., 0], load)
    # The largest finite number instead of infinity: 0 · z must be 0 for a weight of 0.
    strip.forbid_(torch.finfo(scores.dtype).max)
    found["minimum"] = scores.amin(-1)
    finite = found["top"][..., 0].isfinite() & found["minimum"].isfinite()  # a NaN would also be the minimum
    if not bool((finite | (keys == 0)).all()):
        found["non_finite"] = (~scores.isfinite()).sum(-1)
    if selected is None:
        load += strip.load()
        found["mean"] = weights.mul_(scores).sum(-1)
    return found


def finished(rows: dict[str, Tensor], sinks: Tensor | None) -> dict[str, Tensor]:
    """Complete the statistics of all strips' rows.

    Args:
        rows: from :func:`strip_statistics`, without ``order``, of all queries (B, H, Lq).
        sinks: (H,) scores, nats; None means none.

    Returns:
        The attributes of :class:`~semdiag.mathematics.row_statistics.RowStatistics` per query.
    """
    keys, minimum = rows["keys"], rows["minimum"]
    none = keys == 0
    # The smallest score is NaN if any score is; the largest need not be.
    maximum = torch.where(minimum.isnan(), minimum, rows["top"][..., 0])
    minimum = minimum.masked_fill(none, torch.inf)
    # The largest weight is 1 / Σ exp(z - max). Rows without keys have no weights.
    log_sum_exp = torch.where(maximum.isfinite(), maximum - rows.pop("largest_weight").log(), maximum)
    rows |= {"minimum": minimum, "maximum": maximum, "log_sum_exp": log_sum_exp}
    rows.setdefault("non_finite", torch.zeros_like(keys))
    if "mean" in rows:
        rows |= {
            "kept": keys,
            "kept_maximum": maximum,
            "kept_minimum": minimum,
            "kept_log_sum_exp": log_sum_exp,
            "dropped_maximum": torch.full_like(maximum, -torch.inf),
            "entropy": nan_where(none, (log_sum_exp - rows.pop("mean")).clamp(min=0)),
        }
    return rows if sinks is None else _with_sinks(rows, sinks)


def _selected(strip: ScoreStrip, selected: Tensor, maximum: Tensor, load: Tensor) -> dict[str, Tensor]:
    """Return the statistics that depend on a given S_i, (b, H, r, S); add to load (b, H, n)."""
    scores, present = strip.scores, selected >= 0
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
    mean = torch.where(present, each.softmax(-1) * chosen, 0.0).sum(-1)
    return {
        "kept": present.sum(-1),
        "kept_maximum": torch.where(some, chosen.amax(-1), -torch.inf),
        "kept_minimum": torch.where(some, chosen.amin(-1), torch.inf),
        "kept_log_sum_exp": log_sum_exp,
        "dropped_maximum": torch.where(some, dropped, maximum),
        "entropy": nan_where(~some, (log_sum_exp - mean).clamp(min=0)),
    }


def _with_sinks(statistics: dict[str, Tensor], sinks: Tensor) -> dict[str, Tensor]:
    """Include a sink of score s_h in the softmax of every row that has keys."""
    sink = sinks.to(statistics["maximum"].dtype)[:, None]
    joint = {
        name: torch.where(statistics[name] == -torch.inf, -torch.inf, torch.logaddexp(statistics[name], sink))
        for name in ("log_sum_exp", "kept_log_sum_exp")
    }
    own, total = statistics["kept_log_sum_exp"], joint["kept_log_sum_exp"]
    mean = (own - total).exp() * (own - statistics["entropy"]) + (sink - total).exp() * sink
    return statistics | joint | {"entropy": nan_where(statistics["kept"] == 0, (total - mean).clamp(min=0))}


def nan_where(condition: Tensor, values: Tensor) -> Tensor:
    """Return values with NaN where the condition holds."""
    return values.masked_fill(condition, torch.nan)
