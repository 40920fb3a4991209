"""A private copy of an encoder that can be moved anywhere in its parameter space."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.mathematics.predicted_classes import predicted_classes
from semdiag.measuring.encoders.weights import named_tensors
from semdiag_models import Encoder, InputError

_TOKENS = 10_000  # per forward pass: about what fits into a core's cache


@dataclass(frozen=True)
class TensorPlace:
    """Position of a parameter tensor in the vector of all parameters."""

    name: str  # as in :func:`~semdiag.measuring.encoders.weights.named_tensors`, like group and bound
    group: str  # of the tensor
    bound: str  # its name among the constants of Theorem 2
    part: slice  # of the vector


class MovableEncoder:
    """An encoder in evaluation mode whose parameters are views into one vector."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        gradients: bool = False,
    ) -> None:
        self.encoder = copy.deepcopy(encoder).to(device=device, dtype=dtype).eval().requires_grad_(gradients)
        self.encoder.zero_grad(set_to_none=True)
        parameters = list(self.encoder.parameters())
        self.vector = torch.cat([p.detach().flatten() for p in parameters])
        start = 0
        for parameter in parameters:
            parameter.data = self.vector[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self.origin = self.vector.clone()
        self.places = tuple(
            TensorPlace(t.name, t.group, t.bound, slice(at := t.values.storage_offset(), at + t.values.numel()))
            for t in named_tensors(self.encoder)
        )

    def move_to(self, point: Tensor) -> None:
        """Move the copy to a point, (n,)."""
        self.vector.copy_(point)

    def slices(self, group: str | None = None) -> list[slice]:
        """Return the positions of the tensors of a group, or of all tensors."""
        return [place.part for place in self.places if group in (None, place.group)]

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits (N, classes) at the current point, in passes of about 10,000 tokens."""
        per_pass = max(1, _TOKENS // tokens.shape[1])
        return torch.cat([self.encoder(batch) for batch in torch.split(tokens, per_pass)])

    def loss_and_accuracy(self, tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        """Return the mean cross-entropy (nats) and accuracy in [0, 1] at the current point."""
        logits = self.logits(tokens)
        right = predicted_classes(logits) == labels
        return float(F.cross_entropy(logits.cpu().double(), labels.cpu())), float(right.double().mean())


def usable_samples(
    encoder: Encoder, tokens: Tensor, labels: Tensor | None, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return the samples that have a loss: those with a token other than PAD."""
    if labels is None:
        raise InputError(
            "The loss of these inputs is unknown, because --inputs has no labels. Leave out --inputs: the run's "
            "own held-out samples have labels."
        )
    tokens, labels = tokens.to(device, torch.int64), labels.to(device, torch.int64)
    wrong = labels[(labels < 0) | (labels >= encoder.config.classes)]
    if len(wrong):
        raise InputError(
            f"Labels must be classes of the model, 0 to {encoder.config.classes - 1}. Got {int(wrong[0])}."
        )
    valid = encoder.valid(tokens)
    if valid is not None:
        tokens, labels = tokens[valid.any(-1)], labels[valid.any(-1)]
    if not len(tokens):
        raise InputError("There is nothing to measure: no sample has a token that is not PAD.")
    return tokens, labels
