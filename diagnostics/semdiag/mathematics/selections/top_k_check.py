"""Check row by row whether the chosen keys have the largest scores, without sorting."""

from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.selections.allowed_keys import AllowedKeys
from semdiag.mathematics.selections.number_formats import NumberFormat, may_swap
from semdiag.mathematics.selections.rounded_operands import rounded
from semdiag_models import InputError

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
    """Return, for each row that counts, a grade, its worst chosen and k-th scores, and the best score left out.

    A row is right if no key that was left out has a larger score than the worst chosen one: one pass over the
    scores, without sorting. The k-th score is computed only for rows that are not right.

    Source: docs/theory.md#rounded-scores; not in the paper. Deviation: none.

    Args:
        scores: (rows, n), floating point; None if unknown.
        indices: (rows, k), integers of any dtype, -1 for none.
        keys: n.
        allowed: which keys each row may choose.
        kind: the format to which the engine rounded these scores before it chose.
        engines: 1 if it chose by these scores, 2 if another engine rounded them, see
            :func:`~semdiag.mathematics.selections.number_formats.may_swap`.
        error: (rows, n) ≥ 0, how far each score may be from the engine's; then these were recomputed, and not
            rounded. None: the engine chose by these scores.

    Returns:
        Grades (indices into ``GRAVITY``, int8) and three float64 tensors, one entry per row that counts. A score
        is NaN if there is none: nothing chosen, or nothing left out.

    Raises:
        InputError: if the score of an allowed key is NaN.
    """
    picked = allowed.counts.nonzero().squeeze(1)
    width = indices.shape[1] if scores is None else keys + 1
    every, per_part = picked.numel() == len(indices), max(1, _HELD // width)
    found: tuple[list[Tensor], ...] = ([], [], [], [])
    room = None
    for start in range(0, picked.numel(), per_part):
        own: slice | Tensor = slice(start, start + per_part) if every else picked[start : start + per_part]
        part = _Part(
            None if scores is None else scores[own], _places(indices[own], keys), keys,
            allowed.first[own, None].to(indices.device), allowed.end[own, None].to(indices.device),
            None if allowed.position is None else allowed.position[own, None].to(indices.device),
        )  # fmt: skip
        if room is None and part.scores is not None:
            room = part.room(per_part)
        part.error = None if error is None else error[own]
        try:
            judged = part.by_keys() if room is None else part.by_scores(room, kind, engines)
            for column, values in zip(found, judged, strict=True):
                column.append(values)
        except _NotANumberError as error:
            raise InputError(
                f"The scores of row {int(picked[start + error.row])} hold NaN, which is neither larger nor "
                "smaller than another score."
            ) from None
    grade, *numbers = (torch.cat(column) for column in found)
    return grade, numbers[0], numbers[1], numbers[2]


def _places(indices: Tensor, keys: int) -> Tensor:
    """Convert indices to int64; numbers too large for it are out of range anyway."""
    places = indices.long()
    return places.where(places >= 0, keys) if indices.dtype == torch.uint64 else places


class _NotANumberError(Exception):
    """Raised if a row of a part contains NaN."""

    def __init__(self, row: int) -> None:
        self.row = row


@dataclass
class _Part:
    """Some rows; allowed keys are ``first`` ≤ j < ``end``."""

    scores: Tensor | None
    indices: Tensor
    keys: int
    first: Tensor
    end: Tensor
    position: Tensor | None
    error: Tensor | None = None

    def room(self, rows: int) -> Tensor:
        """Return memory for the scores of a part, with an extra column for invalid keys."""
        double = self.scores is not None and self.scores.dtype == torch.float64
        wide = double or self.indices.shape[1] > 2**24
        kind = torch.float64 if wide else torch.float32
        return torch.empty(rows, self.keys + 1, dtype=kind, device=self.indices.device)

    def by_keys(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the result of :func:`judge_rows` without scores."""
        valid = (self.indices >= self.first) & (self.indices < self.end)
        ordered = self.indices.masked_fill(~valid, -1).sort(1).values
        again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        grade = self._keys_alone(valid, again, valid.sum(1) - again.sum(1)).cpu()
        none = torch.full((len(grade),), torch.nan, dtype=torch.float64)
        return grade, none, none, none

    def by_scores(self, room: Tensor, kind: NumberFormat, engines: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the result of :func:`judge_rows` with scores."""
        rows, k = self.indices.shape
        table = self._filled(room[:rows])
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
        worst, left = chosen.amin(1).cpu().double(), table[:, : self.keys].amax(1).cpu().double()
        unknown = worst.isnan() | left.isnan()
        if bool(unknown.any()):
            raise _NotANumberError(int(unknown.nonzero()[0]))
        number, free = number.cpu(), (self.end - self.first).squeeze(1).cpu()
        worst = worst.where(number > 0, torch.nan)
        left = left.where(free > number, torch.nan)
        kth = self._kth(grade, number, worst, left)
        self._by_scores(grade, worst, left, kind, engines)
        return grade, worst, kth, left

    def _again(self, own: Tensor) -> Tensor:
        """Return the scores of some rows, -inf for keys that are not allowed."""
        assert self.scores is not None
        dtype = self.scores.dtype
        words = self.scores.view(torch.uint8) if dtype.itemsize == 1 else self.scores  # for torch 2.7
        scores = words[own].view(dtype).to(torch.float64 if dtype == torch.float64 else torch.float32)
        self._mask_(scores, self.first[own], self.end[own])
        return scores

    def _within_error(self, at: Tensor) -> Tensor:
        """Return which rows, at these places, choose a top-k of some scores within the error."""
        assert self.scores is not None
        assert self.error is not None
        own = at.to(self.scores.device)
        scores, error = self._again(own).double(), self.error[own].to(self.scores.device, torch.float64)
        marked = torch.zeros(len(own), self.keys + 1, dtype=torch.bool, device=scores.device)
        slots = self.indices[own]
        chosen = marked.scatter_(1, slots.where(slots >= 0, self.keys), True)[:, : self.keys]
        lowest = (scores + error).masked_fill(~chosen, torch.inf).amin(1)
        return (lowest >= (scores - error).masked_fill(chosen, -torch.inf).amax(1)).cpu()

    def _filled(self, table: Tensor) -> Tensor:
        """Return the scores, -inf for keys that are not allowed, +inf in the extra column."""
        assert self.scores is not None
        table[:, : self.keys].copy_(self.scores)
        table[:, self.keys] = torch.inf
        self._mask_(table[:, : self.keys], self.first, self.end)
        return table

    def _mask_(self, scores: Tensor, first: Tensor, end: Tensor) -> None:
        if bool((first > 0).any()) or bool((end < self.keys).any()):
            at = torch.arange(self.keys, device=scores.device)
            scores.masked_fill_((at < first) | (at >= end), -torch.inf)

    def _keys_alone(self, valid: Tensor | None, again: Tensor, number: Tensor) -> Tensor:
        """Return grades by the keys alone: without scores, only faults of the keys can be seen."""
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
        """Return the k-th scores. Keys with score -inf, which masks write, do not count as missing."""
        assert self.scores is not None
        k = self.indices.shape[1]
        needed = (self.end - self.first).squeeze(1).clamp(max=k).cpu()
        kth = worst.clone()
        others = ((left > worst) | (number != needed)).nonzero().squeeze(1)
        if not others.numel():
            return kth
        largest = self._again(others.to(self.scores.device)).topk(min(k, self.keys), 1).values.cpu().double()
        wanted = needed[others]
        last = largest.gather(1, (wanted - 1).clamp(min=0)[:, None]).squeeze(1)
        kth[others] = last.where(wanted > 0, torch.nan)
        present = (largest > -torch.inf).sum(1)
        excused = (grade[others] == _GRADE["missing"]) & (number[others] >= torch.minimum(wanted, present))
        grade[others[excused]] = 0
        return kth

    def _by_scores(self, grade: Tensor, worst: Tensor, left: Tensor, kind: NumberFormat, engines: int) -> None:
        """Grade the rows whose keys are valid."""
        fine = grade == 0
        grade[fine] = _GRADE["exact"]
        grade[fine & (left == worst)] = _GRADE["legal_tie"]
        behind = fine & (left > worst)
        at = behind.nonzero().squeeze(1)
        explained = "within_rounding" if self.error is None else "within_error"
        if self.error is not None:
            fine = self._within_error(at)
        elif engines == 1:
            fine = rounds_together(worst[at], left[at], kind)
        else:
            fine = may_swap(worst[at], left[at], kind, engines)
        grade[at] = torch.where(fine, _GRADE[explained], _GRADE["wrong"]).to(torch.int8)


def rounds_together(lower: Tensor, higher: Tensor, kind: NumberFormat) -> Tensor:
    """Return whether the lower of two scores, rounded once to a format, is not below the higher one.

    Formula: fl(l) ≥ fl(h), to nearest, ties to even. As fl never falls, l and h may stand for the least chosen and
    the best dropped score. A number beyond the largest finite one counts as it, or as infinite.

    Source: docs/theory.md#rounded-scores; not in the paper. Deviation: none.

    Args:
        lower: scores (...), not NaN.
        higher: scores (...) that are not smaller.
        kind: the format to which the engine rounded them before it chose.

    Example:
        >>> from semdiag.mathematics.selections.number_formats import FORMATS
        >>> one = torch.tensor([1.0, 1.0])
        >>> rounds_together(one, one + torch.tensor([2**-9, 2**-7]), FORMATS["bfloat16"]).tolist()
        [True, False]
    """
    lower, higher = lower.double(), higher.double()
    beyond = (lower >= kind.overflow) | (higher <= -kind.overflow)
    finite = lower.isfinite() & higher.isfinite()
    return (lower == higher) | beyond | finite & (rounded(lower, kind) >= rounded(higher, kind))
