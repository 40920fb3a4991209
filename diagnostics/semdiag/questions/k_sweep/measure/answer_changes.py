"""Distances between two models' outputs on the same batch: divergence, losses, predictions, norms."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from semdiag.mathematics.predicted_classes import predicted_classes
from semdiag.questions.k_sweep.measure.answers import Answers, difference
from semdiag.questions.k_sweep.measure.targets import IGNORED

_AT_ONCE = 2**19  # entries: they fit the cache, and the log-probabilities of a whole batch are never held


def position_terms(before: Answers, after: Answers) -> dict[str, Tensor]:
    """Return each position's contribution to its sample's sums, (B, P)."""
    counted = before.counted
    none = torch.zeros(counted.shape, dtype=torch.int64, device=counted.device)
    values = dict.fromkeys(("targets", "correct", "predictions", "changed", "loss", "divergence"), none)
    if not (before.distribution and after.distribution):
        return values
    known = torch.zeros_like(counted) if before.targets is None else before.targets != IGNORED
    right = none if before.targets is None else before.targets.where(known, 0)
    parts = []
    for one, two, own in _strips(before.values, after.values, right):
        first, second = (x.to(_kind(x)).log_softmax(-1) for x in (one, two))
        loss = -second.gather(-1, own[:, None])[:, 0].double()
        choices, others = predicted_classes(first), predicted_classes(second)
        likely = first.exp()
        terms = first.sub_(second).mul_(likely)
        divergence = terms.sum(-1, dtype=torch.float64)
        if divergence.isnan().any():  # 0 times ∞; any other term of probability 0 is 0 already
            divergence = terms.masked_fill_(likely == 0, 0).sum(-1, dtype=torch.float64)
        parts.append((choices, others, divergence, loss))
    choices, others, divergence, loss = (torch.cat(each).view(counted.shape) for each in zip(*parts, strict=True))
    values["predictions"] = counted.long()
    values["changed"] = ((choices != others) & counted).long()
    values["divergence"] = divergence.masked_fill(~counted, 0)
    if before.targets is not None:
        values |= {"targets": known.long(), "correct": ((others == right) & known).long()}
        values["loss"] = loss.masked_fill(~known, 0)
    return values


def output_change(before: Answers, after: Answers) -> Tensor:
    """Return the relative change ‖after − before‖ / ‖before‖ without entries that stay infinite: (B,)."""
    parts = []
    for one, two in _strips(before.values, after.values):
        change, size = _norms(two - one, one)
        if not (change.isfinite().all() and size.isfinite().all()):
            stays = one.isinf() & (one == two)
            change, size = _norms(*(x.masked_fill(stays, 0) for x in (difference(two, one), one)))
        parts.append((change, size))
    counted = before.counted
    change, size = (
        torch.linalg.vector_norm(torch.cat(each).view(counted.shape).masked_fill(~counted, 0), dim=-1)
        for each in zip(*parts, strict=True)
    )
    relative: Tensor = (change / size).masked_fill(change == 0, 0)
    return relative.masked_fill(relative.isnan(), math.inf).masked_fill(~counted.any(1), math.nan)


def _norms(*values: Tensor) -> Iterator[Tensor]:
    """Yield the norms of rows, in float64."""
    return (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64) for x in values)


def _kind(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _strips(values: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a few positions at a time of (B, P, C) and others with the same positions."""
    flat = [x.reshape(-1, *x.shape[2:]) for x in (values, *others)]
    size = max(1, _AT_ONCE // max(1, values.shape[-1]))
    for at in range(0, max(1, len(flat[0])), size):
        yield tuple(x[at : at + size] for x in flat)
