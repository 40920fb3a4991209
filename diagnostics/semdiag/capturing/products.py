"""Recognising products of queries and keys, and of weights and values, among torch's products."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semdiag.capturing.recording import is_plain


@dataclass(frozen=True, eq=False)
class Product:
    """A product of two tensors.

    Attributes:
        first: the left factor as it was given.
        v: the right factor as (…, Lk, Dv), if the left one holds weights; None if the layout is another.
        q: (…, Lq, D), if the result can be scores; None if not.
        k: (…, Lk, D), likewise.
        alpha: factor on the product.
        added: what was added to it; None means nothing.
        order: permutation that brings the result into (…, Lq, Dv).
    """

    first: Tensor
    v: Tensor | None
    q: Tensor | None
    k: Tensor | None
    alpha: float = 1.0
    added: Tensor | None = None
    order: tuple[int, ...] | None = None


def product_factors(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: set[int]
) -> Product | None:
    """Take a product apart.

    Args:
        name: matmul, bmm, __matmul__, baddbmm or einsum.
        args: its arguments.
        kwargs: its named arguments.
        parameters: addresses of the storages of the model's parameters; a product with one of them is a
            projection, not scores.

    Returns:
        The factors; None if it is no product of two real tensors with two axes or more.
    """
    if name == "einsum":
        return _einsum(args, parameters)
    alpha, added = 1.0, None
    if name == "baddbmm":
        added, *args_left = args
        args, alpha = tuple(args_left), float(kwargs.get("alpha", 1))
        beta = kwargs.get("beta", 1)
        added = None if beta == 0 else added * beta
    named = [kwargs[key] for key in ("input", "batch1", "other", "mat2", "batch2", "tensor2") if key in kwargs]
    factors = [*args, *named][:2]
    if len(factors) < 2 or not all(_usable(x) for x in factors):
        return None
    a, b = factors
    scores = not any(_is_parameter(x, parameters) for x in (a, b))
    return Product(a, b, a if scores else None, b.transpose(-2, -1) if scores else None, alpha, added)


def weighted_layout(product: Product, result: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return values (…, Lk, Dv) and mixed values (…, Lq, Dv) of a product whose left factor holds weights."""
    if product.v is None:
        return None
    return product.v, result if product.order is None else result.permute(product.order)


def _usable(x: object) -> bool:
    return (
        isinstance(x, Tensor)
        and is_plain(x)
        and x.ndim >= 2
        and x.is_floating_point()
        and x.layout == torch.strided
    )


def _is_parameter(x: Tensor, parameters: set[int]) -> bool:
    return not torch._C._functorch.is_functorch_wrapped_tensor(x) and x.untyped_storage().data_ptr() in parameters


def _einsum(args: tuple[Any, ...], parameters: set[int]) -> Product | None:
    """Read "…id,…jd->…ij" with its letters in any order in the factors, and "…ij,…jd->" any order."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if not isinstance(args[0], str) or len(operands) != 2 or not all(map(_usable, operands)):
        return None
    left, _, out = args[0].replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    if "." in left or not out or any(len(set(part)) != len(part) for part in (first, second, out)):
        return None
    a, b = operands
    batch = [letter for letter in out if letter in first and letter in second]
    summed = [letter for letter in first if letter in second and letter not in out]
    only_a, only_b = (
        [x for x in out if x in part and x not in other] for part, other in ((first, second), (second, first))
    )
    if len(summed) != 1 or len(only_a) != 1 or len(only_b) != 1 or len(out) != len(batch) + 2:
        return None

    def arranged(tensor: Tensor, letters: str, wanted: list[str]) -> Tensor:
        return tensor.permute([letters.index(x) for x in wanted])

    q = k = v = order = None
    if list(out) == batch + only_a + only_b and not any(_is_parameter(x, parameters) for x in operands):
        q, k = arranged(a, first, batch + only_a + summed), arranged(b, second, batch + only_b + summed)
    lead = [x for x in first if x in batch]
    if list(first) == lead + only_a + summed:
        v = arranged(b, second, lead + summed + only_b)
        order = tuple(out.index(x) for x in lead + only_a + only_b)
    return Product(a, v, q, k, order=order)
