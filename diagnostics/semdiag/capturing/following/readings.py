"""Which axes of scores are samples, heads, queries and keys."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from semdiag.capturing.following.weighted_values import Weighted

MAY_BE_SWAPPED = "its {} may be swapped: which axes of its scores they are could not be told"
OWN_KEYS = "each query has keys of its own: it counts as the only query, 0, of a sample of its own"


@dataclass(frozen=True)
class Reading:
    """Which axes of scores are what: samples and, if there are two before the queries or more, heads last."""

    lead: tuple[int, ...]
    query: int | None

    @property
    def in_order(self) -> bool:
        """Whether heads follow samples in the scores."""
        return list(self.lead) == sorted(self.lead)

    def rows(self, shape: torch.Size) -> int:
        """Samples times queries."""
        samples = self.lead[:-1] if len(self.lead) > 1 else self.lead
        return math.prod(shape[d] for d in samples) * (1 if self.query is None else shape[self.query])


def _readings(ndim: int, key: int, queries: set[int]) -> Iterator[Reading]:
    """The ways to read the axes of scores, the most usual first: queries last, then heads."""
    swapped = []
    for query in (*sorted(queries, reverse=True),) or (None,):
        lead = [d for d in range(ndim) if d not in (key, query)]
        yield Reading(tuple(lead), query)
        swapped += [Reading((*(d for d in lead if d != head), head), query) for head in lead[-2::-1]]
    yield from swapped


def read_axes(found: "Weighted", rows: set[int]) -> tuple[Reading, str | None]:
    """Read the axes of scores: samples times queries are the positions that a running module was given.

    Args:
        found: the scores.
        rows: their axes of which all entries meet the same values, as queries do, and heads that share them.

    Returns:
        The most usual reading of those that fit, of as many queries as keys if there is one; what to remark if it
        may be wrong, else None.
    """
    shape, key = found.scores.shape, found.key
    ones = _of_one_entry(shape, key)
    readings = [*_readings(len(shape), key, rows | ones)]
    fitting = _fitting(readings, shape, found.given)
    pool = fitting or [r for r in readings if r.in_order and (r.query in rows or not rows)]
    same = [r for r in pool if r.query is not None and shape[r.query] == shape[key]]
    pool = same or pool
    if fitting and found.history is not None:
        pool = _split_from_features(pool, found.history.q)
    reading = pool[0]
    if not rows and len(reading.lead) > 2:
        return min(pool, key=lambda r: shape[r.lead[-1]]), OWN_KEYS
    if _several_queries(pool, ones) or (not fitting and _guessed(reading, readings[0], bool(same))):
        return reading, MAY_BE_SWAPPED.format("queries and heads")
    if _heads_may_be_samples(found, reading, fitting):
        return reading, MAY_BE_SWAPPED.format("samples and heads")
    return reading, None


def _of_one_entry(shape: torch.Size, key: int) -> set[int]:
    """Axes of one entry that may be that of the queries."""
    return {d for d, size in enumerate(shape) if size == 1 and d != key and (d or len(shape) < 4)}


def _several_queries(pool: list[Reading], ones: set[int]) -> bool:
    """Whether readings differ in the axis of the queries; axes of one entry count as one."""
    return len({min(ones) if r.query in ones else r.query for r in pool}) > 1


def _guessed(reading: Reading, usual: Reading, same: bool) -> bool:
    """Whether the axis of the queries is a guess, if no input tells it; ``same`` says as many queries as keys."""
    if reading.query is None and len(reading.lead) == 2:  # heads of one query, or queries of own keys
        return True
    return not same and reading.query != usual.query


def read_leading(q: Tensor, keys: int, given: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], str | None]:
    """Read the axes of queries (…, Lq, D) before the last two: samples times queries are the positions given.

    Args:
        q: the queries.
        keys: their number.
        given: shapes of the first inputs of the modules that are running, the innermost last.

    Returns:
        These axes, that of the heads last; what to remark if it is not the only one that fits, else None.
    """
    shape = torch.Size((*q.shape[:-1], keys))
    readings = [*_readings(len(shape), len(shape) - 1, {len(shape) - 2})]
    fitting = _split_from_features(_fitting(readings, shape, given), q)
    remark = None if len(fitting) == 1 else MAY_BE_SWAPPED.format("samples and heads")
    return (fitting or readings)[0].lead, remark


def _fitting(readings: list[Reading], shape: torch.Size, given: Sequence[tuple[int, ...]]) -> list[Reading]:
    """Those that fit the input of the innermost module that any fits."""
    return next((fits for x in reversed(given) if (fits := [r for r in readings if _fits(r, shape, x)])), [])


def _fits(reading: Reading, shape: torch.Size, given: tuple[int, ...]) -> bool:
    """Whether samples times queries are those of (B, L), (B, L, D), (B, …, D), (B, H, L, D) or (B, L, H, D)."""
    if len(given) < 2:
        return False
    positions = {given[0] * given[1], math.prod(given[:-1]) if len(given) > 2 else 0}
    positions |= {given[0] * given[2]} if len(given) == 4 else set()
    return reading.rows(shape) in positions and (reading.in_order or shape[reading.lead[0]] == given[0])


def _split_from_features(readings: list[Reading], q: Tensor) -> list[Reading]:
    """Of readings with five axes or more those whose heads lie beside each other in memory, if there are any."""
    step = q.shape[-1] * q.stride(-1)
    if len(readings) < 2 or len(readings[0].lead) < 3 or q.ndim < len(readings[0].lead) + 2:
        return readings
    return [r for r in readings if q.shape[r.lead[-1]] > 1 and q.stride(r.lead[-1]) == step] or readings


def _heads_may_be_samples(found: "Weighted", reading: Reading, fitting: list[Reading]) -> bool:
    """Whether two axes may be swapped: no input tells them apart, and their sizes or places in memory are odd."""
    if len(reading.lead) != 2:
        return False
    if fitting and all(r.lead == reading.lead for r in fitting if r.query == reading.query):
        return False
    samples = max(1, found.given[0][0]) if found.given and found.given[0] else 1
    first, second = (found.scores.shape[d] % samples for d in reading.lead)
    return (first != 0 and second == 0) or _crossed(found, reading.lead)


def _crossed(found: "Weighted", lead: tuple[int, ...]) -> bool:
    """Whether heads hold samples in the product's batch or in memory, unlike heads split from features."""
    if found.product:
        far, near = ([p.step for p in found.product[d] if p.place == 0 <= p.origin] for d in lead)
        if far and near and max(far) < max(near):
            return True
    if found.history is None or found.history.q.ndim != 4:
        return False
    (x, y), (step_x, step_y) = found.history.q.shape[:2], found.history.q.stride()[:2]
    return x > 1 < y and step_x < step_y
