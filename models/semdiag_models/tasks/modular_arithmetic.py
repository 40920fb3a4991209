"""Modular arithmetic with brackets: the value of an expression modulo 5."""

import torch
from torch import Tensor

from semdiag_models.errors import InputError
from semdiag_models.tasks.bracket_expressions import draw_expressions, evaluate
from semdiag_models.tasks.randomness import numpy_generator
from semdiag_models.tasks.task import Recipe, Task


class ModularArithmetic(Task):
    """The value of a fully bracketed expression, modulo 5."""

    name = "modular-arithmetic"
    aliases = ("modular_arithmetic_brackets", "mab")
    summary = "the value of a bracketed expression modulo 5"
    symbols = ("0", "1", "2", "3", "4", "+", "-", "*", "(", ")", "x")
    classes = 5
    majority = 0.29159
    shortcut = (
        0.29159,
        "always 0, since a product with a factor 0 is 0; the outermost operator adds nothing",
    )
    recipe = Recipe(length=40, epochs=600)

    def sample(self, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw expressions of exactly that length; see :meth:`Task.sample`."""
        self.require_length(length, 1)
        tokens, values = draw_expressions(n, length, self.symbols, "+-*", numpy_generator(generator))
        return torch.from_numpy(tokens), torch.from_numpy(values)

    def label(self, tokens: list[int]) -> int:
        """Parse and evaluate; see :meth:`Task.label`."""
        self.require_symbols(tokens)
        text = "".join(self.symbols[token] for token in tokens)
        if "x" in text:
            raise InputError(f"{self.name} has no unknown: x is declared but never used. Got {text}.")
        return evaluate(text)
