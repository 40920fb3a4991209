"""How terms of scores are read as masks, and what happens to scores between their product and the softmax."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall, call_from_tensors
from semdiag.capturing.recording import outside_all_modes
from semdiag.mathematics.planes import unraveled

FORBIDDING = -9_999.0  # a term this far below the largest of its row can forbid a key
ROOM = 1_000.0  # margin for scores or a bias on top of such a constant
_ROWS = 16  # random rows at which a history is compared with the softmax's input
_KEYS = 4  # random keys at which it is compared in all rows
_AT_ONCE = 2**20  # scores looked at together


def lowest(dtype: torch.dtype) -> float:
    """Return the number up to which a term counts as -inf: -1e36; in float16 half of its lowest number."""
    return max(-1e36, torch.finfo(dtype).min / 2)


def split_mask(
    mask: Tensor, least: float | None = None
) -> tuple[Tensor | None, Tensor | None, float | None, Tensor | None]:
    """Split a mask into the keys that it allows and the bias that it adds."""
    with outside_all_modes(mask.device.type):
        mask = mask.detach()
        if not mask.is_floating_point():
            return mask.bool(), None, None, None
        allowed, bias, steep = split_scores(mask, FORBIDDING, least)
        return allowed, (bias if bool(bias.any()) else None), steep, full_rows(mask)


def full_rows(terms: Tensor) -> Tensor | None:
    """Return the keys with the largest term in rows in which all terms count as -inf but are not; None if none."""
    top = terms.amax(-1, keepdim=True)
    rows = (top <= lowest(terms.dtype)) & (top > -torch.inf)
    return rows & (terms - top > FORBIDDING) if bool(rows.any()) else None


def split_scores(
    terms: Tensor, enough: float = FORBIDDING + ROOM, least: float | None = None
) -> tuple[Tensor | None, Tensor, float | None]:
    """Split a softmax's input, with scores on top of such a constant, into allowed keys and bias."""
    forbidden = terms <= (lowest(terms.dtype) if least is None else least)
    constant = None
    best = terms.masked_fill(forbidden, -torch.inf).amax(-1, keepdim=True)
    below = (terms - best).masked_fill(forbidden, 0)
    if bool((below <= enough * (1 - torch.finfo(terms.dtype).eps)).any()):
        steep = below <= FORBIDDING + ROOM
        highest = below.masked_fill(~steep, -torch.inf).amax(-1, keepdim=True)
        steep &= below.masked_fill(steep, 0).amin(-1, keepdim=True) > highest / 2
        constant = float(terms.masked_fill(~steep, 0).amin()) if bool(steep.any()) else None
        forbidden = forbidden | steep
    some = bool(forbidden.any())
    return (~forbidden if some else None), (terms.masked_fill(forbidden, 0) if some else terms), constant


class UntraceableError(Exception):
    """Raised for an operation after which the scores are no longer those of softmax attention."""


@dataclass(frozen=True, eq=False)
class ScoreHistory:
    """Scores as factor · softcap(q kᵀ) + bias; entries at or below ``floor`` are masked."""

    q: Tensor  # (…, Lq, D)
    k: Tensor  # (…, Lk, D)
    lead: torch.Size  # shape of the scores before their last two axes
    scale: float = 1.0  # factor on the product; inside tanh for soft-capped scores
    softcap: float | None = None  # factor outside tanh; None means no soft-cap
    bias: Tensor | None = None  # term broadcastable to the scores; None means none
    allowed: Tensor | None = None  # bool, broadcastable to the scores: entries that no mask forbids
    floor: float | None = None  # entries at or below it were overwritten too; None means none was
    forbidding: float | None = None  # finite constant that was added or filled in to forbid keys
    eps: float = 0.0  # eps of the least precise dtype of the scores so far
    lowest: float = -1e36  # largest term that counts as -inf
    checked: bool = False  # whether it was found to agree with the softmax's input

    def times(self, factor: Any) -> "ScoreHistory":
        """Multiply by a number, or by a tensor that is constant over the keys."""
        number = as_number(factor)
        forbidding = self.forbidding
        if forbidding is not None:
            forbidding *= float(factor.min()) if number is None else number
            if forbidding > FORBIDDING:
                raise UntraceableError
        if number is None:
            if self.softcap is not None or self.floor is not None or factor.shape[-1:] != (1,):
                raise UntraceableError
            q = self.q.expand(*self.lead, *self.q.shape[-2:]) * factor.detach()
            bias = None if self.bias is None else self.bias * factor.detach()
            return replace(self, q=q, bias=bias, forbidding=forbidding)
        if number <= 0 and self.floor is not None:
            raise UntraceableError
        changed = replace(
            self,
            bias=None if self.bias is None else self.bias * number,
            floor=None if self.floor is None else self.floor * number,
            forbidding=forbidding,
        )
        if self.softcap is None:
            return replace(changed, scale=self.scale * number)
        return replace(changed, softcap=self.softcap * number)

    def plus(self, term: Any, dtype: torch.dtype) -> "ScoreHistory":
        """Add a bias or a mask; drop a term that is constant over the keys, which changes no softmax."""
        number = as_number(term)
        if number is None and (not isinstance(term, Tensor) or term.is_complex()):
            raise UntraceableError
        if self.floor is not None and (term.amax() if number is None else number) > -self.floor / 2:
            raise UntraceableError  # what was overwritten may come back above the floor
        if number is not None or term.shape[-1] == 1 != self.k.shape[-2]:
            return self
        term = term.detach().to(torch.promote_types(term.dtype, torch.float32))
        bias = term if self.bias is None else self.bias + term
        return replace(self, bias=bias, lowest=max(self.lowest, lowest(dtype)))

    def filled(self, value: Any, dtype: torch.dtype, rest: Tensor | None = None) -> "ScoreHistory":
        """Replace some scores by a very low number; ``rest`` marks the other scores, None if unknown."""
        number = as_number(value)
        if number is None or number > FORBIDDING:
            raise UntraceableError
        steep = number if number > lowest(dtype) else None
        if rest is not None:
            steep = steep if steep is None or not bool(rest.all()) else None
            allowed = rest if self.allowed is None else self.allowed & rest
            return replace(self, allowed=allowed, forbidding=self.forbidding if steep is None else steep)
        floor = max(number, torch.finfo(torch.float32).min) / 2
        floor = floor if self.floor is None else max(self.floor, floor)
        return replace(self, floor=floor, forbidding=self.forbidding if steep is None else steep)

    def bent(self) -> "ScoreHistory":
        """Apply tanh, the first half of a soft-cap."""
        if any(x is not None for x in (self.softcap, self.bias, self.allowed, self.floor)):
            raise UntraceableError
        return replace(self, softcap=1.0)

    def viewed(self, result: Tensor) -> "ScoreHistory":
        """Change the dtype, or the shape of the axes before the last two."""
        ends = (self.q.shape[-2], self.k.shape[-2])
        new = result.shape[:-2]
        if result.shape[-2:] != ends or math.prod(new) != math.prod(self.lead):
            raise UntraceableError
        if new == self.lead:
            return self
        bias, allowed = (None if x is None else reshaped(x, self.lead, new) for x in (self.bias, self.allowed))
        q, k = (x if x.ndim == 2 else reshaped(x, self.lead, new) for x in (self.q, self.k))
        return replace(self, q=q, k=k, bias=bias, allowed=allowed, lead=new)

    def agrees(self, scores: Tensor, generator: torch.Generator) -> bool:
        """Return whether a softmax's input is these scores, up to a constant per row.

        Some rows, and all rows at some keys, agree up to rounding; in every row, forbidden keys are far below.
        """
        shape = torch.Size((*self.lead, self.q.shape[-2], self.k.shape[-2]))
        if scores.shape != shape or not scores.numel():
            return False
        if self.checked:
            return True
        where = torch.randint(math.prod(shape[:-1]), (_ROWS,), generator=generator)
        rows = unraveled(where, shape[:-1], scores.device)
        step = max(1, shape[-1] // _KEYS)
        keys = slice(int(torch.randint(step, (), generator=generator)), None, step)
        some = self._equals(self._at_rows(rows), scores[rows])
        return some and self._equals(self._at_keys(keys), scores[..., keys]) and self._forbids(scores)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def _at_rows(self, index: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the scores of some rows, and which of them no mask forbids."""
        q = self.q.expand(*self.lead, *self.q.shape[-2:])[index].to(self._dtype)
        k = self.k.expand(*self.lead, *self.k.shape[-2:])[index[:-1]].to(self._dtype)
        bias, allowed = (None if x is None else x[index] for x in self._terms())
        return self._completed((k @ q[..., None])[..., 0], bias, allowed)

    def _at_keys(self, keys: slice) -> tuple[Tensor, Tensor]:
        """Return the scores of all rows at some keys, and which of them no mask forbids."""
        product = self.q.to(self._dtype) @ self.k[..., keys, :].to(self._dtype).mT
        product = product.expand(*self.lead, *product.shape[-2:])  # a factor may have brought the heads
        bias, allowed = (None if x is None else x[..., keys] for x in self._terms())
        return self._completed(product, bias, allowed)

    def _terms(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the bias and the allowed keys, expanded to the scores."""
        shape = (*self.lead, self.q.shape[-2], self.k.shape[-2])
        bias, allowed = (None if x is None else x.expand(shape) for x in (self.bias, self.allowed))
        return bias, allowed

    def _completed(self, product: Tensor, bias: Tensor | None, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return scores from a part of the product, and which of them no mask forbids."""
        scores = product * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores)
        scores = scores if bias is None else scores + bias
        allowed = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed
        return scores, allowed.expand(scores.shape)

    def _equals(self, expected: tuple[Tensor, Tensor], inputs: Tensor) -> bool:
        """Return whether rows are the expected scores up to rounding; not finite ones are the model's."""
        scores, allowed = expected
        eps = max(self.eps, *(torch.finfo(x.dtype).eps for x in (self.q, self.k, inputs)))
        inputs = inputs.to(scores.dtype)
        hidden = ~allowed
        off = scores - inputs
        most, least = (off.masked_fill(hidden, end) for end in (-torch.inf, torch.inf))
        spread = most.amax(-1) - least.amin(-1)
        best = inputs.masked_fill(hidden, -torch.inf).amax(-1)  # NaN or infinite: the model's; -inf: no key
        sizes = (x.masked_fill(hidden, 0)[best.isfinite()].abs() for x in (scores, inputs))
        size = max([self._reach(), *(float(x.amax()) for x in sizes if x.numel())])
        limit = (8 * eps + 56 * min(eps, torch.finfo(torch.float32).eps)) * size
        return not bool((best.isfinite() & ~(spread <= limit)).any())

    def _reach(self) -> float:
        """Return the largest |scale| · ‖q‖ · ‖k‖, except NaN, to which the rounding of products is relative."""
        q, k = (float(x.float().norm(dim=-1).nan_to_num(0.0, torch.inf).amax()) for x in (self.q, self.k))
        return abs(self.scale) * (self.softcap or 1.0) * q * k

    def _forbids(self, scores: Tensor) -> bool:
        """Return whether the keys that are forbidden are far below the others, in every row."""
        if self.allowed is None:
            return True
        allowed = self.allowed.expand(*self.allowed.shape[:-2], *scores.shape[-2:])
        some = self.allowed.any(-1, keepdim=True).expand(*self.allowed.shape[:-2], scores.shape[-2], 1)
        step = max(1, _AT_ONCE // (scores.numel() // scores.shape[-2]))
        for rows in (slice(n, n + step) for n in range(0, scores.shape[-2], step)):
            there = allowed[..., rows, :]
            part = scores[..., rows, :]
            limit = torch.zeros(there.shape, dtype=scores.dtype, device=scores.device)
            limit.masked_fill_(there, -torch.inf)  # added, it takes half the time of filling in the scores
            low = (part.amax(-1, keepdim=True) - 9_000).where(some[..., rows, :], FORBIDDING + ROOM)
            if bool(((part + limit).amax(-1, keepdim=True) > low.clamp(min=lowest(scores.dtype))).any()):
                return False
        return True

    def split(self, scores: Tensor) -> "ScoreHistory":
        """Separate terms that forbid keys from the bias, among the keys that the softmax's input leaves."""
        allowed = self.allowed
        terms = self.bias
        if self.floor is not None:
            allowed = scores > self.floor if allowed is None else (scores > self.floor) & allowed
        forbidding = None
        if terms is not None and not bool(terms.amax() - terms.amin() < -FORBIDDING - ROOM):
            terms = terms if allowed is None else terms.masked_fill(~allowed, -torch.inf)
            allowed, terms, forbidding, _ = split_mask(terms, self.lowest)
        elif terms is not None and not bool(terms.any()):
            terms = None
        forbidding = self.forbidding if forbidding is None else forbidding
        return replace(self, bias=terms, allowed=allowed, floor=None, forbidding=forbidding)

    def call(self, v: Tensor, mixed: Tensor, heads: int | None, scores: Tensor | None = None) -> AttentionCall:
        """Return the attention; its fully masked rows are read from the softmax's input, if that is given."""
        history, full = (self, None) if scores is None else self._with_full_rows(scores)
        lead = history.lead
        allowed = history.allowed
        bias = history.bias
        q = history.q.expand(*lead, *history.q.shape[-2:])
        k, v = (_shared(x, lead) for x in (history.k, v))
        if k.shape[:-2] != v.shape[:-2]:
            k, v = (x.expand(*lead, *x.shape[-2:]) for x in (k, v))
        if len(lead) == 3 and k.shape[2] == 1 < lead[2]:  # (B, Hk, G, L, D) against (B, Hk, 1, L, D)
            q = q.flatten(1, 2)
            mixed = mixed.flatten(1, 2)
            k = k.flatten(1, 2)
            v = v.flatten(1, 2)
            masks = (None if x is None else x.expand(*lead, *x.shape[-2:]) for x in (allowed, bias, full))
            allowed, bias, full = (None if x is None else x.flatten(1, 2) for x in masks)
        scale = self.scale if self.softcap is None else self.scale * self.softcap
        return call_from_tensors(
            q, k, v, mixed, scale=scale, heads=heads, allowed=allowed, bias=bias, fully_masked=full,
            softcap=self.softcap, forbidding=self.forbidding,
        )  # fmt: skip

    def _with_full_rows(self, scores: Tensor) -> tuple["ScoreHistory", Tensor | None]:
        """Return the history with fully masked rows and rows at one low constant; and their keys or None."""
        allowed = self.allowed
        top = scores.amax(-1, keepdim=True)
        enough = FORBIDDING + ROOM
        low = (top <= enough) & top.isfinite()
        if not bool(low.any()):
            return self, None
        below = scores - top
        near = below > enough
        none = torch.zeros_like(low) if allowed is None else ~allowed.expand(scores.shape).any(-1, keepdim=True)
        rows = low & (none | ((below == 0) | ~near).all(-1, keepdim=True))
        if not bool(rows.any()):
            return self, None
        bias = torch.where(rows, below.masked_fill(~near, 0), 0.0 if self.bias is None else self.bias)
        q = self.q.expand(*self.lead, *self.q.shape[-2:]).masked_fill(rows, 0)
        allowed = ~rows if allowed is None else ~rows & allowed
        return replace(self, q=q, bias=bias if bool(bias.any()) else None, allowed=allowed), rows & near


def scores_alone(scores: Tensor, keys: Sequence[int]) -> ScoreHistory:
    """Return a history for scores of unknown origin: all scores go into the bias."""
    allowed, bias, forbidding = split_scores(scores)
    zero = scores.new_zeros(())
    q = zero.expand(*scores.shape[:-1], 1)
    k = zero.expand(*keys, 1)
    return ScoreHistory(q, k, scores.shape[:-2], bias=bias, allowed=allowed, forbidding=forbidding)


def as_number(value: Any) -> float | None:
    """Return a number, or a tensor of one element, as a float; None for anything else."""
    if isinstance(value, int | float):
        return float(value)
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None


def reshaped(tensor: Tensor, old: torch.Size, new: torch.Size) -> Tensor:
    """Return a tensor with other leading axes; one that is constant along all of them keeps its shape."""
    if old == new or tensor.ndim <= 2 or math.prod(tensor.shape[:-2]) == 1:
        return tensor.reshape(tensor.shape[-2:]) if tensor.ndim > 2 and old != new else tensor
    return tensor.expand(*old, *tensor.shape[-2:]).reshape(*new, *tensor.shape[-2:])


def _shared(x: Tensor, lead: torch.Size) -> Tensor:
    """Return a tensor expanded to the leading axes, except for the heads' if one head serves all."""
    if len(lead) < 2:  # a single axis may be the heads' or another
        return x.expand(*lead, *x.shape[-2:])
    heads = x.shape[-3] if x.ndim > 2 else 1
    return x.expand(*lead[:-1], heads, *x.shape[-2:])
