"""Which terms of a mask, or scores of a softmax, forbid their key, and which are a bias."""

import torch
from torch import Tensor

from semdiag.capturing.recording import outside_all_modes

FORBIDDING = -9_999.0  # an additive term at or below it, relative to the best of its row, can forbid a key
ROOM = 1_000.0  # for what stands on top of such a constant: scores, a bias


def lowest(dtype: torch.dtype) -> float:
    """What is -inf in all but name: -1e36 and less, as a scaled lowest number; in float16 half of the lowest."""
    return max(-1e36, torch.finfo(dtype).min / 2)


def split_mask(mask: Tensor) -> tuple[Tensor | None, Tensor | None, float | None, Tensor | None]:
    """Split a mask into the keys that it allows and the bias that it adds.

    A term forbids a key if it is -inf in all but name (:func:`lowest`), or if it is a constant at or below -9,999,
    relative to the largest term of its row, by itself or with a bias of up to 1,000 on top, and nothing lies
    between it and half of that. Terms that fall with distance (ALiBi) are a bias, however low. A row in which
    every key is forbidden by the dtype's lowest number is fully masked: the softmax attends to all of these keys.

    Args:
        mask: bool, true where attention is allowed; or float (…, Lq or 1, Lk), added to the scores.

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
        forbidden, steep = _forbidden(mask)
        some = bool(forbidden.any())
        bias = mask.masked_fill(forbidden, 0) if some else mask
        full = full_rows(mask)
        return (~forbidden if some else None), (bias if bool(bias.any()) else None), steep, full


def full_rows(terms: Tensor) -> Tensor | None:
    """Where every key is forbidden by -inf in all but name, not all by -inf: those with the largest, or None."""
    top = terms.amax(-1, keepdim=True)
    found = (top <= lowest(terms.dtype)) & (top > -torch.inf)
    return found & (terms - top > FORBIDDING) if bool(found.any()) else None


def split_scores(scores: Tensor) -> tuple[Tensor | None, Tensor, float | None]:
    """Split the scores that a softmax saw likewise, where what was added to them is not known by itself.

    Args:
        scores: (…, Lq, Lk).

    Returns:
        Allowed keys, bool, or None if none is forbidden; scores of allowed keys, 0 elsewhere; the lowest score
        that stands for -inf, or None if none does.
    """
    forbidden, steep = _forbidden(scores, FORBIDDING + ROOM)  # a score stands on top of what was added
    some = bool(forbidden.any())
    return (~forbidden if some else None), (scores.masked_fill(forbidden, 0) if some else scores), steep


def _forbidden(terms: Tensor, enough: float = FORBIDDING) -> tuple[Tensor, float | None]:
    """Which terms forbid their key; and the lowest of those that are no -inf in all but name."""
    forbidden = terms <= lowest(terms.dtype)
    best = terms.masked_fill(forbidden, -torch.inf).amax(-1, keepdim=True)
    below = (terms - best).masked_fill(forbidden, 0)
    if not bool((below <= enough * (1 - torch.finfo(terms.dtype).eps)).any()):
        return forbidden, None
    steep = below <= FORBIDDING + ROOM
    highest = below.masked_fill(~steep, -torch.inf).amax(-1, keepdim=True)
    steep &= below.masked_fill(steep, 0).amin(-1, keepdim=True) > highest / 2
    found = terms.masked_fill(~steep, 0).amin()
    return forbidden | steep, (float(found) if bool(steep.any()) else None)
