"""One attention call in several number formats, reduced to how each query's set of keys changes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.mathematics.mask_stability import TopSet, kept_in_common, score_rounding, top_set
from semdiag.mathematics.selections.number_formats import NumberFormat
from semdiag.mathematics.selections.rounded_operands import rounded_scores, score_error, survives_rounding
from semdiag.questions.mask_stability.measure.mask_rows import Selection

_STRIP = 2**21  # scores held at a time (or one query of every sample and head)
BEYOND = "scores that are no numbers, or beyond float32"
OTHER_KEYS = "a model that keeps other keys than those with the largest scores"


@dataclass(frozen=True, eq=False)
class RoundedRows:
    """What F number formats do to each row; (B, H, L), with the formats in front where they differ."""

    counted: Tensor  # bool: queries that keep a key and drop one; below, other queries mean nothing
    keys: Tensor  # int, how many the query may attend to
    covered: Tensor  # (F, B, H, L) bool: rows that the error model covers; below, others are false
    changed: Tensor  # (F, B, H, L) bool: however ties are broken, the k largest rounded scores are of another set
    tied: Tensor  # (F, B, H, L) bool: the k-th and the next rounded score are equal
    certified: Tensor  # (F, B, H, L) bool
    lost: Tensor  # (F, B, H, L) float64, weight of the keys dropped minus that of the keys gained
    kept: int  # k
    why: str  # what is not covered, if anything is


def rounded_rows(
    call: AttentionCall, k: int, selection: Selection, formats: Sequence[NumberFormat]
) -> RoundedRows:
    """Compare the set of every row, from its scores in float64, with that of its rounded scores."""
    length = call.k.shape[2]
    kept = call.selected.shape[-1] if selection.by_model and call.selected is not None else min(k, length)
    outside = _outside_the_model(call)
    step = max(1, _STRIP // (call.q.shape[0] * call.q.shape[1] * length))
    parts = []
    for start in range(0, call.q.shape[2], step):
        part = call.part(queries=slice(start, start + step))
        parts.append(_strip(part, kept, selection, formats, covered=not outside))
    joined = {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}
    follows, covered = joined.pop("follows"), joined["covered"]
    reasons = {
        OTHER_KEYS: not outside and bool((joined["counted"] & ~follows).any()),
        BEYOND: not outside and bool((joined["counted"] & follows & ~covered).any()),
    }
    return RoundedRows(
        **joined, kept=kept, why=outside or " and ".join(why for why, true in reasons.items() if true)
    )


def _outside_the_model(call: AttentionCall) -> str:
    """Return what puts a call outside the error model, in words; empty if nothing does."""
    if call.softcap is not None:
        return "scores that are capped"
    if call.sinks is not None:
        return "a softmax with attention sinks"
    if call.bias is not None and bool(call.bias.count_nonzero()):
        return "scores with a bias"
    return ""


def _strip(
    part: AttentionCall, kept: int, selection: Selection, formats: Sequence[NumberFormat], covered: bool
) -> dict[str, Tensor]:
    """Return the attributes of :class:`RoundedRows` for some queries, and whether their sets follow the scores."""
    keys = part.k.double().repeat_interleave(part.q.shape[1] // part.k.shape[1], 1)
    q, scale = part.q.double(), selection.sign * part.scale
    scores = scale * (q @ keys.mT)
    if part.allowed is not None:
        scores = scores.masked_fill(~part.allowed, -torch.inf)
    allowed = torch.ones_like(scores, dtype=torch.bool) if part.allowed is None else part.allowed.expand_as(scores)
    number = allowed.sum(-1)
    columns = {"counted": part.counted & (number > kept), "keys": number}
    if not covered or not columns["counted"].any():
        nothing = torch.zeros(len(formats), *number.shape, dtype=torch.bool, device=q.device)
        columns |= {"follows": nothing[0]} | dict.fromkeys(("covered", "changed", "tied", "certified"), nothing)
        return columns | {"lost": torch.full_like(nothing, torch.nan, dtype=torch.float64)}
    before = top_set(scores, kept)
    columns["follows"] = columns["counted"] & _follows(part, keys, scores, selection)
    by_format: dict[str, list[Tensor]] = {}
    for kind in formats:
        error = score_error(q, keys, scale, kind)
        known = columns["follows"] & (~allowed | (error.isfinite() & scores.isfinite())).all(-1)
        later = rounded_scores(q, keys, scale, kind).masked_fill(~allowed, -torch.inf)
        changed = known & (kept_in_common(later[None], before)[0] < kept)
        of_format = {
            "covered": known,
            "changed": changed,
            "tied": known & (top_set(later, kept).separation == 0),
            "certified": known & survives_rounding(scores, error, before),
            "lost": _weight_lost(scores, later, before, changed, selection.sign),
        }
        for name, values in of_format.items():
            by_format.setdefault(name, []).append(values)
    return columns | {name: torch.stack(values) for name, values in by_format.items()}


def _follows(part: AttentionCall, keys: Tensor, scores: Tensor, selection: Selection) -> Tensor:
    """Return whether the model selects the keys with the largest scores, up to the rounding of its scores."""
    if not selection.by_model or part.selected is None:
        return torch.ones_like(part.counted)
    separation = top_set(scores, part.selected.shape[-1], part.selected).separation
    room = score_rounding(part.q.double(), keys, part.scale, torch.finfo(part.q.dtype).eps)
    return separation >= -2 * room


def _weight_lost(scores: Tensor, later: Tensor, before: TopSet, changed: Tensor, sign: int) -> Tensor:
    """Return the weight of the keys dropped minus that of the keys gained: the least that ties allow."""
    lost = torch.full(changed.shape, torch.nan, dtype=torch.float64, device=scores.device)
    z, after = scores[changed], later[changed]
    weights = (sign * z).masked_fill(z == -torch.inf, -torch.inf).softmax(-1)
    inside = torch.zeros_like(z, dtype=torch.bool).scatter_(-1, before.positions[changed], True)
    # Among equal rounded scores the keys that were kept come first, then those with the larger score.
    order = z.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, inside.gather(-1, order).byte().argsort(dim=-1, descending=True, stable=True))
    kept = after.gather(-1, order).argsort(dim=-1, descending=True, stable=True)[:, : before.positions.shape[-1]]
    kept_later = torch.zeros_like(inside).scatter_(-1, order.gather(-1, kept), True)
    dropped, gained = ((weights * keys).sum(-1) for keys in (inside & ~kept_later, kept_later & ~inside))
    lost[changed] = dropped - gained
    return lost
