"""One attention call over [clean; noisy copies], reduced to what became of each query's mask."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.capturing.attention_calls import AttentionCall
from semdiag.capturing.attention_kinds import KINDS
from semdiag.mathematics.mask_stability import certified, kept_in_common, score_rounding, top_set
from semdiag.measurement.calls.scored_rows import NotAvailableError
from semdiag_models import InputError

_STRIP = 2**22  # scores held at a time (or one row of queries of every copy)


@dataclass(frozen=True)
class Selection:
    """How an input-dependent mask follows from the scores.

    Attributes:
        sign: 1 if the largest scores are kept, -1 if the smallest.
        own: whether the model selects by itself; otherwise the set is the one it would choose.
    """

    sign: int
    own: bool


# By kind of attention; None where the mask does not depend on the input.
SELECTIONS: dict[str, Selection | None] = {
    name: None
    if kind.keeps == "fixed"
    else Selection(-1 if kind.keeps == "smallest" else 1, own=kind.input_dependent)
    for name, kind in KINDS.items()
}


def selection_of(kind: str) -> Selection | None:
    """How masks of a kind of attention are selected.

    Args:
        kind: the attention.

    Returns:
        The rule; None if the mask does not depend on the input.

    Raises:
        InputError: if the kind is not known: its masks cannot be judged.
    """
    if kind not in SELECTIONS:
        raise InputError(
            f"How {kind} attention selects its keys is not known here, so its masks cannot be judged. "
            f"Known are {', '.join(SELECTIONS)}."
        )
    return SELECTIONS[kind]


@dataclass(frozen=True, eq=False)
class RowChanges:
    """What became of each row; D draws, N noise levels, b samples.

    Attributes:
        counted: (b, H, L) bool: queries that drop a key; the others mean nothing below.
        separation: (b, H, L) Δ of the clean row, nats.
        common: (D, N, b, H, L) int, |S ∩ S'|.
        certified: (D, N, b, H, L) bool.
        swing: (D, N, b, H, L) dz_(k) − dz_(k+1), nats.
        response: (N, b, H, L) ‖p − p'‖₁ of the model's own weights in the first of the draws.
        kept: k.
    """

    counted: Tensor
    separation: Tensor
    common: Tensor
    certified: Tensor
    swing: Tensor
    response: Tensor
    kept: int


class Workspace:
    """Two blocks of memory, used again for every strip: fresh pages would cost more than what is done in them."""

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}

    def like(self, name: str, shape: Sequence[int], of: Tensor) -> Tensor:
        """Memory for a tensor of this shape, with the type and device of another; its content is undefined."""
        block = self._blocks.get(name)
        if (
            block is None
            or block.numel() < math.prod(shape)
            or (block.dtype, block.device) != (of.dtype, of.device)
        ):
            block = self._blocks[name] = of.new_empty(math.prod(shape))
        return block[: math.prod(shape)].view(*shape)


def row_changes(
    call: AttentionCall, samples: int, levels: int, k: int, selection: Selection, workspace: Workspace
) -> RowChanges:
    """Compare the mask of every clean row with those of its noisy copies.

    In strips of queries: nothing of size L × L is kept, but for one strip.

    Source: docs/theory.md#mask-stability. Deviation: none.

    Args:
        call: over a batch of [clean; copies], ``samples`` clean ones, then (draw, level, sample) in order.
        samples: b.
        levels: N, noise levels.
        k: size of the set that a model without a selection of its own would choose.
        selection: how the masks come about.
        workspace: memory to work in.

    Returns:
        What became of the rows.

    Raises:
        NotAvailableError: if the call has attention sinks, or its batch is not made of the samples.
    """
    if call.sinks is not None:
        raise NotAvailableError("its softmax has attention sinks, which a row of scores does not show")
    if call.q.shape[0] % samples:
        raise NotAvailableError(f"the attention of {call.module} does not keep the samples apart")
    length = call.k.shape[2]
    kept = call.selected.shape[-1] if selection.own and call.selected is not None else min(k, length)
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
        if call.softcap is not None:  # which moves no two scores further apart
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.bias is not None:
            scores = scores + selection.sign * _rows_of(call.bias, part)
        allowed = _allowed(call, samples, part)
        chosen = call.selected[:, :, part] if selection.own and call.selected is not None else None
        parts.append(
            _strip(scores, allowed, chosen, rounding[..., part], samples, kept, selection.sign, workspace)
        )
    joined = {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}
    if call.queries is not None:
        joined["counted"] &= call.queries[:samples, None, :]
    return RowChanges(**joined, kept=kept)


def _scores(q: Tensor, keys: Tensor, scale: float, workspace: Workspace) -> Tensor:
    """scale · q kᵀ: (B, H, r, D), (B, H, L, D) -> (B, H, r, L), in the workspace."""
    shape = (*q.shape[:3], keys.shape[2])
    out = workspace.like("scores", (shape[0] * shape[1], *shape[2:]), q)
    nothing = q.new_empty(())
    torch.baddbmm(nothing, q.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), beta=0, alpha=scale, out=out)
    return out.view(shape)


def _copies(values: Tensor, samples: int, levels: int) -> Tensor:
    """The noisy part of a batch: (b + D·N·b, …) -> (D, N, b, …)."""
    return values[samples:].view(-1, levels, samples, *values.shape[1:])


def _allowed(call: AttentionCall, samples: int, part: slice) -> Tensor | None:
    """Allowed keys of the clean samples, which are those of their copies: (b or 1, H or 1, rows or 1, L)."""
    allowed = call.allowed_keys(part.start, min(part.stop, call.q.shape[2]))
    if allowed is None:
        return None
    allowed = allowed[(None,) * (4 - allowed.ndim)]
    return allowed[:samples] if allowed.shape[0] > 1 else allowed


def _rows_of(values: Tensor, part: slice) -> Tensor:
    """Some queries of (B or 1, H or 1, Lq or 1, Lk)."""
    return values[:, :, part] if values.shape[2] > 1 else values


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
    counted = torch.full(clean.shape[:-1], clean.shape[-1] > kept, device=clean.device)
    if allowed is not None:
        counted = allowed.sum(-1) > kept
        # A key that is not allowed must not widen the range: it gets the change of one that is.
        change = torch.where(allowed, change, _at(change, before.boundary[..., :1]))
    width = change.amax(-1) - change.amin(-1)
    swing = _at(change, before.boundary).diff(dim=-1).squeeze(-1).neg()
    if chosen is None:
        common = kept_in_common(noisy, before, out=change)  # whose content is read
    else:
        inside = torch.zeros_like(clean, dtype=torch.bool).scatter_(-1, before.positions, True)
        later = _copies(chosen, samples, levels).clamp(min=0)
        common = inside.expand(*later.shape[:-1], -1).gather(-1, later).sum(-1)
    weights = _weights(clean if sign > 0 else -clean, allowed, before.positions if chosen is not None else None)
    there = None if chosen is None else _copies(chosen, samples, levels)[0].clamp(min=0)
    moved = _weights(noisy[0] if sign > 0 else -noisy[0], allowed, there).sub_(weights).abs_().sum(-1)
    return {
        "counted": counted,
        "separation": before.separation,
        "common": common,
        "certified": certified(width, before.separation, rounding),
        "swing": swing,
        "response": moved,
    }


def _at(values: Tensor, positions: Tensor) -> Tensor:
    """Entries of (D, N, b, H, r, L) at positions (b, H, r, n)."""
    return values.gather(-1, positions.expand(*values.shape[:-1], -1))


def _weights(scores: Tensor, allowed: Tensor | None, chosen: Tensor | None) -> Tensor:
    """Attention weights over the chosen keys, or over all allowed ones."""
    if chosen is not None:
        allowed = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
    return (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)).softmax(-1)
