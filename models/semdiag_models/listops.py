"""The task listops: trees of nested list operations with their values, drawn by the length of their strings."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from semdiag_files import InputError
from semdiag_models.config import ListOpsTrees

Samples = tuple[Tensor, Tensor]  # tokens (n, length) int64 and labels (n,) int64
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

DIGIT_PROBABILITY = 0.75
OPENERS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*"0123456789", *OPENERS, "]")  # digits have their values as ids
FIRST_OPENER = 10
CLOSER = 14
PAD = 15
LEAST_ROUND = 100  # smallest number of trees to draw at a time
FRUITLESS_ROUNDS = 50  # number of rounds without a new tree after which drawing stops


def numpy_generator(generator: Generator) -> np.random.Generator:
    """Return a numpy generator that a torch generator seeds, so that its draws are a function of the latter."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))


class TreeWriter:
    """Draws trees of given lengths, depth by depth; nodes are digits with probability 3/4, and at the end."""

    def __init__(self, law: ListOpsTrees, rng: np.random.Generator) -> None:
        self.law = law
        self.rng = rng
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
        values = np.empty(row.size, dtype=np.int64)
        leaf = length == 1
        values[leaf] = self.rng.integers(10, size=np.count_nonzero(leaf))
        tokens[row[leaf], start[leaf]] = values[leaf]
        row = row[~leaf]
        start = start[~leaf]
        length = length[~leaf]
        if row.size == 0:
            return values
        operator = self.rng.integers(len(OPENERS), size=row.size)
        tokens[row, start] = FIRST_OPENER + operator
        tokens[row, start + length - 1] = CLOSER
        sizes = self._draw_argument_lengths(depth, length)
        starts = start[:, None] + 1 + sizes.cumsum(1) - sizes
        present = sizes > 0
        rows = np.broadcast_to(row[:, None], sizes.shape)
        table = np.full(sizes.shape, 10)  # above every digit: absent arguments sort last
        table[present] = self._write_nodes(tokens, depth + 1, rows[present], starts[present], sizes[present])
        table.sort(axis=1)
        everyone = np.arange(len(table))
        count = present.sum(1)
        low = table[everyone, (count - 1) // 2]
        high = table[everyone, count // 2]
        total = np.where(table < 10, table, 0).sum(1)
        results = table[:, 0], table[everyone, count - 1], (low + high) // 2, total % 10  # MIN, MAX, MED, SM
        values[~leaf] = np.choose(operator, results)
        return values

    def _draw_argument_lengths(self, depth: int, length: Integers) -> Integers:
        """Return lengths of the arguments of operators at one depth, (operators, max_arity), zeros in front."""
        law = self.law
        first = self.length_laws[depth + 1]
        rest = length - 2
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
            lengths = self._draw(weights, rest[drawing])
            sizes[drawing, law.max_arity - j] = lengths
            rest[drawing] -= lengths
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
    law = f"listops with {sizes} and {trees.min_arity} to {trees.max_arity} arguments"
    if not share.any():
        raise InputError(f"{law} has no string.")
    distinct: dict[bytes, tuple[Integers, int]] = {}  # trees with their values, in the order drawn
    fruitless = 0
    while len(distinct) < n:
        lengths = rng.choice(share.size, max(n - len(distinct), LEAST_ROUND), p=share / share.sum())
        before = len(distinct)
        for tokens, value in zip(*writer.write(lengths, length), strict=True):
            distinct.setdefault(tokens.tobytes(), (tokens, value))
        fruitless = fruitless + 1 if len(distinct) == before else 0
        if fruitless == FRUITLESS_ROUNDS:
            raise InputError(f"{law} gave {len(distinct)} different strings only, not n={n}.")
    rows, values = zip(*list(distinct.values())[:n], strict=True)
    return torch.from_numpy(np.stack(rows)), torch.from_numpy(np.array(values))
