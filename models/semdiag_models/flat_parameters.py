"""Parameters and gradients of several equal-sized encoders, each in one buffer with a row per encoder."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from semdiag_models.encoder import Encoder

_ALIGNMENT = 16  # elements: parameters begin at multiples of 64 bytes


class FlatParameters:
    """Parameters of encoders as views of one buffer, and their gradients as views of another."""

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        self.encoders = list(encoders)
        self._places: dict[str, tuple[int, torch.Size]] = {}
        end = 0
        for name, parameter in self.encoders[0].named_parameters():
            self._places[name] = end, parameter.shape
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        weight = self.encoders[0].head.weight.detach()
        self.parameters, self.gradients = weight.new_zeros(2, len(self.encoders), end)

    def views(self, name: str) -> tuple[Tensor, Tensor]:
        """Return views of a parameter of all encoders and of its gradient; with one encoder, without its axis."""
        start, shape = self._places[name]
        end = start + shape.numel()
        size = () if len(self.encoders) == 1 else (len(self.encoders),)
        return self.parameters[:, start:end].view(*size, *shape), self.gradients[:, start:end].view(*size, *shape)

    def parts(self, rows: Tensor, i: int) -> Iterator[tuple[str, Tensor]]:
        """Yield names and views of the i-th encoder's parameters in a buffer with the layout of ``parameters``."""
        for name, (start, shape) in self._places.items():
            yield name, rows[i, start : start + shape.numel()].view(shape)

    def rows(self, name: str, count: int) -> tuple[slice, slice]:
        """Return the index of a parameter's first rows, of all encoders, in buffers like ``parameters``."""
        start, shape = self._places[name]
        return slice(None), slice(start, start + count * shape[1:].numel())

    @torch.no_grad()
    def load(self) -> None:
        """Copy the encoders' parameters into the buffer."""
        for i, encoder in enumerate(self.encoders):
            for name, part in self.parts(self.parameters, i):
                part.copy_(encoder.get_parameter(name))

    @torch.no_grad()
    def store(self, i: int) -> None:
        """Copy the i-th encoder's parameters back."""
        for name, part in self.parts(self.parameters, i):
            self.encoders[i].get_parameter(name).copy_(part)

    def clip_gradients(self, largest: float) -> None:
        """Scale each encoder's gradient to a 2-norm of at most ``largest``, as ``clip_grad_norm_`` does."""
        norms = torch.linalg.vector_norm(self.gradients, dim=1, keepdim=True)
        self.gradients.mul_((largest / (norms + 1e-6)).clamp_(max=1))
