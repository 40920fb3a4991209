"""Tasks from formal languages: stacks, strings, cycles, pairs, parity, ListOps, equations, modular arithmetic."""

import numpy as np
import torch
from torch import Tensor

from semdiag_models.reading import InputError
from semdiag_models.tasks.expressions import (
    MODULUS,
    SYMBOLS,
    Integers,
    TreeLaw,
    TreeWriter,
    draw_expressions,
)
from semdiag_models.tasks.task import Recipe, Task

POP, PUSH_0, PUSH_1 = 2, 3, 4
EMPTY = 2  # label of an empty stack


class StackManipulation(Task):
    """The top of a stack after a list of actions."""

    name = "stack-manipulation"
    aliases = ("stack_manipulation", "stackman")
    summary = "what lies on top of a stack after some pushes and pops?"
    symbols = ("0", "1", "2", "3", "4")
    classes = 3
    majority = 0.499865
    shortcut = (0.8333, "the last token alone: a push, two times in three, gives the label")
    recipe = Recipe(length=40, epochs=200)

    def sample(self, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw a stack and actions; see :meth:`Task.sample`."""
        self.require_length(length, 1)
        tokens = torch.randint(2, (n, length), generator=generator)
        if length > 1:
            bits = torch.randint(1, length, (n, 1), generator=generator)
            actions = torch.randint(POP, PUSH_1 + 1, (n, length), generator=generator)
            tokens = torch.where(torch.arange(length) < bits, tokens, actions)
        from_right = tokens.flip(1)
        unmatched = torch.where(from_right == POP, -1, 1).cumsum(1) == 1
        top = from_right.gather(1, unmatched.int().argmax(1, keepdim=True)).squeeze(1)
        top = torch.where(top >= PUSH_0, top - PUSH_0, top)
        return tokens, torch.where(unmatched.any(1), top, EMPTY)


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


def numpy_generator(generator: torch.Generator) -> np.random.Generator:
    """Return a numpy generator that a torch generator seeds, so that its draws are a function of the latter."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))


LEAST_ROUND = 100  # smallest number of trees to draw at a time
FRUITLESS_ROUNDS = 50  # number of rounds without a new tree after which drawing stops


class ListOps(Task):
    """The value of nested operations on lists of digits."""

    name = "listops"
    aliases = ()
    summary = "the value of nested list operations on digits"
    symbols = SYMBOLS
    classes = 10
    majority = 0.16
    shortcut = (0.342, "the first token alone: MIN is mostly 0, MAX 9, MED 4, SM anything")
    recipe = Recipe(length=599, epochs=200, blocks=10, learning_rate=1.0, learning_rate_decay=0.99)

    def __init__(
        self,
        shortest: int = 501,
        longest: int = 599,
        max_depth: int = 10,
        min_arity: int = 2,
        max_arity: int = 10,
    ) -> None:
        if not 1 <= shortest <= longest:
            raise InputError(f"listops needs 1 ≤ shortest ≤ longest. Got {shortest} and {longest}.")
        if not 1 <= min_arity <= max_arity:
            raise InputError(f"listops needs 1 ≤ min_arity ≤ max_arity. Got {min_arity} and {max_arity}.")
        if max_depth < 1:
            raise InputError(f"listops needs max_depth of at least 1. Got max_depth={max_depth}.")
        self.shortest = shortest
        self.law = TreeLaw(longest, max_depth, min_arity, max_arity)

    def sample(self, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw n different trees, padded to the given length; see :meth:`Task.sample`."""
        self.require_length(length, self.law.longest)
        rng = numpy_generator(generator)
        writer = TreeWriter(self.law, rng)
        share = writer.length_laws[1] * (np.arange(self.law.longest + 1) >= self.shortest)
        if not share.any():
            raise InputError(f"{self._described()} has no string.")
        tokens: Integers = np.zeros((0, length), dtype=np.int64)
        labels: Integers = np.zeros(0, dtype=np.int64)
        fruitless = 0
        while len(tokens) < n:
            lengths = rng.choice(share.size, max(n - len(tokens), LEAST_ROUND), p=share / share.sum())
            drawn, values = writer.write(lengths, length)
            together = np.concatenate([tokens, drawn])
            new = _first_occurrences(together)
            fruitless = fruitless + 1 if new.size == len(tokens) else 0
            if fruitless == FRUITLESS_ROUNDS:
                raise InputError(f"{self._described()} gave {new.size} different strings only, not n={n}.")
            tokens, labels = together[new], np.concatenate([labels, values])[new]
        return torch.from_numpy(tokens[:n]), torch.from_numpy(labels[:n])

    def _described(self) -> str:
        law = self.law
        return (
            f"{self.name} with {self.shortest} to {law.longest} tokens, depth at most {law.max_depth} "
            f"and {law.min_arity} to {law.max_arity} arguments"
        )


def _first_occurrences(tokens: Integers) -> Integers:
    """Return the indices of rows that equal no earlier row, in ascending order."""
    first: dict[bytes, int] = {}
    for i, row in enumerate(tokens):
        first.setdefault(row.tobytes(), i)
    return np.array(list(first.values()))


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


def _next_digit(tokens: Integers, position: Integers) -> Integers:
    """Return the position of the first digit at or after a position, cyclically, row by row."""
    length = tokens.shape[1]
    twice = np.where(np.tile(tokens, 2) < MODULUS, np.arange(2 * length), 2 * length)
    nearest = np.minimum.accumulate(twice[:, ::-1], axis=1)[:, ::-1]
    found: Integers = nearest[np.arange(len(tokens)), position] % length
    return found


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
