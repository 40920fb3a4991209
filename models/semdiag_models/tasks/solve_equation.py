"""Solve equation: the value of x in a bracketed equation modulo 5."""

import numpy as np
import torch
from torch import Tensor

from semdiag_models.errors import InputError
from semdiag_models.tasks.bracket_expressions import MODULUS, Integers, draw_expressions, evaluate
from semdiag_models.tasks.randomness import numpy_generator
from semdiag_models.tasks.task import Recipe, Task


class SolveEquation(Task):
    """The x that solves an equation modulo 5."""

    name = "solve-equation"
    aliases = ("solve_equation", "soleq")
    summary = "the value of x in a bracketed equation modulo 5"
    symbols = ("0", "1", "2", "3", "4", "+", "-", "(", ")", "x", "=")
    classes = 5
    majority = 0.2
    shortcut = (0.2, "none: no single token tells anything of x")
    recipe = Recipe(length=40, epochs=600)

    def sample(self, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw expressions and replace one digit each; see :meth:`Task.sample`."""
        self.require_length(length, 3)
        rng = numpy_generator(generator)
        expressions, values = draw_expressions(n, length - 2, self.symbols, "+-", rng)
        unknown = _next_digit(expressions, rng.integers(length - 2, size=n))
        everyone = np.arange(n)
        labels = expressions[everyone, unknown]
        expressions[everyone, unknown] = self.symbols.index("x")
        equals = np.full(n, self.symbols.index("="))
        tokens = np.concatenate([expressions, equals[:, None], values[:, None]], 1)
        return torch.from_numpy(tokens), torch.from_numpy(labels)

    def label(self, tokens: list[int]) -> int:
        """Try all five values of x; see :meth:`Task.label`."""
        self.require_symbols(tokens)
        text = "".join(self.symbols[token] for token in tokens)
        left, equals, right = text.partition("=")
        if not equals or right not in set("01234"):
            raise InputError(f"{self.name} needs an expression, then = and one digit. Got {text}.")
        if left.count("x") != 1:
            raise InputError(f"{self.name} needs exactly one x. Got {left.count('x')} in {text}.")
        solutions = [x for x in range(MODULUS) if evaluate(left.replace("x", str(x))) == int(right)]
        return solutions[0]


def _next_digit(tokens: Integers, position: Integers) -> Integers:
    """Return the position of the first digit at or after a position, cyclically, row by row."""
    length = tokens.shape[1]
    twice = np.where(np.tile(tokens, 2) < MODULUS, np.arange(2 * length), 2 * length)
    nearest = np.minimum.accumulate(twice[:, ::-1], axis=1)[:, ::-1]
    found: Integers = nearest[np.arange(len(tokens)), position] % length
    return found
