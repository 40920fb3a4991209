"""Tasks from formal languages: stacks, strings, cycles, pairs, parity, ListOps, equations, modular arithmetic."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from semdiag_models.reading import InputError
from semdiag_models.tasks.expressions import (
    CLOSER,
    FIRST_OPENER,
    MODULUS,
    SYMBOLS,
    Integers,
    TreeLaw,
    TreeWriter,
    draw_expressions,
    evaluate,
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

    def label(self, tokens: list[int]) -> int:
        """Run the stack machine; see :meth:`Task.label`."""
        self.require_symbols(tokens)
        if tokens[0] >= POP:
            raise InputError(f"{self.name} starts with a bit of the stack. Got the action {tokens[0]}.")
        stack: list[int] = []
        acting = False
        for token in tokens:
            if token < POP and acting:
                raise InputError(f"{self.name} has all bits before the first action. Got {token} after one.")
            acting = token >= POP
            if token != POP:
                stack.append(token - PUSH_0 if acting else token)
            elif stack:
                stack.pop()
        return stack[-1] if stack else EMPTY


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

    def label(self, tokens: list[int]) -> int:
        """Evaluate innermost lists first; see :meth:`Task.label`."""
        self.require_symbols(tokens)
        # Each open list holds its opener and the values so far; the outermost has no opener.
        open_lists: list[list[int]] = [[]]
        for token in tokens:
            if token >= FIRST_OPENER and token != CLOSER:
                open_lists.append([token])
                continue
            value = token
            if token == CLOSER:
                if len(open_lists) == 1:
                    raise InputError(f"{self.name} got a closer without an opener.")
                opener, *arguments = open_lists.pop()
                value = self._value(self.symbols[opener], arguments)
            open_lists[-1].append(value)
        if len(open_lists) > 1:
            raise InputError(f"{self.name} got {len(open_lists) - 1} openers without a closer.")
        if len(open_lists[0]) != 1:
            raise InputError(f"{self.name} needs one tree. Got {len(open_lists[0])} side by side.")
        return open_lists[0][0]

    def _value(self, opener: str, arguments: list[int]) -> int:
        """Return the value of one operator on its arguments."""
        k = len(arguments)
        if not self.law.min_arity <= k <= self.law.max_arity:
            allowed = f"{self.law.min_arity} to {self.law.max_arity} arguments"
            raise InputError(f"{self.name} operators take {allowed}. Got {opener} with {k}.")
        ascending = sorted(arguments)
        results = {
            "[MIN": ascending[0],
            "[MAX": ascending[-1],
            "[MED": ascending[k // 2] if k % 2 else (ascending[k // 2 - 1] + ascending[k // 2]) // 2,
            "[SM": sum(arguments) % 10,
        }
        return results[opener]

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
