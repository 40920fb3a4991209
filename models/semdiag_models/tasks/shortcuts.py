"""How far a rule on few tokens comes: the accuracy at which a run sits before it learns the task."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from semdiag_models.tasks.task import Task

_SAMPLES = 20_000  # to find the rule on, and as many to try it on
_BEYOND_CHANCE = 1.5 / _SAMPLES**0.5  # three standard errors
_EDGE = 32  # positions at either end, where a task is longer than both
_SEED = 2**33  # no run's


@dataclass(frozen=True)
class Shortcut:
    """The best rule on few tokens that does not solve the task."""

    accuracy: float  # of the rule on samples that it was not found on; at least that of the commonest label
    positions: tuple[int, ...]  # whose tokens it looks at, from 0


@lru_cache
def shortcut(task: Task, length: int) -> Shortcut:
    """Find the best rule that looks at the tokens at one or at two positions, whatever it does with them."""
    generator = torch.Generator().manual_seed(_SEED)
    drawn = [tuple(part.numpy() for part in task.sample(_SAMPLES, length, generator)) for _ in range(2)]
    (tokens, labels), (others, answers) = drawn
    places = [*range(length)] if length <= 2 * _EDGE else [*range(_EDGE), *range(length - _EDGE, length)]
    symbols = task.vocabulary_size
    commonest = int(np.bincount(labels).argmax())
    best = Shortcut(max(float((answers == commonest).mean()), 1 / task.classes), ())
    right = _right(tokens[:, places], labels, symbols, task.classes)
    while right.max() > (labels == commonest).sum():
        pair = np.unravel_index(int(right.argmax()), right.shape)
        right[pair] = 0
        i, j = (places[int(at)] for at in pair)
        counts = np.zeros((symbols * symbols, task.classes), np.int64)
        np.add.at(counts, (tokens[:, i] * symbols + tokens[:, j], labels), 1)
        told = counts.argmax(1)[others[:, i] * symbols + others[:, j]] == answers
        if told.all() and counts.max(1).sum() == len(labels):
            continue
        accuracy = float(told.mean())
        return Shortcut(accuracy, tuple(sorted({i, j}))) if accuracy > best.accuracy + _BEYOND_CHANCE else best
    return best


def _right(tokens: NDArray[np.int64], labels: NDArray[np.int64], symbols: int, classes: int) -> NDArray[np.int64]:
    """Count the samples on which the best rule on the tokens at i ≤ j is right, (L, L); at i = j on one."""
    samples, length = tokens.shape
    seen = np.zeros((samples, length, symbols), np.float32)
    np.put_along_axis(seen, tokens[:, :, None], 1.0, 2)
    flat = seen.reshape(samples, length * symbols)
    most = np.zeros((length * symbols,) * 2, np.float32)
    for label in range(classes):
        rows = flat[labels == label]
        np.maximum(most, rows.T @ rows, out=most)
    pairs = most.reshape(length, symbols, length, symbols).sum((1, 3))
    right: NDArray[np.int64] = np.triu(pairs).round().astype(np.int64)
    return right
