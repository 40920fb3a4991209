"""Parity: is the number of ones odd?"""

import torch
from torch import Tensor

from semdiag_models.tasks.task import Recipe, Task


class Parity(Task):
    """The number of ones, modulo 2."""

    name = "parity"
    aliases = ("parity_check",)
    summary = "is the number of ones odd?"
    symbols = ("0", "1")
    classes = 2
    majority = 0.5
    shortcut = (0.5, "none: every proper part of the string is independent of the label")
    recipe = Recipe(length=40, epochs=1000)

    def sample(self, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw fair bits; see :meth:`Task.sample`."""
        self.require_length(length, 1)
        tokens = torch.randint(2, (n, length), generator=generator)
        return tokens, tokens.sum(1) % 2

    def label(self, tokens: list[int]) -> int:
        """Count the ones; see :meth:`Task.label`."""
        self.require_symbols(tokens)
        return tokens.count(1) % 2
