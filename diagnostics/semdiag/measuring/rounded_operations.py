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
from semdiag.measuring.calls.running import kept_in_float32, placed, refuse_masked

_FORBIDDEN = 1e38  # and more stands for what masks add, the largest number of a format: it does not overflow
_NARROW = 8  # fewer digits: engines round the operands of products, and keep all else in a wider format
_WIDE_FIRST = dict.fromkeys(("addmm", "baddbmm"), (1, 2))  # whose first operand is added
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
    """Return a copy of a model in another precision, as transformers loads it: frequencies stay as they are.

    In float64 experts are multiplied one by one, as their grouped product does not know it.

    Args:
        model: not changed.
        dtype: of its parameters and of all buffers but rotary frequencies.
    """
    refuse_masked(model.module, f"in {dtype}")
    module = placed(copy.deepcopy(model.module), dtype=dtype)
    for part in module.modules() if dtype == torch.float64 else ():
        if getattr(getattr(part, "config", None), "_experts_implementation", None) == "grouped_mm":
            part.set_experts_implementation("eager")  # type: ignore[operator]
    return replace(model, module=module)


def with_rounded_weights(model: LoadedModel, kind: NumberFormat) -> LoadedModel:
    """Return a copy of a model in float64 whose weights are numbers of a format, but for those kept in float32.

    Args:
        model: not changed.
        kind: the format.
    """
    copied = converted(model, torch.float64)
    with torch.no_grad():
        for held, name in kept_in_float32(copied.module, getattr(torch, kind.name)):
            held[name].data = held[name].data.float()
        for values in (*copied.module.parameters(), *copied.module.buffers()):
            if values.dtype == torch.float64:
                values.copy_(rounded(values, kind))
    return copied


class RoundedResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every float64 result is rounded to a format, and is infinite where it would overflow.

    Args:
        kind: the format.
    """

    def __init__(self, kind: NumberFormat) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and round what it returns or writes."""
        result = func(*args, **(kwargs or {}))
        returned = [entry.alias_info for entry in func._schema.returns]
        if _is_double(result) and returned[0] is None and _promotes(args):
            return result.float()
        if isinstance(result, tuple):
            return tuple(self._of(values, alias) for values, alias in zip(result, returned, strict=True))
        return self._of(result, returned[0]) if returned else result

    def _of(self, values: Any, alias: Any) -> Any:
        if not _is_double(values) or (alias is not None and not alias.is_write):  # a view: already rounded
            return values
        size = values.abs()
        beyond = (size >= self._kind.overflow) & (size < _FORBIDDEN) | values.isinf()
        moved = torch.where(beyond, torch.inf * values.sign(), rounded(values, self._kind))
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


def _promotes(args: Any) -> bool:
    """Whether float32 meets the model's precision, which is narrower where the format is run: float32 results."""
    given = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg])]
    return any(_is_double(x) for x in given) and any(
        isinstance(x, Tensor) and x.dtype == torch.float32 and x.ndim for x in given
    )


def _is_double(values: Any) -> bool:
    return isinstance(values, Tensor) and values.dtype == torch.float64
