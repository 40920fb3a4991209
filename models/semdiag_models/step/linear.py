"""A linear layer in the trainer's step, forward and backward."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from semdiag_models import products

if TYPE_CHECKING:
    from semdiag_models.step.stack import Stack


class Linear:
    """A linear layer of the stack and its gradients: matrices for one encoder, batches of them for several.

    Args:
        stack: that contains the layer.
        name: of the layer in the encoder, or in its block.
        block: number of the block; None if it is in no block.
        parts: number of equal parts in which the gradient of the output arrives.
    """

    def __init__(self, stack: "Stack", name: str, block: int | None = None, *, parts: int = 1) -> None:
        own = name if block is None else f"blocks.{block}.{name}"
        (self._weight, self._d_weight), (self._bias, self._d_bias) = (
            stack.views(f"{own}.{part}") for part in ("weight", "bias")
        )
        self._transposed, self._row = self._weight.mT, self._bias.unsqueeze(-2)
        self._stack, self._name, self._block = stack, name, block or 0
        self._several = self._weight.ndim == 3
        self._product: Callable[..., Tensor] = torch.baddbmm if self._several else torch.addmm
        rows = (t.chunk(parts, -2) for t in (self._weight, self._d_weight, self._d_bias.unsqueeze(-1)))
        self._parts = [
            (weight, d_weight, d_bias.squeeze(-1)) for weight, d_weight, d_bias in zip(*rows, strict=True)
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Compute x Wᵀ + b."""
        if products.takes(x, self._weight):
            return products.linear(x, self._weight, self._bias, out=self._output(x) if self._several else None)
        return torch.matmul(x, self._transposed, out=self._output(x)).add_(self._row)

    def backward(self, x: Tensor, *grads: Tensor) -> Tensor:
        """Store the gradients of W and b, from those of the output's parts; return that of x."""
        out = self._d_input(x)
        d_x: Tensor | None = None
        for grad, (weight, d_weight, d_bias) in zip(grads, self._parts, strict=True):
            self._product(d_weight, grad.mT, x, beta=0, out=d_weight)
            torch.sum(grad, -2, out=d_bias)
            if products.takes(grad, weight.mT):
                d_x = products.linear(grad, weight.mT, onto=d_x, out=out)
            else:
                d_x = self._product(out, grad, weight, beta=0 if d_x is None else 1, out=out)
        assert d_x is not None
        return d_x

    def _output(self, x: Tensor) -> Tensor:
        """Return the memory for the output."""
        return self._stack.memory(self._name, (*x.shape[:-1], self._weight.shape[-2]), self._block)

    def _d_input(self, x: Tensor) -> Tensor:
        """Return the memory for the gradient of x."""
        return self._stack.memory(f"d {self._name}", x.shape)
