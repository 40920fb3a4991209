"""Gradient norms of the loss at random parameters around a checkpoint, each beside its own bound."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.mathematics.logarithms import log_root_sum_squares
from semdiag.mathematics.planes import random_direction
from semdiag.measuring.encoders.movable import MovableEncoder
from semdiag.measuring.encoders.network_constants import network_forms
from semdiag.measuring.encoders.score_gradients import score_gradient_bounds
from semdiag.measuring.encoders.traces import trace_inputs
from semdiag.questions.lipschitz.measure.secants import GROUPS
from semdiag_models import Encoder

_TOKENS = 4000  # of one backward pass
Row = dict[str, Any]


def ball_gradients(
    moved: MovableEncoder, tokens: Tensor, labels: Tensor, radius: float, draws: int, seed: int
) -> Iterator[Row]:
    """Yield gradients of the mean cross-entropy at the checkpoint and at random parameters in a ball around it."""
    generator = torch.Generator().manual_seed(seed)
    for draw in range(draws + 1):
        size, point = 0.0, moved.origin
        if draw:
            size = radius * (1 - float(torch.rand((), generator=generator, dtype=torch.float64)))
            direction = random_direction(moved.origin, moved.slices(), generator)
            point = moved.origin + size * direction
        moved.move_to(point)
        distance = float((point - moved.origin).norm())
        norms = gradient_norms(moved, tokens, labels)
        forms = network_forms(moved.encoder, trace_inputs(moved.encoder, tokens))
        bounds = _group_bounds(moved, forms.log_sound) | {"all": float(forms.sound.log_value)}
        near = {} if draw else {"qk": _point_bound(moved.encoder, tokens, labels)}
        for group, slope in norms.items():
            row = {"draw": draw, "radius": size, "distance": distance, "group": group, "slope": slope}
            row["ln_point"] = near.get(group, math.nan)
            yield {**row, "ln_sound": bounds[group], "holds": forms.sound.holds}


def _point_bound(encoder: Encoder, tokens: Tensor, labels: Tensor) -> float:
    """Return the bound of the gradient in all queries and keys at the current parameters; b_k has none."""
    bounds = score_gradient_bounds(encoder, tokens, labels)
    return float(log_root_sum_squares(torch.tensor(list(bounds.values()), dtype=torch.float64)))


def gradient_norms(moved: MovableEncoder, tokens: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the 2-norm of the mean cross-entropy's gradient at the current point, in total and by group."""
    moved.encoder.zero_grad(set_to_none=True)
    per_pass = max(1, _TOKENS // tokens.shape[1])
    for ids, classes in zip(torch.split(tokens, per_pass), torch.split(labels, per_pass), strict=True):
        loss = F.cross_entropy(moved.encoder(ids), classes, reduction="sum") / len(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in moved.encoder.parameters()]
    gradient_vector = torch.cat([gradient.flatten() for gradient in gradients])
    moved.encoder.zero_grad(set_to_none=True)
    squares = {
        group: sum(float(gradient_vector[part].square().sum()) for part in moved.slices(group)) for group in GROUPS
    }
    return {
        "all": float(gradient_vector.norm()),
        **{group: math.sqrt(square) for group, square in squares.items()},
    }


def _group_bounds(moved: MovableEncoder, log_sound: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the root of the sum of squares of each group's constants; a weight and its bias may share one."""
    bounds = {}
    for group in GROUPS:
        names = dict.fromkeys(place.bound for place in moved.places if place.group == group)
        constants = torch.stack([log_sound[name].reshape(()) for name in names])
        bounds[group] = float(log_root_sum_squares(constants, dim=0))
    return bounds
