"""How steep the loss is in each parameter tensor: gradients, and secants of a stated radius."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.measuring.encoders.weights import NamedTensor, named_tensors
from semdiag_models import Encoder

DIRECTIONS = 2  # random ones, besides the gradient's
RADIUS = 1e-3  # of a secant, relative to the tensor's Frobenius norm (absolute where that is 0)
_SECANT_TOKENS = 400  # tokens of the inputs over which secants are taken, at most (or one sample's)
_ROUNDING = 64 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Slope:
    """The loss in one tensor, as natural logarithms; −inf for a slope that rounding hides."""

    log_gradient: float  # ln ‖gradient‖ (Frobenius) of the mean loss
    log_secant: float  # ln of the largest |loss(θ + ρ) − loss(θ)| / ‖ρ‖, moving that tensor alone


def parameter_slopes(
    encoder: Encoder,
    tokens: Tensor,
    labels: Tensor,
    seed: int = 0,
    *,
    secants: bool = True,
    score_reach: float = 0.0,
    constant: Collection[str] = (),
) -> dict[str, Slope]:
    """Measure the mean cross-entropy's slopes in every parameter tensor."""
    _set_gradients(encoder, tokens, labels)
    tensors = named_tensors(encoder)
    rounding = _ROUNDING * (1 + score_reach)
    total = math.sqrt(sum(float(t.gradient.square().sum()) for t in tensors if t.gradient is not None))
    few = max(1, _SECANT_TOKENS // tokens.shape[1])
    generator = torch.Generator().manual_seed(seed)

    first, classes = tokens[:few], labels[:few]
    valid = encoder.valid(first)
    with torch.no_grad():
        entering = [encoder.embed(first)]  # each block, and the classifier at last
        for block in encoder.blocks:
            entering.append(block(entering[-1], valid))
        start = float(F.cross_entropy(encoder.classify(entering[-1], valid), classes))

    @torch.no_grad()
    def loss(tensor: NamedTensor) -> float:
        """Return the loss of the few inputs, recomputed from the tensor's layer on: its input has not changed."""
        if tensor.group == "head":
            return float(F.cross_entropy(encoder.classify(entering[-1], valid), classes))
        x = encoder.embed(first) if tensor.group == "embedding" else entering[tensor.layer]
        for block in encoder.blocks[max(tensor.layer, 0) :]:
            x = block(x, valid)
        return float(F.cross_entropy(encoder.classify(x, valid), classes))

    slopes = {}
    for tensor in tensors:
        gradient = tensor.values * 0 if tensor.gradient is None else tensor.gradient
        size = float(gradient.norm())
        log_secant = math.nan
        if secants and tensor.name not in constant:
            log_secant = _largest_secant(tensor, gradient, loss, start, rounding * (1 + abs(start)), generator)
        slopes[tensor.name] = Slope(_log(size, rounding * total), log_secant)
    encoder.zero_grad(set_to_none=True)
    return slopes


def _set_gradients(encoder: Encoder, tokens: Tensor, labels: Tensor) -> None:
    """Set the gradients of the mean loss, batch by batch."""
    encoder.zero_grad(set_to_none=True)
    for ids, classes in zip(torch.split(tokens, 25), torch.split(labels, 25), strict=True):
        batch = F.cross_entropy(encoder(ids), classes, reduction="sum") / len(tokens)
        batch.backward()  # type: ignore[no-untyped-call]


def _largest_secant(
    tensor: NamedTensor,
    gradient: Tensor,
    loss: Callable[[NamedTensor], float],
    start: float,
    rounding: float,
    generator: torch.Generator,
) -> float:
    """Return the natural logarithm of the steepest secant of the tensor alone."""
    values, before = tensor.values, tensor.values.clone()
    radius = RADIUS * (float(before.norm()) or 1.0)
    directions = [torch.randn(before.shape, generator=generator, dtype=torch.float64) for _ in range(DIRECTIONS)]
    changes: list[float] = []
    try:
        for direction in (gradient, *(d.to(before.device) for d in directions)):
            length = float(direction.norm())
            if length == 0:
                continue
            values.copy_(before + radius / length * direction)
            changes.append(abs(loss(tensor) - start))
    finally:
        values.copy_(before)
    if not math.isfinite(start + sum(changes)):
        return math.nan
    return _log(max(changes, default=0.0), rounding) - math.log(radius)


def _log(size: float, rounding: float) -> float:
    """Return the natural logarithm of a size; −inf if rounding hides it, NaN if size or rounding is not finite."""
    if not math.isfinite(size + rounding):
        return math.nan
    return math.log(size) if size > rounding else -math.inf
