"""Random ListOps trees and arithmetic expressions of given lengths; tokenizers of texts."""

import io
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semdiag_models.reading import InputError, unknown_name

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

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


MODULUS = 5
LONGEST_LEAF = 4  # d, -d, (d) and (-d) have one to four characters


def draw_expressions(
    n: int, length: int, symbols: tuple[str, ...], operators: str, rng: np.random.Generator
) -> tuple[Integers, Integers]:
    """Draw expressions of an exact length, with their values modulo 5."""
    tokens = np.empty((n, length), dtype=np.int64)
    choices = np.array([symbols.index(operator) for operator in operators])
    row, start, size = np.arange(n), np.zeros(n, dtype=np.int64), np.full(n, length)
    levels: list[tuple[Integers, NDArray[np.bool_], Integers]] = []
    while row.size:
        value = np.zeros(row.size, dtype=np.int64)
        leaf = size <= LONGEST_LEAF
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
    symbols: tuple[str, ...],
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


def _apply_arithmetic(operator: Integers, left: Integers, right: Integers, symbols: tuple[str, ...]) -> Integers:
    """Return values of ``left operator right`` modulo 5, elementwise; operators other than + and - multiply."""
    plus, minus = operator == symbols.index("+"), operator == symbols.index("-")
    return np.where(plus, left + right, np.where(minus, left - right, left * right)) % MODULUS


TOKENIZERS = {
    "unigram": "the likeliest cut under a unigram model of pieces",
    "bpe": "byte-pair encoding: the commonest neighbours are merged",
}
_LARGEST_VOCABULARY = 99_999  # largest vocabulary of a model, without PAD
_LONGEST_LINE = 4192  # bytes; SentencePiece's default, below which a limit changes nothing
_LINES_AT_ONCE = 10_000  # Python's lists of numbers are ten times the size of tensors


class Pieces(NamedTuple):
    """Lines as piece ids, one after the other."""

    ids: Tensor  # (sum of lengths,) int32
    lengths: Tensor  # (lines,) int64, pieces per line


def train_tokenizer(lines: list[str], kind: str, vocabulary: int) -> bytes:
    """Train a SentencePiece model with the library's settings, except for kind, size and one thread."""
    if kind not in TOKENIZERS:
        raise unknown_name("tokenizer", kind, TOKENIZERS)
    if not 3 <= vocabulary <= _LARGEST_VOCABULARY:
        raise InputError(f"--vocabulary must lie in 3 … {_LARGEST_VOCABULARY}. Got {vocabulary}.")
    model = io.BytesIO()
    longest = max(len(line.encode()) for line in lines)
    library = _sentencepiece()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=kind,
            vocab_size=vocabulary,
            max_sentence_length=max(_LONGEST_LINE, longest + 1),  # longer lines would be left out
            num_threads=1,
            minloglevel=3,
        )
    except RuntimeError as error:
        raise InputError(_refusal(str(error), vocabulary)) from None
    return model.getvalue()


def encode(model: bytes, vocabulary: int, lines: list[str]) -> Pieces:
    """Cut lines into pieces, without begin and end marks."""
    library = _sentencepiece()
    try:
        processor = library.SentencePieceProcessor(model_proto=model)
        found = processor.vocab_size()
    except RuntimeError:
        raise InputError("The stored tokenizer is damaged: SentencePiece cannot read it.") from None
    if found != vocabulary:
        raise InputError(f"The stored tokenizer is damaged: it has {found} pieces, not {vocabulary}.")
    ids: list[Tensor] = []
    lengths: list[int] = []
    for first in range(0, len(lines), _LINES_AT_ONCE):
        encoded = processor.encode(lines[first : first + _LINES_AT_ONCE], out_type=int, num_threads=1)
        lengths += map(len, encoded)
        ids.append(torch.tensor([i for line in encoded for i in line], dtype=torch.int32))
    return Pieces(torch.cat(ids), torch.tensor(lengths, dtype=torch.int64))


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise InputError(
            "Text needs the package sentencepiece, which is not installed: pip install sentencepiece"
        ) from None
    return sentencepiece


def _refusal(message: str, vocabulary: int) -> str:
    """Return SentencePiece's refusal of a vocabulary in our words."""
    if most := re.search(r"to a value <= (\d+)", message):
        return f"--vocabulary {vocabulary} is more than this text supports. Use --vocabulary {most[1]} or less."
    if least := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return (
            f"--vocabulary {vocabulary} is less than the {least[1]} this text needs for its characters alone. "
            f"Use --vocabulary {least[1]} or more."
        )
    return f"SentencePiece cannot learn pieces from this text ({message.splitlines()[0]})."
