"""A linear layer inside the trainer's step, forward and backward."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from semdiag_models import products

if TYPE_CHECKING:
    from semdiag_models.step.stack import Stack


class Linear:
    """A linear layer of the stack and its gradients: matrices with one encoder, batches of them with several.

    Args:
        stack: whose layer it is.
        name: of the layer in the encoder, or in its block.
        block: number of the block; None: it is in no block.
        scaled: whether its output is divided by what dropout keeps of it: W and b then stand for the scaled ones,
            and the stack brings the gradients back to those of the layer's own.
    """

    def __init__(self, stack: "Stack", name: str, block: int | None = None, *, scaled: bool = False) -> None:
        own = name if block is None else f"blocks.{block}.{name}"
        (self._weight, self._d_weight), (self._bias, self._d_bias) = (
            stack.views(f"{own}.{part}", scaled=scaled) for part in ("weight", "bias")
        )
        self._transposed, self._row = self._weight.mT, self._bias.unsqueeze(-2)
        self._stack, self._name, self._block = stack, name, block or 0
        self._several = self._weight.ndim == 3
        self._product: Callable[..., Tensor] = torch.baddbmm if self._several else torch.addmm

    def forward(self, x: Tensor) -> Tensor:
        """Compute x Wᵀ + b."""
        if products.takes(x, self._weight):
            return products.linear(x, self._weight, self._bias, out=self._output(x) if self._several else None)
        return self._product(self._row, x, self._transposed, out=self._output(x))

    def forward_onto(self, base: Tensor, x: Tensor) -> Tensor:
        """Compute base + x Wᵀ + b."""
        if products.takes(x, self._weight):
            return products.linear(x, self._weight, self._bias, base, self._output(x) if self._several else None)
        out = torch.add(base, self._row, out=self._output(x))
        return self._product(out, x, self._transposed, out=out)

    def backward(self, grad: Tensor, x: Tensor) -> Tensor:
        """Keep the gradients of W and b, given that of the output; return that of x."""
        self._product(self._d_weight, grad.mT, x, beta=0, out=self._d_weight)
        torch.sum(grad, -2, out=self._d_bias)
        if products.takes(grad, self._transposed):
            return products.linear(grad, self._transposed, out=self._d_input(x) if self._several else None)
        out = self._d_input(x)
        return self._product(out, grad, self._weight, beta=0, out=out)

    def _output(self, x: Tensor) -> Tensor:
        """Memory for the output."""
        return self._stack.memory(self._name, (*x.shape[:-1], self._weight.shape[-2]), self._block)

    def _d_input(self, x: Tensor) -> Tensor:
        """Memory for the gradient of x."""
        return self._stack.memory(f"d {self._name}", x.shape)
