"""Inputs that tell whether a mask can represent a task, and shortcuts that do not solve it."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, islice, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semdiag.mathematics.score_strips import as_mask
from semdiag_models import Task
from semdiag_models.config import ModelConfig
from semdiag_models.kinds import ATTENTIONS
from semdiag_models.model import Attention
from semdiag_models.tasks import MODULUS, POP, PUSH_0

LONGEST = 256  # longest input that is examined
_TRIED = 1000  # number of sets of inputs that are tried
_Witness = list[tuple[list[int], int, int]]  # inputs, each with its label and with another one


def receptive_fields(config: ModelConfig) -> Tensor:
    """Return the tokens of the input on which each pooled output can depend."""
    length = config.length
    cls_tokens = config.cls_tokens
    positions = length + config.extra_tokens
    reaches = torch.zeros(positions, length)
    reaches[cls_tokens : cls_tokens + length] = torch.eye(length)
    for layer in range(config.blocks):
        reaches = ((_steps(config, layer) @ reaches) > 0).float()
    return (reaches[:1] if config.pooling == "cls" else reaches) > 0


def _steps(config: ModelConfig, layer: int) -> Tensor:
    """Return (P, P): 1 if a position sees another in one block; the residual stream shows each position itself."""
    positions = config.length + config.extra_tokens
    if ATTENTIONS[config.attention].keeps != "fixed":
        return torch.ones(positions, positions)
    leading, trailing = config.everywhere
    blank = torch.zeros(1, config.heads, positions, 1)
    with torch.device("meta"):  # its weights are not needed
        attention = Attention(config, layer)
    selected_keys = attention.select(blank, blank, None)
    assert selected_keys is not None  # a fixed set
    steps = as_mask(selected_keys, positions)[0].any(0).float()
    steps[:leading] = steps[positions - trailing :] = 1.0
    return steps + torch.eye(positions)


@lru_cache(maxsize=256)
def cannot_represent(task: Task, config: ModelConfig, length: int | None = None) -> bool:
    """Return whether no weights can make a model with this mask right on every input of the task."""
    length = config.length if length is None else length
    fixed = ATTENTIONS[config.attention].keeps == "fixed"
    if not fixed or task.name not in WITNESSES or length > LONGEST:
        return False
    fields = {tuple(row.nonzero().flatten().tolist()) for row in receptive_fields(config)[:, :length]}
    if any(len(field) == length for field in fields):
        return False
    return any(_contradicts(inputs, fields) for inputs in islice(WITNESSES[task.name](task, length), _TRIED))


def _contradicts(inputs: _Witness, fields: set[tuple[int, ...]]) -> bool:
    assert all(label != other_label for _, label, other_label in inputs)

    def patterns(field: tuple[int, ...], of: list[int]) -> Counter[tuple[object, ...]]:
        return Counter((c, *(tokens[at] for at in field)) for (tokens, *_), c in zip(inputs, of, strict=True))

    labels = [label for _, label, _ in inputs]
    other_labels = [other_label for _, _, other_label in inputs]
    return all(patterns(field, labels) == patterns(field, other_labels) for field in fields)


def _two_bits(length: int, places: Iterator[tuple[int, int]]) -> Iterator[_Witness]:
    """Yield inputs of zeros except for two bits, whose sum modulo 2 is the label."""
    for a, b in places:
        inputs: _Witness = []
        for first, second in product((0, 1), repeat=2):
            tokens = [0] * length
            tokens[a] = first
            tokens[b] = second
            inputs.append((tokens, first ^ second, 1 - (first ^ second)))
        yield inputs


def _missing_duplicate(task: Task, length: int) -> Iterator[_Witness]:
    """Yield two pairs of inputs that differ in whether a token is missing, seen by different positions."""
    half = length // 2

    def hidden(at: int, value_at: int, decoy: int, value_of_decoy: int) -> Iterator[list[int]]:
        for place in (at, at + half):
            tokens = [0] * (2 * half) + [task.pad_id] * (length % 2)
            for position, one in (
                (at, value_at),
                (at + half, value_at),
                (decoy, value_of_decoy),
                (decoy + half, value_of_decoy),
            ):
                tokens[position] = one
            tokens[place] = 2
            yield tokens

    for a, b in combinations(range(half), 2):
        inputs: _Witness = []
        for at, decoy in ((a, b), (b, a)):
            inputs += [(tokens, 1, 0) for tokens in hidden(at, 1, decoy, 0)] * 2
            inputs += [(tokens, 0, 1) for value in (0, 1) for tokens in hidden(at, 0, decoy, value)]
        yield inputs


def _stack_manipulation(task: Task, length: int) -> Iterator[_Witness]:
    """Yield inputs in which the last two actions decide which of two bottom bits comes to the top."""
    bits = 3 + (length - 5) % 2
    fill = (length - bits - 2) // 2
    if fill < 0:
        return
    inputs: _Witness = []
    for top, third in ((0, 1), (1, 0)):
        start = [0] * (bits - 3) + [third, 0, top] + [PUSH_0, POP] * fill
        inputs += [([*start, PUSH_0, POP], top, 1 - top), ([*start, POP, POP], third, 1 - third)]
    yield inputs


def _cycle_navigation(task: Task, length: int) -> Iterator[_Witness]:
    """Yield inputs with up to four steps forward at each end, for every sum of two residues."""
    ends = MODULUS - 1
    if length < 2 * ends:
        return
    middle = [1] * (length - 2 * ends)
    residues = {n: [2] * n + [1] * (ends - n) for n in range(MODULUS)}
    yield [
        ([*residues[a], *middle, *residues[b]], (a + b) % MODULUS, (a + b + 1) % MODULUS)
        for a, b in product(residues, repeat=2)
    ]


def _filler(length: int) -> str:
    short = {1: "0", 2: "-0", 3: "(0)", 4: "(-0)"}
    return short[length] if length in short else f"(0+{_filler(length - 4)})"


def _modular_arithmetic(task: Task, length: int) -> Iterator[_Witness]:
    """Yield sums of a digit at the start and one at the end."""
    if length >= 9:
        texts = {(a, b): f"({a}+({_filler(length - 8)}+{b}))" for a, b in product(range(MODULUS), repeat=2)}
        yield [(task.parse(x), (a + b) % MODULUS, (a + b + 1) % MODULUS) for (a, b), x in texts.items()]


def _solve_equation(task: Task, length: int) -> Iterator[_Witness]:
    """Yield equations for the summand to a digit at the start, with the sum after the equals sign."""
    if length >= 11:
        texts = {(a, v): f"({a}+({_filler(length - 10)}+x))={v}" for a, v in product(range(MODULUS), repeat=2)}
        yield [(task.parse(x), (v - a) % MODULUS, (v - a + 1) % MODULUS) for (a, v), x in texts.items()]


WITNESSES: dict[str, Callable[[Task, int], Iterator[_Witness]]] = {
    "parity": lambda task, length: _two_bits(length, ((a, b) for b in reversed(range(length)) for a in range(b))),
    "even-pairs": lambda task, length: _two_bits(length, iter([(0, length - 1)] * (length > 1))),
    "missing-duplicate": _missing_duplicate,
    "stack-manipulation": _stack_manipulation,
    "cycle-navigation": _cycle_navigation,
    "modular-arithmetic": _modular_arithmetic,
    "solve-equation": _solve_equation,
}


_SAMPLES = 20_000  # number of samples to find the rule on, and again to try it on
_BEYOND_CHANCE = 1.5 / _SAMPLES**0.5  # three standard errors
_EDGE = 32  # positions at either end that are examined where a task is longer than both
_SEED = 2**33  # random seed of no run


@dataclass(frozen=True)
class Shortcut:
    """Best rule on few tokens that does not solve the task."""

    accuracy: float  # accuracy on samples that the rule was not found on; at least that of the commonest label
    positions: tuple[int, ...]  # positions of the tokens that the rule looks at, from 0


@lru_cache
def shortcut(task: Task, length: int) -> Shortcut:
    """Find the best rule that looks at the tokens at one or at two positions, whatever it does with them."""
    generator = torch.Generator().manual_seed(_SEED)
    sampled = [tuple(part.numpy() for part in task.sample(_SAMPLES, length, generator)) for _ in range(2)]
    (tokens, labels), (tried_tokens, tried_labels) = sampled
    places = [*range(length)] if length <= 2 * _EDGE else [*range(_EDGE), *range(length - _EDGE, length)]
    symbols = task.vocabulary_size
    commonest = int(np.bincount(labels).argmax())
    best = Shortcut(max(float((tried_labels == commonest).mean()), 1 / task.classes), ())
    correct = _right(tokens[:, places], labels, symbols, task.classes)
    while correct.max() > (labels == commonest).sum():
        pair = np.unravel_index(int(correct.argmax()), correct.shape)
        correct[pair] = 0
        i, j = (places[int(at)] for at in pair)
        counts = np.zeros((symbols * symbols, task.classes), np.int64)
        np.add.at(counts, (tokens[:, i] * symbols + tokens[:, j], labels), 1)
        is_right = counts.argmax(1)[tried_tokens[:, i] * symbols + tried_tokens[:, j]] == tried_labels
        if is_right.all() and counts.max(1).sum() == len(labels):
            continue
        accuracy = float(is_right.mean())
        return Shortcut(accuracy, tuple(sorted({i, j}))) if accuracy > best.accuracy + _BEYOND_CHANCE else best
    return best


def _right(tokens: NDArray[np.int64], labels: NDArray[np.int64], symbols: int, classes: int) -> NDArray[np.int64]:
    """Count the samples on which the best rule on the tokens at i ≤ j is right, (L, L); one token at i = j."""
    samples, length = tokens.shape
    one_hot = np.zeros((samples, length, symbols), np.float32)
    np.put_along_axis(one_hot, tokens[:, :, None], 1.0, 2)
    flat = one_hot.reshape(samples, length * symbols)
    correct_pairs = np.zeros((length * symbols,) * 2, np.float32)
    for label in range(classes):
        rows = flat[labels == label]
        np.maximum(correct_pairs, rows.T @ rows, out=correct_pairs)
    pairs = correct_pairs.reshape(length, symbols, length, symbols).sum((1, 3))
    correct: NDArray[np.int64] = np.triu(pairs).round().astype(np.int64)
    return correct
