"""Emulate a model in another number format in float64: round results or operands of its operations.

Running in float64 shows which steps keep the model's precision, and which ones it always computes in float32
(norms, rotary angles, softmax): only the former are rounded.
"""

import copy
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.selections.number_formats import NumberFormat
from semdiag.mathematics.selections.rounded_operands import rounded, rounding_error
from semdiag.measuring.calls.running import placed, refuse_masked

_NARROW = 8  # below, engines round only the operands of products
_WIDE_FIRST = dict.fromkeys(("addmm", "baddbmm"), (1, 2))  # their first operand is added
_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "linear", "convolution"), (0, 1)),
    **_WIDE_FIRST,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention", "_scaled_dot_product_attention_math",
        ),
        (0, 1, 2),
    ),
}  # fmt: skip


def operands_alone(kind: NumberFormat) -> bool:
    """Return whether, in this format, only the operands of matrix products are rounded.

    This holds for 8-bit formats; in 16-bit formats every result is rounded.
    """
    return kind.digits < _NARROW


def converted(model: LoadedModel, dtype: torch.dtype) -> LoadedModel:
    """Return a copy of a model in another precision, as transformers loads it: rotary frequencies stay."""
    refuse_masked(model.module, f"in {dtype}")
    return replace(model, module=placed(copy.deepcopy(model.module), dtype=dtype))


def with_rounded_weights(model: LoadedModel, kind: NumberFormat) -> LoadedModel:
    """Return a float64 copy of a model whose weights are rounded to a format."""
    copied = converted(model, torch.float64)
    with torch.no_grad():
        for values in (*copied.module.parameters(), *copied.module.buffers()):
            if values.dtype == torch.float64:
                values.copy_(rounded(values, kind))
    return copied


class RoundedResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds, inside the context, every float64 result to a format."""

    def __init__(self, kind: NumberFormat) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and round what it returns or writes."""
        result = func(*args, **(kwargs or {}))
        returned = [entry.alias_info for entry in func._schema.returns]
        if isinstance(result, tuple):
            return tuple(self._of(values, alias) for values, alias in zip(result, returned, strict=True))
        return self._of(result, returned[0]) if returned else result

    def _of(self, values: Any, alias: Any) -> Any:
        if not _is_double(values) or (alias is not None and not alias.is_write):  # a view: already rounded
            return values
        moved = torch.where(values.isinf(), values, rounded(values, self._kind))
        return moved if alias is None else values.copy_(moved)


class RoundedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds, inside the context, the float64 operands of every matrix product to a format.

    Args:
        kind: the format.
        module: the model.
    """

    def __init__(self, kind: NumberFormat, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind
        self._generator: torch.Generator | None = None
        self._places = {values.untyped_storage().data_ptr() for values in module.parameters()}
        self._weights: dict[tuple[Any, ...], Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, on rounded operands if it is a product."""
        places = _PRODUCTS.get(func._schema.name.partition("::")[2], ())
        given = [self._of(value) if place in places else value for place, value in enumerate(args)]
        return func(*given, **(kwargs or {}))

    def drawing(self, generator: torch.Generator) -> Self:
        """Return a mode that rounds the same weights but moves all other operands at random.

        Args:
            generator: draws the moves, uniformly within half a unit in the last place.
        """
        other = copy.copy(self)
        other._generator = generator
        return other

    def _of(self, values: Any) -> Any:
        if not _is_double(values):
            return values
        if values.untyped_storage().data_ptr() in self._places:
            key = (values.data_ptr(), values.shape, values.stride())
            if key not in self._weights:
                self._weights[key] = rounded(values, self._kind)
            return self._weights[key]
        if self._generator is None:
            return rounded(values, self._kind)
        drawn = torch.rand(values.shape, generator=self._generator, dtype=values.dtype).to(values.device)
        moved = values + 2 * rounding_error(values.abs(), self._kind) * (drawn - 0.5)
        return moved.clamp(-self._kind.largest, self._kind.largest)


def _is_double(values: Any) -> bool:
    return isinstance(values, Tensor) and values.dtype == torch.float64
