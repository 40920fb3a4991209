"""Recognise products of queries and keys among torch's operations."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semdiag.capturing.recording import is_plain


@dataclass(frozen=True, eq=False)
class Product:
    """A product whose result may be scores."""

    q: Tensor  # (…, Lq, D)
    k: Tensor  # (…, Lk, D)
    alpha: float = 1.0  # factor on the product
    added: Tensor | None = None  # added to it; None means nothing


def product_factors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the factors of a product."""
    if name == "einsum":
        return _einsum(args)
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
    return Product(a, b.transpose(-2, -1), alpha, added)


def _usable(x: object) -> bool:
    return (
        isinstance(x, Tensor)
        and is_plain(x)
        and x.ndim >= 2
        and x.is_floating_point()
        and x.layout == torch.strided
    )


def _einsum(args: tuple[Any, ...]) -> Product | None:
    """Read "…id,…jd->…ij"; the letters of each factor may be in any order."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if not isinstance(args[0], str) or len(operands) != 2 or not all(map(_usable, operands)):
        return None
    left, _, out = args[0].replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    summed = (set(first) & set(second)) - set(out)
    if "." in left or len(out) < 2 or len(set(out)) < len(out) or len(summed) != 1:
        return None
    batch, i, j = out[:-2], out[-2], out[-1]
    q, k = [*batch, i, *summed], [*batch, j, *summed]
    if sorted(first) != sorted(q) or sorted(second) != sorted(k):  # a further letter is summed in one operand
        return None
    return Product(
        operands[0].permute([first.index(letter) for letter in q]),
        operands[1].permute([second.index(letter) for letter in k]),
    )
