"""Recognising products of queries and keys among torch's products."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semdiag.capturing.recording import is_plain


@dataclass(frozen=True, eq=False)
class Product:
    """A product whose result can be scores.

    Attributes:
        q: (…, Lq, D).
        k: (…, Lk, D).
        alpha: factor on the product.
        added: what was added to it; None means nothing.
    """

    q: Tensor
    k: Tensor
    alpha: float = 1.0
    added: Tensor | None = None


def product_factors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Take a product apart.

    Args:
        name: matmul, bmm, __matmul__, baddbmm or einsum.
        args: its arguments.
        kwargs: its named arguments.

    Returns:
        The factors; None if it is no product of two real tensors with two axes or more.
    """
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
    """Read "…id,…jd->…ij" with its letters in any order in the factors."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if not isinstance(args[0], str) or len(operands) != 2 or not all(map(_usable, operands)):
        return None
    left, _, out = args[0].replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    if "." in left or not out or any(len(set(part)) != len(part) for part in (first, second, out)):
        return None
    batch = [letter for letter in out if letter in first and letter in second]
    summed = [letter for letter in first if letter in second and letter not in out]
    only_a, only_b = (
        [x for x in out if x in part and x not in other] for part, other in ((first, second), (second, first))
    )
    if len(summed) != 1 or len(only_a) != 1 or len(only_b) != 1 or list(out) != batch + only_a + only_b:
        return None
    if len(first) != len(batch) + 2 or len(second) != len(batch) + 2:  # one is summed in one operand alone
        return None

    def arranged(tensor: Tensor, letters: str, wanted: list[str]) -> Tensor:
        return tensor.permute([letters.index(x) for x in wanted])

    return Product(
        arranged(operands[0], first, batch + only_a + summed),
        arranged(operands[1], second, batch + only_b + summed),
    )
