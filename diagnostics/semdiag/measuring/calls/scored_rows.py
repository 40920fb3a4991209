"""The score rows of an attention call in float64, with its sets as masks; ties up to rounding are recognised."""

from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag_models import InputError

_TIE = 8 * torch.finfo(torch.float64).eps  # times |scale|·‖q‖·‖k‖: the rounding of a dot product, with a margin


class NotAvailableError(InputError):
    """Raised if something cannot be measured on a model; the message can follow "because"."""


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """Rows of scores and statistics of their sets; shapes (B, H, L) unless stated otherwise."""

    scores: Tensor  # (B, H, L, L) float64, nats; -inf where a key is not allowed
    selected: Tensor  # (B, H, L, L) bool, S_i; empty for padded queries
    counted: Tensor  # bool, false for padded queries and for rows without keys
    kept: Tensor  # int64, k_i
    dispersion: Tensor  # δ_i in nats; 0 if a row does not count
    separation: Tensor  # Δ_i in nats

    @property
    def weights(self) -> Tensor:
        """(B, H, L, L) softmax of the scores over S_i, 0 elsewhere; rows without keys are zeros."""
        weights = self.scores.masked_fill(~self.selected, -torch.inf).softmax(-1)
        return weights.where(self.selected, 0.0)

    def halves(self) -> tuple["ScoredRows", "ScoredRows"]:
        """Return the rows of the first and the second half of the batch."""
        first, second = zip(*(getattr(self, name).chunk(2) for name in self.__dataclass_fields__), strict=True)
        return ScoredRows(*first), ScoredRows(*second)


def scored_rows(call: AttentionCall) -> ScoredRows:
    """Score an attention call and compute δ, Δ and the sets."""
    if call.sinks is not None:
        raise NotAvailableError("its softmax has attention sinks, which a row of scores does not show")
    scores, seen = call.scores(torch.float64), call.part().allowed
    allowed = call.counted[..., None] if seen is None else call.counted[..., None] & seen
    allowed = allowed.expand(scores.shape)
    selected = allowed if call.selected is None else allowed & as_mask(call.selected, scores.shape[-1])
    lowest = scores.masked_fill(~selected, torch.inf).amin(-1)
    highest = scores.masked_fill(~selected, -torch.inf).amax(-1)
    passed_over = scores.masked_fill(~(allowed & ~selected), -torch.inf).amax(-1)
    counted = selected.any(-1)
    gap = torch.where(counted, lowest - passed_over, torch.inf)
    longest_key = call.k.double().norm(dim=-1).amax(-1, keepdim=True)
    longest_key = longest_key.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    rounding = _TIE * abs(call.scale) * call.q.double().norm(dim=-1) * longest_key
    return ScoredRows(
        scores=scores.masked_fill(~allowed, -torch.inf),
        selected=selected,
        counted=counted,
        kept=selected.sum(-1),
        dispersion=torch.where(counted, highest - lowest, 0.0),
        separation=torch.where(gap.abs() <= rounding, 0.0, gap),
    )


def as_mask(selected: Tensor, length: int) -> Tensor:
    """Convert key positions (B, H, L, K), -1 for none, to a mask (B, H, L, length)."""
    mask = torch.zeros(*selected.shape[:3], length + 1, dtype=torch.bool, device=selected.device)
    return mask.scatter(-1, selected.where(selected >= 0, length), True)[..., :-1]
