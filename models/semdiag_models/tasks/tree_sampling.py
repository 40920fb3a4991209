"""Random ListOps trees, conditioned on their length."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

DIGIT_PROBABILITY = 0.75
OPENERS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*"0123456789", *OPENERS, "]")  # the digits have their values as ids
FIRST_OPENER, CLOSER, PAD = 10, 14, 15


@dataclass(frozen=True)
class TreeLaw:
    """The law of the source's trees before any is thrown away."""

    longest: int  # the largest length that matters, in tokens; the probabilities up to it are exact
    max_depth: int  # the depth at which every node is a digit; the root has depth 1
    min_arity: int  # smallest number of arguments
    max_arity: int  # largest number of arguments

    def powers(self, length_law: Floats) -> Floats:
        """Return laws of the total length of 0 … max_arity trees, shape (max_arity + 1, longest + 1)."""
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
        """Write the nodes of one depth with all that is below them; return their values."""
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
        """For each given row of a table of weights, one column, with probability proportional to its weight."""
        shares = weights.cumsum(1)
        shares /= np.maximum(shares[:, -1:], np.finfo(np.float64).tiny)
        shifted = (shares + np.arange(len(shares))[:, None]).ravel()
        # Below 1 by more than the rounding of the shift, so that no draw slips into the next row.
        uniform = self.rng.random(row.size) * (1 - 2.0**-40)
        column: Integers = np.searchsorted(shifted, row + uniform, side="right") - row * weights.shape[1]
        return column


def _apply(operator: Integers, arguments: Integers, present: NDArray[np.bool_]) -> Integers:
    """Return values of operators, given the values of all their arguments in order and where these stand."""
    count = present.sum(1)
    table = np.full(present.shape, 10)  # above every digit: absent arguments sort last
    table[present] = arguments
    table.sort(axis=1)
    everyone = np.arange(len(table))
    low, high = table[everyone, (count - 1) // 2], table[everyone, count // 2]
    total = np.where(table < 10, table, 0).sum(1)
    return np.choose(operator, [table[:, 0], table[everyone, count - 1], (low + high) // 2, total % 10])
