"""Cycle navigation: where on a cycle of five does a walk end?"""

import torch
from torch import Tensor

from semdiag_models.tasks.task import Recipe, Task


class CycleNavigation(Task):
    """The last position of a walk on a cycle of five places."""

    name = "cycle-navigation"
    aliases = ("cycle_navigation", "cycnav")
    summary = "where on a cycle of five does a walk end?"
    symbols = ("0", "1", "2")
    classes = 5
    majority = 0.2
    shortcut = (0.2, "none: one token leaves the sum of the others uniform")
    recipe = Recipe(length=40, epochs=750)

    def sample(self, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw uniform steps; see :meth:`Task.sample`."""
        self.require_length(length, 1)
        tokens = torch.randint(3, (n, length), generator=generator)
        return tokens, (tokens.sum(1) - length) % 5

    def label(self, tokens: list[int]) -> int:
        """Walk step by step; see :meth:`Task.label`."""
        self.require_symbols(tokens)
        place = 0
        for token in tokens:
            place = (place + token - 1) % 5
        return place
