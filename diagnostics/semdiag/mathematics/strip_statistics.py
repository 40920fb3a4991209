"""Statistics of one strip of scores: what is read off before the next strip takes its place."""

import torch
from torch import Tensor

from semdiag.mathematics.largest_scores import add_ranks_, largest_scores
from semdiag.mathematics.score_strips import ScoreStrip


def strip_statistics(
    strip: ScoreStrip, selected: Tensor | None, top: int, load: Tensor, ranks: Tensor
) -> dict[str, Tensor]:
    """Read a strip's scores, which are used up by it.

    Args:
        strip: the scores.
        selected: (b, H, r, S) int64, S_i; None means S_i = A_i.
        top: K.
        load: (b, H, n) int64, the key loads, added to in place.
        ranks: (b, H, K, n) int32, how often each key has each rank, added to in place.

    Returns:
        The attributes of :class:`~semdiag.mathematics.row_statistics.RowStatistics` per query, without sinks.
    """
    scores, keys = strip.scores, strip.keys()
    strip.forbid_(-torch.inf)
    maximum = scores.amax(-1)
    if top:
        best, order = largest_scores(scores, top)
        present = best[..., :top] > -torch.inf
        add_ranks_(ranks, order, present if strip.counted is None else present & strip.counted)
    else:
        best = maximum[..., None]
    weights = torch.softmax(scores, -1, out=strip.spare)
    # The largest weight is 1 / Σ exp(z - max). Rows without keys have no weights.
    log_sum_exp = torch.where(maximum.isfinite(), maximum - weights.amax(-1).log(), maximum)
    kept = None if selected is None else _selected(strip, selected, maximum, load)
    # As large as can be instead of infinite: 0 · z must be 0 where a weight is 0.
    largest = torch.finfo(scores.dtype).max
    strip.forbid_(largest)
    minimum = torch.where(keys == 0, torch.inf, scores.amin(-1))
    found = {
        "keys": keys,
        "non_finite": _non_finite(scores, keys, maximum, minimum),
        "maximum": maximum,
        "minimum": minimum,
        "log_sum_exp": log_sum_exp,
        "top": best,
    }
    if kept is not None:
        return found | kept
    load += strip.load()
    return found | {
        "kept": keys,
        "kept_maximum": maximum,
        "kept_minimum": minimum,
        "kept_log_sum_exp": log_sum_exp,
        "dropped_maximum": torch.full_like(maximum, -torch.inf),
        "entropy": nan_where(keys == 0, (log_sum_exp - weights.mul_(scores).sum(-1)).clamp(min=0)),
    }


def _selected(strip: ScoreStrip, selected: Tensor, maximum: Tensor, load: Tensor) -> dict[str, Tensor]:
    """What depends on S_i, where it is given (b, H, r, S); adds to load (b, H, n)."""
    scores, present = strip.scores, selected >= 0
    counted = present if strip.counted is None else present & strip.counted
    places = selected.clamp(min=0).flatten(2)
    load.scatter_add_(-1, places, counted.flatten(2).to(torch.int64))
    # Absent entries repeat the row's last position: repeating a key changes no maximum and no minimum.
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


def _non_finite(scores: Tensor, keys: Tensor, maximum: Tensor, minimum: Tensor) -> Tensor:
    """Scores of each row that are NaN or infinite; forbidden keys hold finite ones by now."""
    if bool((maximum.isfinite() & minimum.isfinite() | (keys == 0)).all()):
        return torch.zeros_like(keys)  # a NaN would be a maximum, too
    return (~scores.isfinite()).sum(-1)


def with_sinks(found: dict[str, Tensor], sinks: Tensor) -> dict[str, Tensor]:
    """Let a sink of score s_h take part in the softmax of every row that has keys.

    Args:
        found: what :func:`strip_statistics` returned.
        sinks: (H,) scores, nats.

    Returns:
        The same with other logsumexps and entropies.
    """
    sink = sinks.to(found["maximum"].dtype)[:, None]
    joint = {
        name: torch.where(found[name] == -torch.inf, -torch.inf, torch.logaddexp(found[name], sink))
        for name in ("log_sum_exp", "kept_log_sum_exp")
    }
    own, total = found["kept_log_sum_exp"], joint["kept_log_sum_exp"]
    mean = (own - total).exp() * (own - found["entropy"]) + (sink - total).exp() * sink
    return found | joint | {"entropy": nan_where(found["kept"] == 0, (total - mean).clamp(min=0))}


def nan_where(condition: Tensor, values: Tensor) -> Tensor:
    """Return the values with NaN where the condition holds."""
    return values.masked_fill(condition, torch.nan)
