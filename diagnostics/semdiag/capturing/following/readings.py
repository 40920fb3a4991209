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
    shape, key, given = found.scores.shape, found.key, found.given
    ones = {d for d in range(len(shape)) if shape[d] == 1 and d != key and (d or len(shape) < 4)}
    readings = [*_readings(len(shape), key, rows | ones)]
    usual = [r for r in readings if [*r.lead] == sorted(r.lead)]
    fitting = next((fits for x in reversed(given) if (fits := [r for r in readings if _fits(r, shape, x)])), [])
    pool = fitting or [r for r in usual if r.query in rows or not rows]
    same = [r for r in pool if r.query is not None and shape[r.query] == shape[key]]
    pool = same or pool
    if fitting and found.history is not None:
        pool = _split_from_features(pool, found.history.q)
    if not rows and len(pool[0].lead) > 2:
        return min(pool, key=lambda r: shape[r.lead[-1]]), OWN_KEYS
    reading = pool[0]
    if (
        reading.query is None and len(reading.lead) == 2 and not fitting
    ):  # heads of one query, or queries of own keys
        return reading, MAY_BE_SWAPPED.format("queries and heads")
    if len({r.query for r in pool if r.query not in ones}) + any(r.query in ones for r in pool) > 1 or (
        not (fitting or same) and reading.query != usual[0].query
    ):
        return reading, MAY_BE_SWAPPED.format("queries and heads")
    told = fitting and all([*r.lead] == [*reading.lead] for r in fitting if r.query == reading.query)
    samples = max(1, given[0][0]) if given and given[0] else 1
    odd = [d for d in reading.lead[:2] if shape[d] % samples] == [*reading.lead[:1]] and len(reading.lead) == 2
    if not told and (odd or _crossed(found, reading)):
        return reading, MAY_BE_SWAPPED.format("samples and heads")
    return reading, None


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
    fitting = next((fits for x in reversed(given) if (fits := [r for r in readings if _fits(r, shape, x)])), [])
    fitting = _split_from_features(fitting, q)
    remark = None if len(fitting) == 1 else MAY_BE_SWAPPED.format("samples and heads")
    return (fitting or readings)[0].lead, remark


def _fits(reading: Reading, shape: torch.Size, given: tuple[int, ...]) -> bool:
    """Whether samples times queries are those of (B, L), (B, L, D), (B, …, D), (B, H, L, D) or (B, L, H, D)."""
    if len(given) < 2:
        return False
    positions = {given[0] * given[1], math.prod(given[:-1]) if len(given) > 2 else 0}
    positions |= {given[0] * given[2]} if len(given) == 4 else set()
    usual = [*reading.lead] == sorted(reading.lead)
    return reading.rows(shape) in positions and (usual or shape[reading.lead[0]] == given[0])


def _split_from_features(readings: list[Reading], q: Tensor) -> list[Reading]:
    """Of readings with five axes or more those whose heads lie beside each other in memory, if there are any."""
    step = q.shape[-1] * q.stride(-1)
    if len(readings) < 2 or len(readings[0].lead) < 3 or q.ndim < len(readings[0].lead) + 2:
        return readings
    return [r for r in readings if q.shape[r.lead[-1]] > 1 and q.stride(r.lead[-1]) == step] or readings


def _crossed(found: "Weighted", reading: Reading) -> bool:
    """Whether heads hold samples in the product's batch or in memory, unlike heads split from features."""
    if len(reading.lead) != 2:
        return False
    steps = (
        [[p.step for p in found.product[d] if p.place == 0 <= p.origin] for d in reading.lead]
        if found.product
        else []
    )
    if all(steps) and steps and max(steps[0]) < max(steps[1]):
        return True
    if found.history is None or found.history.q.ndim != 4:
        return False
    (x, y), (far, near) = found.history.q.shape[:2], found.history.q.stride()[:2]
    return x > 1 < y and far < near
