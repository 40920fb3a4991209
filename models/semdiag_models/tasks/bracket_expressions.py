"""Fully bracketed arithmetic over the digits 0 to 4: drawing expressions, and reading them."""

import numpy as np
from numpy.typing import NDArray

from semdiag_models.errors import InputError

Integers = NDArray[np.int64]
Frame = list[str | tuple[int, bool]]

MODULUS = 5
LONGEST_LEAF = 4  # d, -d, (d) and (-d) have one to four characters
REFUSAL = (
    "is not a bracketed expression: a digit, a signed digit, one of these in brackets, "
    "or two expressions with an operator between them in brackets."
)


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
        value[~leaf] = _apply(operator, below[0::2], below[1::2], symbols)
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
    """Write d, -d, (d) or (-d), by size, into the tokens; return the values."""
    digit = rng.integers(MODULUS, size=row.size)
    negative = size % 2 == 0
    bracketed = size >= 3
    tokens[row[bracketed], start[bracketed]] = symbols.index("(")
    tokens[row[bracketed], (start + size - 1)[bracketed]] = symbols.index(")")
    tokens[row[negative], (start + bracketed)[negative]] = symbols.index("-")
    tokens[row, start + bracketed + negative] = digit
    return np.where(negative, -digit, digit) % MODULUS


def _apply(operator: Integers, left: Integers, right: Integers, symbols: tuple[str, ...]) -> Integers:
    """Return values of ``left operator right`` modulo 5, elementwise; what is neither plus nor minus is times."""
    plus, minus = operator == symbols.index("+"), operator == symbols.index("-")
    return np.where(plus, left + right, np.where(minus, left - right, left * right)) % MODULUS


def evaluate(text: str) -> int:
    """Value modulo 5 of one expression."""
    # One frame per open bracket: operators as text, operands as (value, is it a plain signed digit?).
    frames: list[Frame] = [[]]
    for character in text:
        if character == "(":
            frames.append([])
        elif character == ")":
            value = _value_in_brackets(frames.pop())
            if not frames or value is None:
                raise InputError(f"{text} {REFUSAL}")
            frames[-1].append((value, False))
        elif character in "+-*":
            frames[-1].append(character)
        elif character in "01234":
            _append_digit(frames[-1], int(character))
        else:
            raise InputError(f"{text} {REFUSAL}")
    match frames:
        case [[(int(value), _)]]:
            return value % MODULUS
        case _:
            raise InputError(f"{text} {REFUSAL}")


def _append_digit(frame: Frame, digit: int) -> None:
    """Append an operand; a minus before it is its sign unless another operand stands before that minus."""
    signed = frame[-1:] == ["-"] and (len(frame) == 1 or isinstance(frame[-2], str))
    if signed:
        frame.pop()
    frame.append((-digit if signed else digit, True))


def _value_in_brackets(inner: Frame) -> int | None:
    """Value of what stood between a pair of brackets; None if it cannot stand there."""
    match inner:
        case [(int(value), True)]:
            return value
        case [(int(left), _), "+", (int(right), _)]:
            return (left + right) % MODULUS
        case [(int(left), _), "-", (int(right), _)]:
            return (left - right) % MODULUS
        case [(int(left), _), "*", (int(right), _)]:
            return (left * right) % MODULUS
        case _:
            return None
