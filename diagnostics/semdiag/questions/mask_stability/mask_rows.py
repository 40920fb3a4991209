"""One attention call over [clean; noisy copies], reduced to how each query's mask changes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.capturing.attention_call import APPROXIMATE, KINDS
from semdiag.capturing.attention_calls import AttentionCall
from semdiag.mathematics.mask_stability import certified, kept_in_common, score_rounding, top_set
from semdiag.mathematics.score_strips import part_of
from semdiag.measuring.calls.collector import NotAvailableError, check_rows
from semdiag_files import InputError

_STRIP = 2**22  # scores held at a time (or one row of queries of every copy)


@dataclass(frozen=True)
class Selection:
    """How an input-dependent mask follows from the scores."""

    sign: int  # 1 if the largest scores are kept, -1 if the smallest
    by_model: bool  # whether the model itself selects; otherwise the set is the one that top-k would choose


def selection_of(kind: str) -> Selection | None:
    """Return how masks of a kind of attention follow from the scores; None if they do not depend on the input."""
    if kind not in KINDS:
        raise InputError(
            f"How {kind} attention selects its keys is not known here, so its masks cannot be judged. "
            f"Known are {', '.join(KINDS)}."
        )
    if kind in APPROXIMATE:
        raise NotAvailableError(f"the scores alone do not say which keys {kind} attention keeps")
    attention_kind = KINDS[kind]
    if attention_kind.keeps in ("fixed", "redrawn"):
        return None
    return Selection(-1 if attention_kind.keeps == "smallest" else 1, attention_kind.input_dependent)


@dataclass(frozen=True, eq=False)
class RowChanges:
    """How each row changes; D draws, N noise levels, b samples."""

    counted: Tensor  # (b, H, L) bool: queries that keep a key and drop one; below, other queries mean nothing
    separation: Tensor  # (b, H, L) Δ of the clean row, nats
    common: Tensor  # (D, N, b, H, L) int, |S ∩ S'|
    changed: Tensor  # (D, N, b, H, L) bool, S ≠ S'
    certified: Tensor  # (D, N, b, H, L) bool
    swing: Tensor  # (D, N, b, H, L) dz_(k) − dz_(k+1), nats
    response: Tensor  # (N, b, H, L) ‖p − p'‖₁ of the model's own weights in the first of the draws
    set_size: Tensor  # (b, H, L) int, |S|
    keys: Tensor  # (b, H, L) int, how many the query may attend to


def row_changes(
    call: AttentionCall, samples: int, draws: int, levels: int, k: int, selection: Selection
) -> RowChanges:
    """Compare the mask of every clean row with those of its noisy copies."""
    if call.sinks is not None:
        raise NotAvailableError("its softmax has attention sinks, which a row of scores does not show")
    check_rows(call, samples * (1 + draws * levels))
    length = call.k.shape[2]
    by_model = call.selected if selection.by_model else None
    set_size = min(k, length) if by_model is None else by_model.shape[-1]
    # Half precision is compared in float32, but its selection was rounded as it was.
    eps = torch.finfo(call.q.dtype).eps
    q, keys = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (call.q, call.k))
    keys = keys.repeat_interleave(q.shape[1] // keys.shape[1], 1) if keys.shape[1] < q.shape[1] else keys
    rounding = score_rounding(q, keys, call.scale, eps)
    rounding = _copies(rounding, samples, levels) + rounding[:samples]
    rows = max(1, _STRIP // (len(q) * q.shape[1] * length))
    parts = []
    for start in range(0, q.shape[2], rows):
        part = slice(start, start + rows)
        scores = _scores(q[:, :, part], keys, selection.sign * call.scale)
        if call.softcap is not None:  # it moves no two scores further apart
            scores = call.softcap * torch.tanh(scores / call.softcap)
        bias, chosen = (part_of(values, slice(None), part) for values in (call.bias, by_model))
        if bias is not None:
            scores = scores + selection.sign * bias
        allowed = call.part(slice(samples), part).allowed  # of the clean samples; copies have the same
        parts.append(_strip(scores, allowed, chosen, rounding[..., part], samples, set_size, selection.sign))
    joined = {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}
    joined["counted"] &= call.counted[:samples]
    return RowChanges(**joined)


def _scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return scale · q kᵀ: (B, H, r, D), (B, H, L, D) -> (B, H, r, L), in one pass over memory."""
    rows = q.flatten(0, 1)
    columns = keys.flatten(0, 1).transpose(1, 2)
    return torch.baddbmm(q.new_empty(()), rows, columns, beta=0, alpha=scale).view(*q.shape[:3], -1)


def _copies(values: Tensor, samples: int, levels: int) -> Tensor:
    """Return the noisy part of a batch: (b + D·N·b, …) -> (D, N, b, …)."""
    return values[samples:].view(-1, levels, samples, *values.shape[1:])


def _strip(
    scores: Tensor,
    allowed: Tensor | None,
    chosen: Tensor | None,
    rounding: Tensor,
    samples: int,
    set_size: int,
    sign: int,
) -> dict[str, Tensor]:
    levels = rounding.shape[1]
    clean = scores[:samples]
    noisy = _copies(scores, samples, levels)
    change = noisy - clean
    if allowed is not None:
        clean = clean.masked_fill(~allowed, -torch.inf)
        allowed = allowed.expand(clean.shape)
    before = top_set(clean, set_size, None if chosen is None else chosen[:samples])
    keys = clean.new_full(clean.shape[:-1], clean.shape[-1], dtype=torch.int64)
    if allowed is not None:
        keys = allowed.sum(-1)
        # A key that is not allowed must not widen the range: it gets the change of one that is.
        change = torch.where(allowed, change, _at(change, before.boundary[..., :1]))
    width = change.amax(-1) - change.amin(-1)
    swing = _at(change, before.boundary).diff(dim=-1).squeeze(-1).neg()
    if chosen is None:
        common = kept_in_common(noisy, before, out=change)  # the content of ``change`` is no longer needed
    else:
        inside = torch.zeros_like(clean, dtype=torch.bool).scatter_(-1, before.positions, True)
        later = _copies(chosen, samples, levels).clamp(min=0)
        common = inside.expand(*later.shape[:-1], -1).gather(-1, later).sum(-1)
    weights = _weights(clean if sign > 0 else -clean, allowed, before.positions if chosen is not None else None)
    kept_noisy = None if chosen is None else _copies(chosen, samples, levels)[0].clamp(min=0)
    response = _weights(noisy[0] if sign > 0 else -noisy[0], allowed, kept_noisy).sub_(weights).abs_().sum(-1)
    return {
        "counted": keys > set_size, "separation": before.separation, "common": common,
        "changed": common < set_size, "certified": certified(width, before.separation, rounding),
        "swing": swing, "response": response,
        "set_size": torch.full_like(before.separation, set_size, dtype=torch.int64), "keys": keys,
    }  # fmt: skip


def _at(values: Tensor, positions: Tensor) -> Tensor:
    """Return entries of (D, N, b, H, r, L) at positions (b, H, r, n)."""
    return values.gather(-1, positions.expand(*values.shape[:-1], -1))


def _weights(scores: Tensor, allowed: Tensor | None, chosen: Tensor | None) -> Tensor:
    if chosen is not None:
        allowed = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
    return (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)).softmax(-1)
