"""Even pairs: is the number of neighbouring unequal bits odd?"""

from itertools import pairwise

import torch
from torch import Tensor

from semdiag_models.tasks.task import Recipe, Task


class EvenPairs(Task):
    """The number of neighbours that differ (01 or 10), modulo 2."""

    name = "even-pairs"
    aliases = ("even_pairs", "ueqpairs")
    summary = "is the number of neighbouring unequal bits odd?"
    symbols = ("0", "1")
    classes = 2
    majority = 0.5
    shortcut = (0.5, "none with a single token; first and last together decide it")
    recipe = Recipe(length=40, epochs=100)

    def sample(self, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw fair bits; see :meth:`Task.sample`."""
        self.require_length(length, 1)
        tokens = torch.randint(2, (n, length), generator=generator)
        return tokens, tokens[:, 0] ^ tokens[:, -1]

    def label(self, tokens: list[int]) -> int:
        """Walk over the neighbours; see :meth:`Task.label`."""
        self.require_symbols(tokens)
        return sum(a != b for a, b in pairwise(tokens)) % 2
