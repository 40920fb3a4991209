"""Tell which terms of a mask, or scores of a softmax, forbid their key, and which are a bias."""

import torch
from torch import Tensor

from semdiag.capturing.recording import outside_all_modes

FORBIDDING = -9_999.0  # a term this far below the best of its row can forbid a key
ROOM = 1_000.0  # for scores or a bias on top of such a constant


def lowest(dtype: torch.dtype) -> float:
    """Return the number at or below which a term counts as -inf: -1e36; in float16 half of its lowest number."""
    return max(-1e36, torch.finfo(dtype).min / 2)


def split_mask(
    mask: Tensor, least: float | None = None
) -> tuple[Tensor | None, Tensor | None, float | None, Tensor | None]:
    """Split a mask into the keys that it allows and the bias that it adds."""
    with outside_all_modes(mask.device.type):
        mask = mask.detach()
        if not mask.is_floating_point():
            return mask.bool(), None, None, None
        forbidden, steep = _forbidden(mask, FORBIDDING, least)
        some = bool(forbidden.any())
        bias = mask.masked_fill(forbidden, 0) if some else mask
        full = full_rows(mask)
        return (~forbidden if some else None), (bias if bool(bias.any()) else None), steep, full


def full_rows(terms: Tensor) -> Tensor | None:
    """Return the keys with the largest term in rows where all count as -inf but not all are; None if none."""
    top = terms.amax(-1, keepdim=True)
    rows = (top <= lowest(terms.dtype)) & (top > -torch.inf)
    return rows & (terms - top > FORBIDDING) if bool(rows.any()) else None


def split_scores(scores: Tensor) -> tuple[Tensor | None, Tensor, float | None]:
    """Split the scores that a softmax saw in the same way, if what was added to them is unknown."""
    forbidden, steep = _forbidden(scores, FORBIDDING + ROOM)  # scores are on top of the constant
    some = bool(forbidden.any())
    return (~forbidden if some else None), (scores.masked_fill(forbidden, 0) if some else scores), steep


def _forbidden(terms: Tensor, enough: float, least: float | None = None) -> tuple[Tensor, float | None]:
    """Return which terms forbid their key, and the lowest of those that do not count as -inf."""
    forbidden = terms <= (lowest(terms.dtype) if least is None else least)
    best = terms.masked_fill(forbidden, -torch.inf).amax(-1, keepdim=True)
    below = (terms - best).masked_fill(forbidden, 0)
    if not bool((below <= enough * (1 - torch.finfo(terms.dtype).eps)).any()):
        return forbidden, None
    steep = below <= FORBIDDING + ROOM
    highest = below.masked_fill(~steep, -torch.inf).amax(-1, keepdim=True)
    steep &= below.masked_fill(steep, 0).amin(-1, keepdim=True) > highest / 2
    constant = terms.masked_fill(~steep, 0).amin()
    return forbidden | steep, (float(constant) if bool(steep.any()) else None)
