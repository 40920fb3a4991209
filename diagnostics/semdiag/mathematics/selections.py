"""Sets of chosen keys: whether they hold the largest scores, by how much, and how far two sets agree."""

from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.rounding import NumberFormat, may_swap, rounded
from semdiag.mathematics.score_strips import as_mask
from semdiag_files import InputError


@dataclass(frozen=True)
class AllowedKeys:
    """The keys that each row may choose: positions j with ``first`` ≤ j < ``end``."""

    first: Tensor  # int64 (rows,), first allowed key
    end: Tensor  # int64 (rows,), position after the last allowed key
    position: Tensor | None  # int64 (rows,), position of the row's query among the keys; None if not needed
    counts: Tensor  # bool (rows,), False for the rows of padded queries


def allowed_keys(
    rows: tuple[int, ...],
    keys: int,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    documents: Tensor | None = None,
    causal: bool = False,
) -> AllowedKeys:
    """Return the keys that each row may choose; an InputError says that the arguments do not fit together.

    The valid keys of a sequence are starts ≤ j < starts + lengths. With ``causal`` or ``documents``, query i of q
    is at position n − q + i of n keys; if there are fewer queries than keys, and lengths are known, at starts +
    lengths − q + i. A query at a padded position does not count.

    Args:
        rows: sizes of the dimensions before the keys, the queries' last.
        keys: number of keys n.
        lengths: int64, number of valid keys of each sequence: one number; one per entry of the first dimension; or
            as many dimensions as ``rows``, each of the same size or 1. None means all keys.
        starts: position of the first valid key, in the same form. None means 0.
        documents: int64 (n,), or (batch, n) with the first of ``rows`` as the batch: document of each token,
            negative for padding; the tokens of a document are contiguous.
        causal: whether to exclude the keys after the query.

    Example:
        >>> allowed_keys((3,), 4, causal=True).end.tolist()  # the last three of four tokens
        [2, 3, 4]
    """
    first = torch.zeros(rows, dtype=torch.int64) if starts is None else _spread(starts, rows, "starts")
    end = torch.full(rows, keys) if lengths is None else first + _spread(lengths, rows, "lengths")
    if bool(((first < 0) | (end < first) | (end > keys)).any()):
        raise InputError(
            f"lengths and starts must lie within the {keys:,} keys of a row. Got valid keys from "
            f"{int(first.min())} up to {int(end.max())}: do the scores belong to the same tokens?"
        )
    if not causal and documents is None:
        return AllowedKeys(first.flatten(), end.flatten(), None, torch.ones(end.numel(), dtype=torch.bool))
    place = _places(rows, keys, end if lengths is not None else None)
    counts = (place >= first) & (place < end)
    if documents is not None:
        begin, stop = _documents(documents, rows, keys, place.clamp(0, keys - 1))
        counts &= stop > begin
        first = torch.maximum(first, begin)
        end = torch.minimum(end, stop)
    if causal:
        end = torch.minimum(end, place + 1)
    end = torch.maximum(first, end)
    return AllowedKeys(*(each.expand(rows).flatten() for each in (first, end, place, counts)))


def _spread(numbers: Tensor, rows: tuple[int, ...], name: str) -> Tensor:
    shape = tuple(numbers.shape)
    if numbers.numel() == 1:
        return numbers.reshape(()).expand(rows)
    if shape == rows[:1]:
        numbers = numbers.reshape(-1, *(1 for _ in rows[1:]))
    if numbers.ndim != len(rows) or any(n not in (1, size) for n, size in zip(numbers.shape, rows, strict=True)):
        raise InputError(
            f"{name} of shape {shape} do not fit rows of shape {rows}: give one number, one for each of the first "
            f"dimension, or {len(rows)} dimensions of the same sizes or 1."
        )
    return numbers.expand(rows)


def _places(rows: tuple[int, ...], keys: int, end: Tensor | None) -> Tensor:
    queries = rows[-1]
    if queries > keys:
        raise InputError(
            f"With a causal or document rule the queries are the last of the keys' tokens, but there are "
            f"{queries:,} queries and {keys:,} keys. The last dimension before the keys must be the query's."
        )
    last = torch.full(rows, keys) if end is None or queries == keys else end
    if bool((last != last[..., :1]).any()):
        raise InputError(
            "lengths differ between the queries of a sequence, so they already say which keys a query may choose. "
            "Leave out the causal and the document rule."
        )
    return last - queries + torch.arange(queries)


def _documents(documents: Tensor, rows: tuple[int, ...], keys: int, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first key and the end of each query's document; nothing for padding."""
    if tuple(documents.shape) not in ((keys,), (rows[0], keys)):
        raise InputError(
            f"documents must name the document of each of the {keys:,} keys to which it belongs, ({keys},) or "
            f"({rows[0]}, {keys}). Got shape {tuple(documents.shape)}."
        )
    table = documents.reshape(-1, keys)
    new = torch.ones_like(table, dtype=torch.bool)
    new[:, 1:] = table[:, 1:] != table[:, :-1]
    for documents_of_row, begins in zip(table, new, strict=True):
        runs = documents_of_row[begins & (documents_of_row >= 0)]
        if runs.unique().numel() != runs.numel():
            raise InputError("The tokens of a document must be contiguous, but those of one are not.")
    at = torch.arange(keys).expand_as(table)
    begin = torch.where(new, at, 0).cummax(1).values
    closing = torch.cat([new[:, 1:], torch.ones_like(new[:, :1])], 1)
    stop = torch.where(closing, at + 1, keys).flip(1).cummin(1).values.flip(1)
    stop = torch.where(table < 0, begin, stop)
    batch = torch.arange(rows[0]).reshape(-1, *(1 for _ in rows[1:])) if documents.ndim == 2 else torch.tensor(0)
    return begin[batch, place], stop[batch, place]


CLASSES = (
    "exact", "legal_tie", "within_rounding", "within_error", "wrong", "duplicate", "out_of_range", "future",
    "padding", "missing",
)  # fmt: skip
NOT_JUDGED = "not_judged"  # the keys are valid, but there are no scores
GRAVITY = (
    NOT_JUDGED, "exact", "legal_tie", "within_rounding", "within_error", "wrong", "missing", "duplicate",
    "padding", "future", "out_of_range",
)  # fmt: skip
FAULTS = frozenset(GRAVITY[5:])
_GRADE = {name: grade for grade, name in enumerate(GRAVITY)}
_HELD = 2**19  # scores processed at once: few enough for a CPU cache


@torch.no_grad()
def judge_rows(
    scores: Tensor | None,
    indices: Tensor,
    keys: int,
    allowed: AllowedKeys,
    kind: NumberFormat,
    engines: int = 1,
    error: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, for each row that counts, a grade, its worst chosen and k-th scores, and its best dropped score.

    A row is right if no dropped key scores above the worst chosen one. Grades are indices into ``GRAVITY``, int8;
    scores are float64, NaN where nothing was chosen or dropped. NaN for an allowed key is an InputError.

    Source: docs/theory.md#rounded-scores; not in the paper. Deviation: none.

    Args:
        scores: (rows, n), floating point; None if unknown.
        indices: (rows, k), integers of any dtype, -1 for none.
        keys: number of keys n.
        allowed: keys that each row may choose.
        kind: format to which the engine rounded these scores before it chose.
        engines: 1 if the engine chose by these scores, 2 if another engine rounded them.
        error: (rows, n) ≥ 0, largest distance of recomputed scores from the engine's; None if these are its own.
    """
    picked = allowed.counts.nonzero().squeeze(1)
    width = indices.shape[1] if scores is None else keys + 1
    every = picked.numel() == len(indices)
    per_part = max(1, _HELD // width)
    columns: tuple[list[Tensor], ...] = ([], [], [], [])
    room = None
    for start in range(0, picked.numel(), per_part):
        at: slice | Tensor = slice(start, start + per_part) if every else picked[start : start + per_part]
        places = indices[at].long()  # a number too large for int64 is out of range anyway
        places = places.where(places >= 0, keys) if indices.dtype == torch.uint64 else places
        part = _Part(
            None if scores is None else scores[at], places, keys,
            allowed.first[at, None].to(indices.device), allowed.end[at, None].to(indices.device),
            None if allowed.position is None else allowed.position[at, None].to(indices.device),
            picked[start : start + per_part],
        )  # fmt: skip
        if room is None and part.scores is not None:
            room = part.room(per_part)
        part.error = None if error is None else error[at]
        judged = part.by_keys() if room is None else part.by_scores(room, kind, engines)
        for column, values in zip(columns, judged, strict=True):
            column.append(values)
    grade, worst, kth, left = (torch.cat(column) for column in columns)
    return grade, worst, kth, left


@dataclass
class _Part:
    """Consecutive rows; allowed keys are ``first`` ≤ j < ``end``."""

    scores: Tensor | None
    indices: Tensor
    keys: int
    first: Tensor
    end: Tensor
    position: Tensor | None
    numbers: Tensor  # of the rows
    error: Tensor | None = None

    def room(self, rows: int) -> Tensor:
        double = self.scores is not None and self.scores.dtype == torch.float64
        kind = torch.float64 if double or self.indices.shape[1] > 2**24 else torch.float32
        return torch.empty(rows, self.keys + 1, dtype=kind, device=self.indices.device)

    def by_keys(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        valid = (self.indices >= self.first) & (self.indices < self.end)
        ordered = self.indices.masked_fill(~valid, -1).sort(1).values
        again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        grade = self._keys_alone(valid, again, valid.sum(1) - again.sum(1)).cpu()
        none = torch.full((len(grade),), torch.nan, dtype=torch.float64)
        return grade, none, none, none

    def by_scores(self, room: Tensor, kind: NumberFormat, engines: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, k = self.indices.shape
        assert self.scores is not None
        table = room[:rows]  # with +inf in the extra column
        table[:, : self.keys].copy_(self.scores)
        table[:, self.keys] = torch.inf
        self._mask_(table[:, : self.keys], self.first, self.end)
        inside = (self.indices >= self.first) & (self.indices < self.end)
        valid = None if bool(inside.all()) else inside
        slots = self.indices if valid is None else self.indices.where(valid, self.keys)
        chosen = table.gather(1, slots)
        order = torch.arange(k, dtype=table.dtype, device=table.device).expand(rows, k)
        again = table.scatter_(1, slots, order).gather(1, slots) != order  # a repeated key keeps its last slot
        if valid is not None:
            again &= valid
        number = (k if valid is None else valid.sum(1)) - again.sum(1)
        grade = self._keys_alone(valid, again, number).cpu()
        table.scatter_(1, slots, table.new_tensor(-torch.inf).expand(rows, k))
        worst = chosen.amin(1).cpu().double()
        left = table[:, : self.keys].amax(1).cpu().double()
        if len(unknown := (worst.isnan() | left.isnan()).nonzero()):
            row = int(self.numbers[unknown[0]])
            raise InputError(
                f"The scores of row {row} hold NaN, which is neither larger nor smaller than another score."
            )
        number = number.cpu()
        free = (self.end - self.first).squeeze(1).cpu()
        worst = worst.where(number > 0, torch.nan)
        left = left.where(free > number, torch.nan)
        kth = self._kth(grade, number, worst, left)
        self._by_scores(grade, worst, left, kind, engines)
        return grade, worst, kth, left

    def _again(self, at: Tensor) -> Tensor:
        """Return the scores of some rows, with -inf for keys that are not allowed."""
        assert self.scores is not None
        dtype = self.scores.dtype
        words = self.scores.view(torch.uint8) if dtype.itemsize == 1 else self.scores  # for torch 2.7
        scores = words[at].view(dtype).to(torch.float64 if dtype == torch.float64 else torch.float32)
        self._mask_(scores, self.first[at], self.end[at])
        return scores

    def _within_error(self, at: Tensor) -> Tensor:
        """Return which of these rows chose a top-k of some scores within the error."""
        assert self.scores is not None
        assert self.error is not None
        rows = at.to(self.scores.device)
        scores = self._again(rows).double()
        error = self.error[rows].to(self.scores.device, torch.float64)
        chosen = as_mask(self.indices[rows], self.keys)
        lowest = (scores + error).masked_fill(~chosen, torch.inf).amin(1)
        return (lowest >= (scores - error).masked_fill(chosen, -torch.inf).amax(1)).cpu()

    def _mask_(self, scores: Tensor, first: Tensor, end: Tensor) -> None:
        if bool((first > 0).any()) or bool((end < self.keys).any()):
            at = torch.arange(self.keys, device=scores.device)
            scores.masked_fill_((at < first) | (at >= end), -torch.inf)

    def _keys_alone(self, valid: Tensor | None, again: Tensor, number: Tensor) -> Tensor:
        """Return grades by the keys alone, which show only invalid and repeated keys."""
        k = self.indices.shape[1]
        grade = torch.zeros(len(self.indices), dtype=torch.int8, device=self.indices.device)
        needed = (self.end - self.first).squeeze(1).clamp(max=k)
        grade[number < needed] = _GRADE["missing"]
        grade[again.any(1)] = _GRADE["duplicate"]
        if valid is None:
            return grade
        inside = (self.indices >= 0) & (self.indices < self.keys)
        late = inside & (self.indices > self.position) if self.position is not None else torch.zeros_like(inside)
        grade[(inside & ~valid & ~late).any(1)] = _GRADE["padding"]
        grade[late.any(1)] = _GRADE["future"]
        grade[(~inside & (self.indices != -1)).any(1)] = _GRADE["out_of_range"]
        return grade

    def _kth(self, grade: Tensor, number: Tensor, worst: Tensor, left: Tensor) -> Tensor:
        """Return the k-th scores; a key with score -inf, which masks write, does not count as missing."""
        assert self.scores is not None
        k = self.indices.shape[1]
        needed = (self.end - self.first).squeeze(1).clamp(max=k).cpu()
        kth = worst.clone()
        rows = ((left > worst) | (number != needed)).nonzero().squeeze(1)
        if not rows.numel():
            return kth
        largest = self._again(rows.to(self.scores.device)).topk(min(k, self.keys), 1).values.cpu().double()
        needed_here = needed[rows]
        last = largest.gather(1, (needed_here - 1).clamp(min=0)[:, None]).squeeze(1)
        kth[rows] = last.where(needed_here > 0, torch.nan)
        present = (largest > -torch.inf).sum(1)
        excused = (grade[rows] == _GRADE["missing"]) & (number[rows] >= torch.minimum(needed_here, present))
        grade[rows[excused]] = 0
        return kth

    def _by_scores(self, grade: Tensor, worst: Tensor, left: Tensor, kind: NumberFormat, engines: int) -> None:
        fine = grade == 0
        grade[fine] = _GRADE["exact"]
        grade[fine & (left == worst)] = _GRADE["legal_tie"]
        at = (fine & (left > worst)).nonzero().squeeze(1)
        explained = "within_rounding" if self.error is None else "within_error"
        if self.error is not None:
            fine = self._within_error(at)
        elif engines == 1:
            fine = _rounds_together(worst[at], left[at], kind)
        else:
            fine = may_swap(worst[at], left[at], kind, engines)
        grade[at] = torch.where(fine, _GRADE[explained], _GRADE["wrong"]).to(torch.int8)


def _rounds_together(lower: Tensor, higher: Tensor, kind: NumberFormat) -> Tensor:
    """Return whether the lower of two scores, rounded once to a format, is not below the higher one."""
    lower = lower.double()
    higher = higher.double()
    beyond = (lower >= kind.overflow) | (higher <= -kind.overflow)
    finite = lower.isfinite() & higher.isfinite()
    return (lower == higher) | beyond | finite & (rounded(lower, kind) >= rounded(higher, kind))


def without_repeats(indices: Tensor) -> Tensor:
    """Replace repeated and negative indices in each row of (rows, k) by -1."""
    ordered, places = indices.sort(dim=1, stable=True)
    again = torch.zeros_like(indices, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return indices.masked_fill(torch.zeros_like(again).scatter_(1, places, again) | (indices < 0), -1)


def _places_in(first: Tensor, second: Tensor) -> Tensor:
    """Return the position of each key among the other row's distinct keys, -1 if it is absent or negative."""
    ordered, places = second.sort(dim=1)
    at = torch.searchsorted(ordered.contiguous(), first.contiguous()).clamp(max=second.shape[1] - 1)
    return places.gather(1, at).where((ordered.gather(1, at) == first) & (first >= 0), -1)


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Return the overlap in [0, 1] of each row's two sets of keys, float64.

    Formula: |A ∩ B| / max(|A|, |B|), 1 if both are empty; int64 (rows, k), distinct in a row, -1 for none.

    Example:
        >>> overlaps(torch.tensor([[4, 2]]), torch.tensor([[7, 4]])).tolist()
        [0.5]
    """
    number = (_places_in(first, second) >= 0).sum(1)
    larger = torch.maximum((first >= 0).sum(1), (second >= 0).sum(1))
    return torch.where(larger > 0, number.double() / larger, 1.0)


def lacking(first: Tensor, second: Tensor) -> Tensor:
    """Return which keys of the first sets the second ones lack, bool (rows, k); sets as of :func:`overlaps`.

    Example:
        >>> lacking(torch.tensor([[4, 2, -1]]), torch.tensor([[7, 4, 1]])).tolist()
        [[False, True, False]]
    """
    return (_places_in(first, second) < 0) & (first >= 0)


def weight_lost(first: Tensor, second: Tensor, weights: Tensor) -> Tensor:
    r"""Return the share of A's weight on keys outside B, (rows,).

    Formula: Σ_{A \ B} w_j / Σ_A w_j; NaN where A has no weight. A and B as of :func:`overlaps`, w ≥ 0 (rows, k).

    Example:
        >>> weight_lost(torch.tensor([[4, 2]]), torch.tensor([[7, 4]]), torch.tensor([[3.0, 1.0]])).tolist()
        [0.25]
    """
    of_set = weights.double().masked_fill(first < 0, 0)
    return of_set.masked_fill(~lacking(first, second), 0).sum(1) / of_set.sum(1)


@torch.no_grad()
def margins(scores: Tensor, k: int, kind: NumberFormat) -> tuple[Tensor, Tensor]:
    """Return the margin of each row's top-k, float64 (rows,), and whether it is certified, bool (rows,).

    Formula: Δ = z_(k) − z_(k+1), scores in descending order. Certified: Δ > u(|z_(k)| + |z_(k+1)|) + 2η, u = 2^−p
    and η half the format's smallest subnormal: the same k keys are largest after each score is rounded. A row that
    drops no key with a finite score, or keeps only infinite ones, has the margin +∞, and is certified. Scores
    (rows, n) are not NaN; -inf, or less than half the lowest number of their dtype, where a mask forbids the key.

    Source: docs/theory.md#rounded-scores; not in the paper. Deviation: none.

    Example:
        >>> from semdiag.mathematics.rounding import FORMATS
        >>> rows = torch.tensor([[3.0, 1.0, 2.0], [3.0, 2.0, 2.001], [3.0, 2.0, -torch.inf]])
        >>> margins(rows, 2, FORMATS["bfloat16"])[1].tolist()
        [True, False, True]
    """
    endless = torch.full((len(scores),), torch.inf, dtype=torch.float64, device=scores.device)
    if k >= scores.shape[1]:
        return endless, torch.ones_like(endless, dtype=torch.bool)
    largest = scores.topk(k + 1, 1).values
    forbidden = largest[:, k] <= torch.finfo(scores.dtype).min / 2
    last = largest[:, k - 1].double()
    after = largest[:, k].double()
    idle = forbidden | ((last == torch.inf) & (after < torch.inf))
    margin = torch.where(last == after, 0.0, last - after)
    return torch.where(idle, endless, margin), idle | ~may_swap(after, last, kind)
