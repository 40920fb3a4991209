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
    """Split a mask into the keys that it allows and the bias that it adds.

    A term forbids a key if it counts as -inf (:func:`lowest`), or if it is a constant at least 9,999 below the
    largest term of its row, with a bias of up to 1,000 on top, and no term of the row lies between it and half of
    that. Terms that fall with distance (ALiBi) are a bias, however low. A row in which the dtype's lowest number
    forbids every key is fully masked: the softmax attends to all of these keys.

    Args:
        mask: bool, true where attention is allowed; or float (…, Lq or 1, Lk), added to the scores.
        least: a term at or below this counts as -inf; None means :func:`lowest` of the mask's dtype.

    Returns:
        Allowed keys, bool, or None if none is forbidden; bias, or None if it is zero; the constant that forbids
        keys in place of -inf, or None if none does; the keys with the largest constant in fully masked rows, bool,
        or None if there are no such rows.

    Example:
        >>> split_mask(torch.tensor([0.0, -torch.inf]))
        (tensor([ True, False]), None, None, None)
        >>> split_mask(torch.tensor([0.0, 2.0, -10000.0]))
        (tensor([ True,  True, False]), tensor([0., 2., 0.]), -10000.0, None)
        >>> split_mask(torch.tensor([-1e38, -1e38, -torch.inf]))
        (tensor([False, False, False]), None, None, tensor([ True,  True, False]))
        >>> split_mask(-5000 * torch.arange(4.0))[0] is None
        True
    """
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
    """Split the scores that a softmax saw in the same way, if what was added to them is unknown.

    Args:
        scores: (…, Lq, Lk).

    Returns:
        Allowed keys, bool, or None if none is forbidden; scores of allowed keys, 0 elsewhere; the lowest score
        that stands for -inf, or None if none does.
    """
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
