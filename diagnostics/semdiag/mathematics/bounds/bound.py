"""Bounds: a value together with the assumptions on which it rests."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Assumption:
    """An assumption of a bound, with the measurements that decide it.

    Attributes:
        statement: the assumption in words, as a report prints it.
        measured: the numbers that decided it, by name (for instance the smallest separation).
        holds: whether the measured values meet the assumption.

    Example:
        >>> print(Assumption("separation is positive", {"smallest": -0.5}, holds=False))
        assumption not met: separation is positive (smallest = -0.5)
    """

    statement: str
    measured: Mapping[str, float]
    holds: bool

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} = {value:.4g}" for name, value in self.measured.items())
        verdict = "holds" if self.holds else "assumption not met"
        return f"{verdict}: {self.statement}" + (f" ({numbers})" if numbers else "")


@dataclass(frozen=True, eq=False)
class Bound:
    """An upper bound, as a natural logarithm, with all its assumptions.

    A bound whose assumption fails is still returned: its value is +inf if the failure leaves no guarantee (a
    separation ≤ 0), else the formula's value; :attr:`unmet` says why not to rely on it.

    Attributes:
        log_value: ln of the bound, float64, any shape (a scalar, or one value per query, head, …);
            −inf stands for the constant 0, +inf for no guarantee.
        assumptions: all that were checked, in order.
        source: where the formula comes from.

    Example:
        >>> import torch
        >>> bound = Bound(torch.tensor([0.0, 2.0]), (Assumption("k is the same", {}, holds=True),), "Thm 5")
        >>> bound.largest, bound.holds
        (2.0, True)
    """

    log_value: Tensor
    assumptions: tuple[Assumption, ...]
    source: str

    @property
    def unmet(self) -> tuple[Assumption, ...]:
        """The assumptions that do not hold."""
        return tuple(a for a in self.assumptions if not a.holds)

    @property
    def holds(self) -> bool:
        """Whether every assumption holds."""
        return not self.unmet

    @property
    def largest(self) -> float:
        """Natural logarithm of the largest entry; −inf if there is none."""
        return self.log_value.max().item() if self.log_value.numel() else -math.inf

    def __str__(self) -> str:
        head = f"ln of the bound at most {self.largest:.6g} [{self.source}]"
        return "\n".join([head, *(f"  {assumption}" for assumption in self.assumptions)])


def merged(groups: Iterable[Iterable[Assumption]]) -> tuple[Assumption, ...]:
    """Return the assumptions of several bounds as one tuple, each once.

    Args:
        groups: the assumptions of each part.

    Returns:
        All of them in order of first appearance, without exact repetitions.

    Example:
        >>> a, b = Assumption("a", {}, holds=True), Assumption("b", {}, holds=True)
        >>> [m.statement for m in merged([(a, b), (a,)])]
        ['a', 'b']
    """
    kept: list[Assumption] = []
    for group in groups:
        kept.extend(a for a in group if a not in kept)
    return tuple(kept)
