"""Which axes of scores are samples, heads, queries and keys."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from semdiag.capturing.provenance.weighted_values import WeightedProduct

MAY_BE_SWAPPED = "its {} may be swapped: which axes of its scores they are could not be told"
OWN_KEYS = "each query has keys of its own: it counts as the only query, 0, of a sample of its own"


@dataclass(frozen=True)
class AxisRoles:
    """The roles of the axes of scores."""

    lead: tuple[int, ...]  # the axes before the queries: samples, then, if there are two or more, heads
    query: int | None  # the queries' axis; None if there is none

    @property
    def in_order(self) -> bool:
        """Whether the heads' axis comes after the samples'."""
        return list(self.lead) == sorted(self.lead)

    def rows(self, shape: torch.Size) -> int:
        """Return the number of samples times queries."""
        samples = self.lead[:-1] if len(self.lead) > 1 else self.lead
        return math.prod(shape[d] for d in samples) * (1 if self.query is None else shape[self.query])


def _candidates(ndim: int, key: int, queries: set[int]) -> Iterator[AxisRoles]:
    """Yield possible roles, the most usual first: queries last, heads before them."""
    swapped = []
    for query in (*sorted(queries, reverse=True),) or (None,):
        lead = [d for d in range(ndim) if d not in (key, query)]
        yield AxisRoles(tuple(lead), query)
        swapped += [AxisRoles((*(d for d in lead if d != head), head), query) for head in lead[-2::-1]]
    yield from swapped


def read_axes(weighted: "WeightedProduct", rows: set[int]) -> tuple[AxisRoles, str | None]:
    """Assign roles to the axes of scores: samples times queries must match the running module's input."""
    shape, key = weighted.scores.shape, weighted.key
    ones = _of_one_entry(shape, key)
    candidates = [*_candidates(len(shape), key, rows | ones)]
    fitting = _fitting(candidates, shape, weighted.input_shapes)
    pool = fitting or [r for r in candidates if r.in_order and (r.query in rows or not rows)]
    same = [r for r in pool if r.query is not None and shape[r.query] == shape[key]]
    pool = same or pool
    if fitting and weighted.history is not None:
        pool = _split_from_features(pool, weighted.history.q)
    roles = pool[0]
    if not rows and len(roles.lead) > 2:
        return min(pool, key=lambda r: shape[r.lead[-1]]), OWN_KEYS
    if _several_queries(pool, ones) or (not fitting and _guessed(roles, candidates[0], bool(same))):
        return roles, MAY_BE_SWAPPED.format("queries and heads")
    if _heads_may_be_samples(weighted, roles, fitting):
        return roles, MAY_BE_SWAPPED.format("samples and heads")
    return roles, None


def _of_one_entry(shape: torch.Size, key: int) -> set[int]:
    """Return the axes of length 1 that may be the queries'."""
    return {d for d, size in enumerate(shape) if size == 1 and d != key and (d or len(shape) < 4)}


def _several_queries(pool: list[AxisRoles], ones: set[int]) -> bool:
    """Return whether candidates differ in the queries' axis; all axes of length 1 count as one."""
    return len({min(ones) if r.query in ones else r.query for r in pool}) > 1


def _guessed(roles: AxisRoles, usual: AxisRoles, same: bool) -> bool:
    """Return whether the queries' axis is a guess when no input tells; ``same``: as many queries as keys."""
    if roles.query is None and len(roles.lead) == 2:  # heads of one query, or queries with keys of their own
        return True
    return not same and roles.query != usual.query


def read_leading(q: Tensor, keys: int, given: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], str | None]:
    """Assign roles to the axes of queries (…, Lq, D) before the last two."""
    shape = torch.Size((*q.shape[:-1], keys))
    candidates = [*_candidates(len(shape), len(shape) - 1, {len(shape) - 2})]
    fitting = _split_from_features(_fitting(candidates, shape, given), q)
    remark = None if len(fitting) == 1 else MAY_BE_SWAPPED.format("samples and heads")
    return (fitting or candidates)[0].lead, remark


def _fitting(candidates: list[AxisRoles], shape: torch.Size, given: Sequence[tuple[int, ...]]) -> list[AxisRoles]:
    """Return the candidates that fit the input of the innermost module that any of them fits."""
    return next((fits for x in reversed(given) if (fits := [r for r in candidates if _fits(r, shape, x)])), [])


def _fits(roles: AxisRoles, shape: torch.Size, given: tuple[int, ...]) -> bool:
    """Return whether samples × queries match (B, L), (B, L, D), (B, …, D), (B, H, L, D) or (B, L, H, D)."""
    if len(given) < 2:
        return False
    positions = {given[0] * given[1], math.prod(given[:-1]) if len(given) > 2 else 0}
    positions |= {given[0] * given[2]} if len(given) == 4 else set()
    return roles.rows(shape) in positions and (roles.in_order or shape[roles.lead[0]] == given[0])


def _split_from_features(candidates: list[AxisRoles], q: Tensor) -> list[AxisRoles]:
    """Return the candidates whose heads are adjacent in memory, if any; all with fewer than five axes."""
    step = q.shape[-1] * q.stride(-1)
    if len(candidates) < 2 or len(candidates[0].lead) < 3 or q.ndim < len(candidates[0].lead) + 2:
        return candidates
    return [r for r in candidates if q.shape[r.lead[-1]] > 1 and q.stride(r.lead[-1]) == step] or candidates


def _heads_may_be_samples(weighted: "WeightedProduct", roles: AxisRoles, fitting: list[AxisRoles]) -> bool:
    """Return whether samples and heads may be swapped: no input tells, and sizes or strides are odd."""
    if len(roles.lead) != 2:
        return False
    if fitting and all(r.lead == roles.lead for r in fitting if r.query == roles.query):
        return False
    samples = max(1, weighted.input_shapes[0][0]) if weighted.input_shapes and weighted.input_shapes[0] else 1
    first, second = (weighted.scores.shape[d] % samples for d in roles.lead)
    return (first != 0 and second == 0) or _crossed(weighted, roles.lead)


def _crossed(weighted: "WeightedProduct", lead: tuple[int, ...]) -> bool:
    """Return whether heads vary more slowly than samples, unlike heads that are split from features."""
    if weighted.product:
        far, near = ([p.step for p in weighted.product[d] if p.axis == 0 <= p.origin] for d in lead)
        if far and near and max(far) < max(near):
            return True
    if weighted.history is None or weighted.history.q.ndim != 4:
        return False
    (x, y), (step_x, step_y) = weighted.history.q.shape[:2], weighted.history.q.stride()[:2]
    return x > 1 < y and step_x < step_y
