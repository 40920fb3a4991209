"""Missing duplicate: which bit was removed from a string written twice?"""

import torch
from torch import Tensor

from semdiag_models.errors import InputError
from semdiag_models.tasks.task import Recipe, Task


class MissingDuplicate(Task):
    """The bit that a placeholder hides in a doubled string."""

    name = "missing-duplicate"
    aliases = ("missing_duplicate_string", "missdup")
    summary = "which bit was removed from a string written twice?"
    symbols = ("0", "1", "2")
    classes = 2
    majority = 0.5
    shortcut = (0.5125, "the first token alone: once in 40 strings it is the twin of the placeholder")
    recipe = Recipe(length=40, epochs=250)

    def sample(self, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw fair bits, double them, hide one; see :meth:`Task.sample`."""
        self.require_length(length, 2)
        half = length // 2
        bits = torch.randint(2, (n, half), generator=generator)
        hidden = torch.randint(2 * half, (n, 1), generator=generator)
        tokens = torch.full((n, length), self.pad_id)
        tokens[:, : 2 * half] = bits.repeat(1, 2).scatter(1, hidden, 2)
        return tokens, bits.gather(1, hidden % half).squeeze(1)

    def label(self, tokens: list[int]) -> int:
        """Find the placeholder and read its twin; see :meth:`Task.label`. The PAD of odd lengths may stay."""
        if len(tokens) % 2 == 1 and tokens[-1] == self.pad_id:
            tokens = tokens[:-1]
        self.require_symbols(tokens)
        if len(tokens) % 2 == 1:
            raise InputError(f"{self.name} needs two halves of equal length. Got {len(tokens)} tokens.")
        if tokens.count(2) != 1:
            raise InputError(f"{self.name} needs exactly one placeholder 2. Got {tokens.count(2)}.")
        half = len(tokens) // 2
        for i, (first, second) in enumerate(zip(tokens[:half], tokens[half:], strict=True)):
            if 2 not in {first, second} and first != second:
                raise InputError(
                    f"{self.name} needs two equal halves. Position {i + 1} holds {first}, its twin {second}."
                )
        return tokens[(tokens.index(2) + half) % len(tokens)]
