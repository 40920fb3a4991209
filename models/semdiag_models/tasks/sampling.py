"""Strings of the formal-language tasks with their labels, drawn at random; their rules are in ``TASKS``."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from semdiag_models.config import ListOpsTrees
from semdiag_models.reading import InputError

Samples = tuple[Tensor, Tensor]  # tokens (n, length) int64 and labels (n,) int64
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def numpy_generator(generator: Generator) -> np.random.Generator:
    """Return a numpy generator that a torch generator seeds, so that its draws are a function of the latter."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))


def parity(n: int, length: int, generator: Generator) -> Samples:
    """Draw fair bits; the label is the number of ones modulo 2."""
    tokens = torch.randint(2, (n, length), generator=generator)
    return tokens, tokens.sum(1) % 2


def even_pairs(n: int, length: int, generator: Generator) -> Samples:
    """Draw fair bits; the label is the number of unequal neighbours modulo 2: whether first and last differ."""
    tokens = torch.randint(2, (n, length), generator=generator)
    return tokens, tokens[:, 0] ^ tokens[:, -1]


def cycle_navigation(n: int, length: int, generator: Generator) -> Samples:
    """Draw uniform steps of -1, 0 and 1 (tokens 0, 1, 2); the label is the place on a cycle of five."""
    tokens = torch.randint(3, (n, length), generator=generator)
    return tokens, (tokens.sum(1) - length) % 5


def missing_duplicate(n: int, length: int, generator: Generator) -> Samples:
    """Draw fair bits, double them, hide one (token 2); the label is the hidden bit. PAD fills an odd length."""
    half = length // 2
    bits = torch.randint(2, (n, half), generator=generator)
    hidden = torch.randint(2 * half, (n, 1), generator=generator)
    tokens = torch.full((n, length), 3)
    tokens[:, : 2 * half] = bits.repeat(1, 2).scatter(1, hidden, 2)
    return tokens, bits.gather(1, hidden % half).squeeze(1)


POP, PUSH_0, PUSH_1 = 2, 3, 4
EMPTY = 2  # label of an empty stack


def stack_manipulation(n: int, length: int, generator: Generator) -> Samples:
    """Draw a stack, bottom first, and actions on it; the label is what then lies on top."""
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


# --- expressions modulo 5


MODULUS = 5
EQUATION, BRACKETS = "01234+-()x=", "01234+-*()x"  # symbols of the two tasks, in the order of their ids
_LONGEST_LEAF = 4  # d, -d, (d) and (-d) have one to four characters


def modular_arithmetic(n: int, length: int, generator: Generator) -> Samples:
    """Draw bracketed expressions; the label is the value modulo 5."""
    tokens, values = draw_expressions(n, length, BRACKETS, "+-*", numpy_generator(generator))
    return torch.from_numpy(tokens), torch.from_numpy(values)


def solve_equation(n: int, length: int, generator: Generator) -> Samples:
    """Draw expressions without products and replace one digit each by x, which is the label."""
    rng = numpy_generator(generator)
    expressions, values = draw_expressions(n, length - 2, EQUATION, "+-", rng)
    unknown = _next_digit(expressions, rng.integers(length - 2, size=n))
    everyone = np.arange(n)
    labels = expressions[everyone, unknown]
    expressions[everyone, unknown] = EQUATION.index("x")
    equals = np.full(n, EQUATION.index("="))
    tokens = np.concatenate([expressions, equals[:, None], values[:, None]], 1)
    return torch.from_numpy(tokens), torch.from_numpy(labels)


def _next_digit(tokens: Integers, position: Integers) -> Integers:
    """Return the position of the first digit at or after a position, cyclically, row by row."""
    length = tokens.shape[1]
    twice = np.where(np.tile(tokens, 2) < MODULUS, np.arange(2 * length), 2 * length)
    nearest = np.minimum.accumulate(twice[:, ::-1], axis=1)[:, ::-1]
    found: Integers = nearest[np.arange(len(tokens)), position] % length
    return found


def draw_expressions(
    n: int, length: int, symbols: str, operators: str, rng: np.random.Generator
) -> tuple[Integers, Integers]:
    """Draw expressions of an exact length, with their values modulo 5."""
    tokens = np.empty((n, length), dtype=np.int64)
    choices = np.array([symbols.index(operator) for operator in operators])
    row, start, size = np.arange(n), np.zeros(n, dtype=np.int64), np.full(n, length)
    levels: list[tuple[Integers, NDArray[np.bool_], Integers]] = []
    while row.size:
        value = np.zeros(row.size, dtype=np.int64)
        leaf = size <= _LONGEST_LEAF
        value[leaf] = _write_leaves(tokens, row[leaf], start[leaf], size[leaf], symbols, rng)
        row, start, size = row[~leaf], start[~leaf], size[~leaf]
        left = rng.integers(1, size - 3)
        operator = rng.choice(choices, row.size)
        tokens[row, start] = symbols.index("(")
        tokens[row, start + 1 + left] = operator
        tokens[row, start + size - 1] = symbols.index(")")
        levels.append((value, leaf, operator))
        start = np.stack([start + 1, start + 2 + left], 1).ravel()
        size = np.stack([left, size - 3 - left], 1).ravel()
        row = row.repeat(2)
    below = np.zeros(0, dtype=np.int64)
    for value, leaf, operator in reversed(levels):
        value[~leaf] = _apply_arithmetic(operator, below[0::2], below[1::2], symbols)
        below = value
    return tokens, below


def _write_leaves(
    tokens: Integers,
    row: Integers,
    start: Integers,
    size: Integers,
    symbols: str,
    rng: np.random.Generator,
) -> Integers:
    """Write d, -d, (d) or (-d), by size, into the tokens; return their values."""
    digit = rng.integers(MODULUS, size=row.size)
    negative = size % 2 == 0
    bracketed = size >= 3
    tokens[row[bracketed], start[bracketed]] = symbols.index("(")
    tokens[row[bracketed], (start + size - 1)[bracketed]] = symbols.index(")")
    tokens[row[negative], (start + bracketed)[negative]] = symbols.index("-")
    tokens[row, start + bracketed + negative] = digit
    return np.where(negative, -digit, digit) % MODULUS


def _apply_arithmetic(operator: Integers, left: Integers, right: Integers, symbols: str) -> Integers:
    """Return values of ``left operator right`` modulo 5, elementwise; operators other than + and - multiply."""
    plus, minus = operator == symbols.index("+"), operator == symbols.index("-")
    return np.where(plus, left + right, np.where(minus, left - right, left * right)) % MODULUS


# --- ListOps


DIGIT_PROBABILITY = 0.75
OPENERS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*"0123456789", *OPENERS, "]")  # digits have their values as ids
FIRST_OPENER, CLOSER, PAD = 10, 14, 15


@dataclass(frozen=True)
class TreeLaw:
    """Law of the source's trees before any is rejected."""

    longest: int  # largest length that matters, in tokens; the probabilities up to it are exact
    max_depth: int  # depth at which every node is a digit; the root has depth 1
    min_arity: int  # smallest number of arguments
    max_arity: int  # largest number of arguments

    def powers(self, length_law: Floats) -> Floats:
        """Return the laws of the total length of 0 … max_arity trees, shape (max_arity + 1, longest + 1)."""
        powers = np.zeros((self.max_arity + 1, self.longest + 1))
        powers[0, 0] = 1
        for k in range(1, self.max_arity + 1):
            powers[k] = np.convolve(powers[k - 1], length_law)[: self.longest + 1]
        return powers

    def length_laws(self) -> Floats:
        """P(length = l) of a tree whose root has depth d, shape (max_depth + 1, longest + 1); row 0 unused."""
        laws = np.zeros((self.max_depth + 1, self.longest + 1))
        laws[self.max_depth, 1] = 1
        for depth in range(self.max_depth - 1, 0, -1):
            arguments = self.powers(laws[depth + 1])[self.min_arity :].mean(0)
            laws[depth, 2:] = (1 - DIGIT_PROBABILITY) * arguments[:-2]
            laws[depth, 1] = DIGIT_PROBABILITY
        return laws


class TreeWriter:
    """Draws trees of given lengths, all of them together, one depth after the other."""

    def __init__(self, law: TreeLaw, rng: np.random.Generator) -> None:
        self.law = law
        self.rng = rng
        self.length_laws = law.length_laws()

    def write(self, lengths: Integers, width: int) -> tuple[Integers, Integers]:
        """Draw one tree per given length."""
        tokens = np.full((len(lengths), width), PAD)
        rows, starts = np.arange(len(lengths)), np.zeros(len(lengths), dtype=np.int64)
        return tokens, self._write_nodes(tokens, 1, rows, starts, lengths)

    def _write_nodes(
        self, tokens: Integers, depth: int, row: Integers, start: Integers, length: Integers
    ) -> Integers:
        """Write the nodes of one depth with everything below them; return their values."""
        values = np.empty(row.size, dtype=np.int64)
        leaf = length == 1
        values[leaf] = self.rng.integers(10, size=np.count_nonzero(leaf))
        tokens[row[leaf], start[leaf]] = values[leaf]
        row, start, length = row[~leaf], start[~leaf], length[~leaf]
        if row.size == 0:
            return values
        operator = self.rng.integers(len(OPENERS), size=row.size)
        tokens[row, start] = FIRST_OPENER + operator
        tokens[row, start + length - 1] = CLOSER
        sizes = self._draw_argument_lengths(depth, length)
        starts = start[:, None] + 1 + sizes.cumsum(1) - sizes
        present = sizes > 0
        rows = np.broadcast_to(row[:, None], sizes.shape)
        arguments = self._write_nodes(tokens, depth + 1, rows[present], starts[present], sizes[present])
        values[~leaf] = _apply(operator, arguments, present)
        return values

    def _draw_argument_lengths(self, depth: int, length: Integers) -> Integers:
        """Return lengths of the arguments of operators at one depth, (operators, max_arity), zeros in front."""
        law = self.law
        first = self.length_laws[depth + 1]
        powers = law.powers(first)
        rest = length - 2
        weights = np.zeros((law.longest + 1, law.max_arity + 1))
        weights[:, law.min_arity :] = powers[law.min_arity :].T
        arity = self._draw(weights, rest)
        sizes = np.zeros((length.size, law.max_arity), dtype=np.int64)
        total = np.arange(law.longest + 1)
        after = total[:, None] - total  # (r, c): what is left of r tokens after an argument of c
        for j in range(law.max_arity, 1, -1):
            # Every operator with j or more arguments draws the length of its j-th argument from the end.
            weights = np.where(after >= 0, first * powers[j - 1][np.maximum(after, 0)], 0.0)
            drawing = arity >= j
            drawn = self._draw(weights, rest[drawing])
            sizes[drawing, law.max_arity - j] = drawn
            rest[drawing] -= drawn
        sizes[:, -1] = rest
        return sizes

    def _draw(self, weights: Floats, row: Integers) -> Integers:
        """Draw, for each row of a table of weights, one column with probability proportional to its weight."""
        shares = weights.cumsum(1)
        shares /= np.maximum(shares[:, -1:], np.finfo(np.float64).tiny)
        shifted = (shares + np.arange(len(shares))[:, None]).ravel()
        # Below 1 by more than the rounding of the shift, so that no draw reaches the next row.
        uniform = self.rng.random(row.size) * (1 - 2.0**-40)
        column: Integers = np.searchsorted(shifted, row + uniform, side="right") - row * weights.shape[1]
        return column


def _apply(operator: Integers, arguments: Integers, present: NDArray[np.bool_]) -> Integers:
    """Return the values of operators, from the values of all their arguments in order and where these stand."""
    count = present.sum(1)
    table = np.full(present.shape, 10)  # above every digit: absent arguments sort last
    table[present] = arguments
    table.sort(axis=1)
    everyone = np.arange(len(table))
    low, high = table[everyone, (count - 1) // 2], table[everyone, count // 2]
    total = np.where(table < 10, table, 0).sum(1)
    return np.choose(operator, [table[:, 0], table[everyone, count - 1], (low + high) // 2, total % 10])


LEAST_ROUND = 100  # smallest number of trees to draw at a time
FRUITLESS_ROUNDS = 50  # number of rounds without a new tree after which drawing stops


def list_operations(trees: ListOpsTrees, n: int, length: int, generator: Generator) -> Samples:
    """Draw n different trees, padded to the given length; the label is the tree's value."""
    law = TreeLaw(trees.longest, trees.max_depth, trees.min_arity, trees.max_arity)
    rng = numpy_generator(generator)
    writer = TreeWriter(law, rng)
    share = writer.length_laws[1] * (np.arange(law.longest + 1) >= trees.shortest)
    described = (
        f"listops with {trees.shortest} to {law.longest} tokens, depth at most {law.max_depth} "
        f"and {law.min_arity} to {law.max_arity} arguments"
    )
    if not share.any():
        raise InputError(f"{described} has no string.")
    found: dict[bytes, tuple[Integers, int]] = {}  # trees with their values, in the order drawn
    fruitless = 0
    while len(found) < n:
        lengths = rng.choice(share.size, max(n - len(found), LEAST_ROUND), p=share / share.sum())
        before = len(found)
        for tokens, value in zip(*writer.write(lengths, length), strict=True):
            found.setdefault(tokens.tobytes(), (tokens, value))
        fruitless = fruitless + 1 if len(found) == before else 0
        if fruitless == FRUITLESS_ROUNDS:
            raise InputError(f"{described} gave {len(found)} different strings only, not n={n}.")
    rows, values = zip(*list(found.values())[:n], strict=True)
    return torch.from_numpy(np.stack(rows)), torch.from_numpy(np.array(values))
