"""Strings of the formal-language tasks with their labels, drawn at random; their rules are in ``TASKS``."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from semdiag_files import refuse
from semdiag_models.config import ListOpsTrees

Samples = tuple[Tensor, Tensor]  # tokens (n, length) int64 and labels (n,) int64
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

POP, PUSH_0, PUSH_1 = 2, 3, 4
EMPTY = 2  # label of an empty stack
MODULUS = 5
EQUATION, BRACKETS = "01234+-()x=", "01234+-*()x"  # symbols of the two tasks, in the order of their ids
_LONGEST_LEAF = 4  # d, -d, (d) and (-d) have one to four characters
DIGIT_PROBABILITY = 0.75
OPENERS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*"0123456789", *OPENERS, "]")  # digits have their values as ids
FIRST_OPENER, CLOSER, PAD = 10, 14, 15
LEAST_ROUND = 100  # smallest number of trees to draw at a time
FRUITLESS_ROUNDS = 50  # number of rounds without a new tree after which drawing stops


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


def modular_arithmetic(n: int, length: int, generator: Generator) -> Samples:
    """Draw bracketed expressions; the label is the value modulo 5."""
    tokens, values = draw_expressions(n, length, BRACKETS, "+-*", numpy_generator(generator))
    return torch.from_numpy(tokens), torch.from_numpy(values)


def solve_equation(n: int, length: int, generator: Generator) -> Samples:
    """Draw expressions without products and replace one digit each by x, which is the label."""
    rng, size, rows = numpy_generator(generator), length - 2, np.arange(n)
    expressions, values = draw_expressions(n, size, EQUATION, "+-", rng)
    at = rng.integers(size, size=n)  # x stands for the first digit here or after it, cyclically
    twice = np.where(np.tile(expressions, 2) < MODULUS, np.arange(2 * size), 2 * size)
    unknown = np.minimum.accumulate(twice[:, ::-1], axis=1)[:, ::-1][rows, at] % size
    labels = expressions[rows, unknown]
    expressions[rows, unknown] = EQUATION.index("x")
    equals = np.full(n, EQUATION.index("="))
    tokens = np.concatenate([expressions, equals[:, None], values[:, None]], 1)
    return torch.from_numpy(tokens), torch.from_numpy(labels)


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
        left, right = below[0::2], below[1::2]
        plus, minus = operator == symbols.index("+"), operator == symbols.index("-")
        value[~leaf] = np.where(plus, left + right, np.where(minus, left - right, left * right)) % MODULUS
        below = value
    return tokens, below


def _write_leaves(
    tokens: Integers, row: Integers, start: Integers, size: Integers, symbols: str, rng: np.random.Generator
) -> Integers:
    """Write d, -d, (d) or (-d), by size, into the tokens; return their values."""
    digit, negative, bracketed = rng.integers(MODULUS, size=row.size), size % 2 == 0, size >= 3
    tokens[row[bracketed], start[bracketed]] = symbols.index("(")
    tokens[row[bracketed], (start + size - 1)[bracketed]] = symbols.index(")")
    tokens[row[negative], (start + bracketed)[negative]] = symbols.index("-")
    tokens[row, start + bracketed + negative] = digit
    return np.where(negative, -digit, digit) % MODULUS


class TreeWriter:
    """Draws trees of given lengths, depth by depth; nodes are digits with probability 3/4, and at the end."""

    def __init__(self, law: ListOpsTrees, rng: np.random.Generator) -> None:
        self.law, self.rng = law, rng
        # P(length = l) of a tree whose root has depth d, (max_depth + 1, longest + 1); row 0 unused
        laws = self.length_laws = np.zeros((law.max_depth + 1, law.longest + 1))
        laws[law.max_depth, 1] = 1
        for depth in range(law.max_depth - 1, 0, -1):
            arguments = self._powers(laws[depth + 1])[law.min_arity :].mean(0)
            laws[depth, 2:] = (1 - DIGIT_PROBABILITY) * arguments[:-2]
            laws[depth, 1] = DIGIT_PROBABILITY

    def _powers(self, length_law: Floats) -> Floats:
        """Return the laws of the total length of 0 … max_arity trees, shape (max_arity + 1, longest + 1)."""
        powers = np.zeros((self.law.max_arity + 1, self.law.longest + 1))
        powers[0, 0] = 1
        for k in range(1, self.law.max_arity + 1):
            powers[k] = np.convolve(powers[k - 1], length_law)[: self.law.longest + 1]
        return powers

    def write(self, lengths: Integers, width: int) -> tuple[Integers, Integers]:
        """Draw one tree per given length."""
        tokens = np.full((len(lengths), width), PAD)
        return tokens, self._write_nodes(tokens, 1, np.arange(len(lengths)), np.zeros_like(lengths), lengths)

    def _write_nodes(
        self, tokens: Integers, depth: int, row: Integers, start: Integers, length: Integers
    ) -> Integers:
        """Write the nodes of one depth with everything below them; return their values."""
        values, leaf = np.empty(row.size, dtype=np.int64), length == 1
        values[leaf] = self.rng.integers(10, size=np.count_nonzero(leaf))
        tokens[row[leaf], start[leaf]] = values[leaf]
        row, start, length = row[~leaf], start[~leaf], length[~leaf]
        if row.size == 0:
            return values
        operator = self.rng.integers(len(OPENERS), size=row.size)
        tokens[row, start] = FIRST_OPENER + operator
        tokens[row, start + length - 1] = CLOSER
        sizes = self._draw_argument_lengths(depth, length)
        starts, present = start[:, None] + 1 + sizes.cumsum(1) - sizes, sizes > 0
        rows = np.broadcast_to(row[:, None], sizes.shape)
        table = np.full(sizes.shape, 10)  # above every digit: absent arguments sort last
        table[present] = self._write_nodes(tokens, depth + 1, rows[present], starts[present], sizes[present])
        table.sort(axis=1)
        everyone, count = np.arange(len(table)), present.sum(1)
        low, high = table[everyone, (count - 1) // 2], table[everyone, count // 2]
        total = np.where(table < 10, table, 0).sum(1)
        results = table[:, 0], table[everyone, count - 1], (low + high) // 2, total % 10  # MIN, MAX, MED, SM
        values[~leaf] = np.choose(operator, results)
        return values

    def _draw_argument_lengths(self, depth: int, length: Integers) -> Integers:
        """Return lengths of the arguments of operators at one depth, (operators, max_arity), zeros in front."""
        law, first, rest = self.law, self.length_laws[depth + 1], length - 2
        powers = self._powers(first)
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


def list_operations(trees: ListOpsTrees, n: int, length: int, generator: Generator) -> Samples:
    """Draw n different trees, padded to the given length; the label is the tree's value."""
    rng = numpy_generator(generator)
    writer = TreeWriter(trees, rng)
    share = writer.length_laws[1] * (np.arange(trees.longest + 1) >= trees.shortest)
    sizes = f"{trees.shortest} to {trees.longest} tokens, depth at most {trees.max_depth}"
    described = f"listops with {sizes} and {trees.min_arity} to {trees.max_arity} arguments"
    refuse(not share.any(), f"{described} has no string.")
    found: dict[bytes, tuple[Integers, int]] = {}  # trees with their values, in the order drawn
    fruitless = 0
    while len(found) < n:
        lengths = rng.choice(share.size, max(n - len(found), LEAST_ROUND), p=share / share.sum())
        before = len(found)
        for tokens, value in zip(*writer.write(lengths, length), strict=True):
            found.setdefault(tokens.tobytes(), (tokens, value))
        fruitless = fruitless + 1 if len(found) == before else 0
        few = fruitless == FRUITLESS_ROUNDS
        refuse(few, f"{described} gave {len(found)} different strings only, not n={n}.")
    rows, values = zip(*list(found.values())[:n], strict=True)
    return torch.from_numpy(np.stack(rows)), torch.from_numpy(np.array(values))
