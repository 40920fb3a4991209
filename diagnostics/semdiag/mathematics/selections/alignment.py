"""Match the tokens of two selections: engines pack the same tokens in different orders."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from semdiag.mathematics.selections.agreement import overlaps

_CANDIDATES = 4  # number of shifts examined closely
_FALSE_ALARMS = 1e-3  # rate for unrelated selections
_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64


@dataclass(frozen=True, eq=False)
class Alignment:
    """Which tokens correspond.

    Attributes:
        kind: ``as given``, ``shifted`` (token t of A is token t + shift of B) or ``permuted``.
        shift: of tokens.
        first: int64 (m,), tokens of A that have a partner.
        second: int64 (m,), their partners in B.
        given: mean overlap of all rows as given.
        aligned: mean overlap of the rows of partners.
    """

    kind: str
    shift: int
    first: Tensor
    second: Tensor
    given: float
    aligned: float


def align(first: Tensor, second: Tensor, tokens: tuple[Tensor, Tensor] | None = None) -> Alignment:
    """Return the shift or permutation of tokens under which two selections agree best.

    Rows (of one layer, or of 2, 4, … successive layers) that occur once in A and once in B vote for their tokens.
    A shift is accepted if it removes more than half of the disagreement, and if this has a probability of at most
    0.001 for unrelated selections: 2T exp(−2md²) ≤ 0.001 for T tokens, m of which have partners, and a gain of d
    in mean overlap (Hoeffding, for every shift). A permutation is accepted if at least half of the tokens have a
    partner that votes back, and it removes more than half of their disagreement. Otherwise tokens stay as given.

    Source: not in the paper. Deviation: none.

    Args:
        first: int64 (T, rows, k), A, distinct in a row, -1 for none.
        second: int64 (T, rows, k), B, likewise.
        tokens: ids of the tokens of A and of B, int64 (T,), which also distinguish tokens.
    """
    count = len(first)
    every = torch.arange(count)
    given = _mean_overlap(first, second)
    same = Alignment("as given", 0, every, every, given, given)
    if given == 1.0 and (tokens is None or torch.equal(*tokens)):
        return same
    votes = _votes(_codes(first, tokens and tokens[0]), _codes(second, tokens and tokens[1]))
    if not len(votes[0]):
        return same
    for shift in _likely_shifts(votes):
        own = torch.arange(max(0, -shift), min(count, count - shift))
        gain = _mean_overlap(first[own], second[own + shift])
        if gain - given > (1 - given) / 2 and _rarely(count, len(own), gain - given):
            return Alignment("shifted", shift, own, own + shift, given, gain)
    own, other = _partners(votes, count)
    if 2 * len(own) >= count and not torch.equal(own, other):
        gain, before = _mean_overlap(first[own], second[other]), _mean_overlap(first[own], second[own])
        if gain - before > (1 - before) / 2:
            return Alignment("permuted", 0, own, other, given, gain)
    return same


def _rarely(tokens: int, partners: int, gain: float) -> bool:
    """Return whether such a gain is rare by chance, for the best of all shifts."""
    return math.log(2 * tokens) - 2 * partners * gain**2 <= math.log(_FALSE_ALARMS)


def _mean_overlap(first: Tensor, second: Tensor) -> float:
    return float(overlaps(first.flatten(0, 1), second.flatten(0, 1))[0].mean())


def _mixed(numbers: Tensor) -> Tensor:
    """Scatter integers over all 64 bits (splitmix64)."""
    start, *others = _MULTIPLIERS
    mixed = numbers * start + start
    for shift, factor in zip((30, 27), others, strict=True):
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return mixed ^ ((mixed >> 31) & (2**33 - 1))


def _codes(indices: Tensor, tokens: Tensor | None) -> Tensor:
    """Return a hash of each row's set of keys, independent of their order, int64 (T, rows)."""
    codes = _mixed(indices).masked_fill(indices < 0, 0).sum(-1)
    return codes if tokens is None else codes + _mixed(_mixed(tokens))[:, None]


def _votes(first: Tensor, second: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return pairs of tokens whose rows occur once in either selection, and their numbers of layers."""
    rows = first.shape[1]
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    weights, size = [], 1
    place = _mixed(torch.arange(1, rows + 1))
    while True:
        for start in range(0, rows, size):
            part = slice(start, start + size)
            keys = [_mixed(codes[:, part] + place[part]).sum(1).numpy() for codes in (first, second)]
            pairs.append(_once_in_both(*keys))
            weights.append(np.full(len(pairs[-1][0]), min(size, rows - start)))
        if size >= rows:
            break
        size *= 2
    own, other = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return own, other, np.concatenate(weights)


def _once_in_both(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of numbers that occur exactly once in both arrays."""
    once = []
    for codes in (first, second):
        values, places, counts = np.unique(codes, return_index=True, return_counts=True)
        once.append((values[counts == 1], places[counts == 1]))
    _, own, other = np.intersect1d(once[0][0], once[1][0], assume_unique=True, return_indices=True)
    return once[0][1][own], once[1][1][other]


def _likely_shifts(votes: tuple[np.ndarray, np.ndarray, np.ndarray]) -> list[int]:
    """Return the shifts with most votes, the best first; the zero shift is left out."""
    own, other, weights = votes
    shifts, which = np.unique(other - own, return_inverse=True)
    total = np.bincount(which.ravel(), weights)
    likely: list[int] = shifts[np.argsort(-total, kind="stable")[:_CANDIDATES]].tolist()
    return [shift for shift in likely if shift]


def _partners(votes: tuple[np.ndarray, np.ndarray, np.ndarray], count: int) -> tuple[Tensor, Tensor]:
    """Return tokens that give each other most of their votes."""
    own, other, weights = votes
    pairs, which = np.unique(own.astype(np.int64) * count + other, return_inverse=True)
    total = np.bincount(which.ravel(), weights)
    order = np.argsort(total, kind="stable")
    left, right = pairs[order] // count, pairs[order] % count
    best = np.full((2, count), -1)
    best[0, left] = right  # of several, the last one remains, which has most votes
    best[1, right] = left
    mutual = (best[0] >= 0) & (best[1, best[0]] == np.arange(count))
    return torch.from_numpy(mutual.nonzero()[0]), torch.from_numpy(best[0][mutual])
