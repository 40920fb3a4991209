"""One attention call over [clean; noisy copies], reduced to how each query's mask changes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.capturing.attention_call import KINDS
from semdiag.capturing.attention_calls import AttentionCall
from semdiag.mathematics.mask_stability import certified, kept_in_common, score_rounding, top_set
from semdiag.mathematics.score_strips import part_of
from semdiag.measuring.calls.collector import NotAvailableError, check_rows
from semdiag_models import InputError

_STRIP = 2**22  # scores held at a time (or one row of queries of every copy)


@dataclass(frozen=True)
class Selection:
    """How an input-dependent mask follows from the scores."""

    sign: int  # 1 if the largest scores are kept, -1 if the smallest
    by_model: bool  # whether the model itself selects; otherwise the set is the one that top-k would choose
    ranked: bool = True  # whether the scores alone say which keys are kept


# By kind of attention; None where the mask does not depend on the input.
SELECTIONS: dict[str, Selection | None] = {
    name: None
    if kind.keeps in ("fixed", "redrawn")
    else Selection(
        -1 if kind.keeps == "smallest" else 1, kind.input_dependent, kind.keeps in ("all", "largest", "smallest")
    )
    for name, kind in KINDS.items()
}


def selection_of(kind: str) -> Selection | None:
    """Return how masks of a kind of attention are selected."""
    if kind not in SELECTIONS:
        raise InputError(
            f"How {kind} attention selects its keys is not known here, so its masks cannot be judged. "
            f"Known are {', '.join(SELECTIONS)}."
        )
    return SELECTIONS[kind]


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
    kept: Tensor  # (b, H, L) int, |S|
    keys: Tensor  # (b, H, L) int, how many the query may attend to


class Workspace:
    """Two blocks of memory that every strip reuses: fresh pages would cost more than the work done in them."""

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}

    def like(self, name: str, shape: Sequence[int], of: Tensor) -> Tensor:
        """Return uninitialised memory of this shape, with the dtype and device of another tensor."""
        block = self._blocks.get(name)
        if (
            block is None
            or block.numel() < math.prod(shape)
            or (block.dtype, block.device) != (of.dtype, of.device)
        ):
            block = self._blocks[name] = of.new_empty(math.prod(shape))
        return block[: math.prod(shape)].view(*shape)


def row_changes(
    call: AttentionCall, samples: int, draws: int, levels: int, k: int, selection: Selection, workspace: Workspace
) -> RowChanges:
    """Compare the mask of every clean row with those of its noisy copies."""
    if call.sinks is not None:
        raise NotAvailableError("its softmax has attention sinks, which a row of scores does not show")
    check_rows(call, samples * (1 + draws * levels))
    length = call.k.shape[2]
    kept = call.selected.shape[-1] if selection.by_model and call.selected is not None else min(k, length)
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
        scores = _scores(q[:, :, part], keys, selection.sign * call.scale, workspace)
        if call.softcap is not None:  # it moves no two scores further apart
            scores = call.softcap * torch.tanh(scores / call.softcap)
        bias, chosen = (part_of(values, slice(None), part) for values in (call.bias, call.selected))
        if bias is not None:
            scores = scores + selection.sign * bias
        allowed = call.part(slice(samples), part).allowed  # of the clean samples; copies have the same
        chosen = chosen if selection.by_model else None
        if chosen is not None and not selection.ranked:
            parts.append(_matched_strip(scores, allowed, chosen, samples, levels))
            continue
        parts.append(
            _strip(scores, allowed, chosen, rounding[..., part], samples, kept, selection.sign, workspace)
        )
    joined = {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}
    joined["counted"] &= call.counted[:samples]
    return RowChanges(**joined)


def _scores(q: Tensor, keys: Tensor, scale: float, workspace: Workspace) -> Tensor:
    """Return scale · q kᵀ: (B, H, r, D), (B, H, L, D) -> (B, H, r, L), in the workspace."""
    shape = (*q.shape[:3], keys.shape[2])
    out = workspace.like("scores", (shape[0] * shape[1], *shape[2:]), q)
    nothing = q.new_empty(())
    torch.baddbmm(nothing, q.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), beta=0, alpha=scale, out=out)
    return out.view(shape)


def _copies(values: Tensor, samples: int, levels: int) -> Tensor:
    """Return the noisy part of a batch: (b + D·N·b, …) -> (D, N, b, …)."""
    return values[samples:].view(-1, levels, samples, *values.shape[1:])


def _strip(
    scores: Tensor,
    allowed: Tensor | None,
    chosen: Tensor | None,
    rounding: Tensor,
    samples: int,
    kept: int,
    sign: int,
    workspace: Workspace,
) -> dict[str, Tensor]:
    levels = rounding.shape[1]
    clean, noisy = scores[:samples], _copies(scores, samples, levels)
    change = torch.sub(noisy, clean, out=workspace.like("change", noisy.shape, noisy))
    if allowed is not None:
        clean = clean.masked_fill(~allowed, -torch.inf)
        allowed = allowed.expand(clean.shape)
    before = top_set(clean, kept, None if chosen is None else chosen[:samples])
    keys = _numbers(allowed, clean)
    if allowed is not None:
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
    moved = _weights(noisy[0] if sign > 0 else -noisy[0], allowed, kept_noisy).sub_(weights).abs_().sum(-1)
    return {
        "counted": keys > kept, "separation": before.separation, "common": common, "changed": common < kept,
        "certified": certified(width, before.separation, rounding), "swing": swing, "response": moved,
        "kept": torch.full_like(before.separation, kept, dtype=torch.int64), "keys": keys,
    }  # fmt: skip


def _matched_strip(
    scores: Tensor, allowed: Tensor | None, chosen: Tensor, samples: int, levels: int
) -> dict[str, Tensor]:
    """Do the same as :func:`_strip` for sets of any size that the scores alone do not determine."""
    length = scores.shape[-1]
    masks = torch.zeros(*scores.shape[:-1], length + 1, dtype=torch.bool, device=scores.device)
    masks = masks.scatter_(-1, chosen.where(chosen >= 0, length), True)[..., :-1]
    before, after = masks[:samples], _copies(masks, samples, levels)
    clean, noisy = scores[:samples], _copies(scores, samples, levels)[0]
    dropped = ~before if allowed is None else allowed & ~before
    highest = clean.masked_fill(~dropped, -torch.inf).amax(-1)
    moved = [
        z.masked_fill(~kept, torch.finfo(z.dtype).min).softmax(-1) * kept
        for z, kept in ((clean, before), (noisy, after[0]))
    ]
    return {
        "counted": before.any(-1) & dropped.any(-1),
        "separation": clean.masked_fill(~before, torch.inf).amin(-1) - highest,
        "common": (before & after).sum(-1),
        "changed": (before != after).any(-1),
        "certified": torch.zeros(after.shape[:-1], dtype=torch.bool, device=scores.device),
        "swing": torch.full(after.shape[:-1], torch.nan, dtype=scores.dtype, device=scores.device),
        "response": (moved[1] - moved[0]).abs().sum(-1),
        "kept": before.sum(-1),
        "keys": _numbers(allowed, clean),
    }


def _numbers(allowed: Tensor | None, scores: Tensor) -> Tensor:
    """Return how many keys each query of (…, r, L) scores may attend to: (…, r)."""
    if allowed is None:
        return scores.new_full(scores.shape[:-1], scores.shape[-1], dtype=torch.int64)
    return allowed.expand(scores.shape).sum(-1)


def _at(values: Tensor, positions: Tensor) -> Tensor:
    """Return entries of (D, N, b, H, r, L) at positions (b, H, r, n)."""
    return values.gather(-1, positions.expand(*values.shape[:-1], -1))


def _weights(scores: Tensor, allowed: Tensor | None, chosen: Tensor | None) -> Tensor:
    """Return attention weights over the chosen keys, or over all allowed ones."""
    if chosen is not None:
        allowed = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
    return (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)).softmax(-1)
