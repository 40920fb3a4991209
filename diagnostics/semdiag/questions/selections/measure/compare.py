"""Do two engines choose alike?"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from semdiag.mathematics.selections.agreement import overlaps, weight_lost, without_repeats
from semdiag.mathematics.selections.allowed_keys import allowed_keys
from semdiag.mathematics.selections.number_formats import NumberFormat, number_format
from semdiag.mathematics.selections.top_k_check import FAULTS, GRAVITY, judge_rows
from semdiag.questions.selections.measure.files import SelectionFile
from semdiag.questions.selections.measure.layout import LaidOut, lay_out
from semdiag_models import InputError

_OTHER_TOKENS = "Are they of another tokenisation, or is one of them padded? Then give its lengths. "
SAME, NUMERIC, BUG, UNEXPLAINED = "same", "numeric", "bug", "unexplained"


@dataclass(frozen=True, eq=False)
class ComparedSelections:
    """What :func:`compare_selections` found."""

    rows: pd.DataFrame
    tokens: int  # of each selection
    k: int  # keys that a row chooses
    format: str  # of the engines' scores
    repeats: tuple[int, int]  # how many rows of A and of B name a key twice; it counts once
    weight_of: str  # from which file's weights or scores the lost weight is; empty: unknown
    by_own_scores: int | None
    layouts: tuple[str, str]  # of A and B, as they were named or guessed
    ignored: tuple[str, ...]  # names of arrays that were not looked at


def compare_selections(
    first: SelectionFile,
    second: SelectionFile,
    format: str = "float32",
    layouts: tuple[str, str] = ("", ""),
) -> ComparedSelections:
    """Compare the keys that two engines chose for the same rows, as sets."""
    kind = number_format(format)
    a, b = lay_out(first, layouts[0]), lay_out(second, layouts[1])
    _check_alike(a, b)
    sets = [without_repeats(each.indices.flatten(0, 1)).reshape(each.indices.shape) for each in (a, b)]
    repeats = [
        int(((of_a != each.indices) & (each.indices >= 0)).any(2).sum())
        for of_a, each in zip(sets, (a, b), strict=True)
    ]
    pair = _rows(a, sets[0]), _rows(b, sets[1])
    rows = _table(*pair, kind)
    return ComparedSelections(
        rows, len(a.indices), a.indices.shape[-1], kind.name, (repeats[0], repeats[1]),
        _weight_of(a, b), _by_own_scores(*pair, torch.from_numpy(rows["class"].to_numpy() == BUG), kind),
        (a.layout, b.layout), tuple(dict.fromkeys((*first.ignored, *second.ignored))),
    )  # fmt: skip


def _check_alike(a: LaidOut, b: LaidOut) -> None:
    """Refuse selections that are not of the same rows."""
    where = f"{a.file.path} and {b.file.path}"
    pairs = (
        ("k", a.indices.shape[-1], b.indices.shape[-1], ""),
        ("tokens", len(a.indices), len(b.indices), _OTHER_TOKENS),
        ("layers", a.layers, b.layers, ""),
        ("heads", a.heads, b.heads, ""),
        ("types of indices", a.kind, b.kind, "Save both in one type. "),
    )  # fmt: skip
    for what, of_a, of_b, advice in pairs:
        if of_a != of_b:
            raise InputError(
                f"{where} differ in {what}: {of_a} and {of_b}. {advice}Name other orders of dimensions with "
                "--layout."
            )
    for what in ("scores", "weights"):
        of_a, of_b = getattr(a.file, what), getattr(b.file, what)
        if of_a is not None and of_b is not None and of_a.dtype != of_b.dtype:
            raise InputError(
                f"{where} differ in the type of {what}: {of_a.dtype} and {of_b.dtype}. Save both in one type."
            )
    if a.scores is not None and b.scores is not None and a.scores.shape != b.scores.shape:
        raise InputError(f"{where} differ in the number of keys: {a.scores.shape[-1]} and {b.scores.shape[-1]}.")
    if a.tokens is not None and b.tokens is not None and not torch.equal(a.tokens, b.tokens):
        fault = "are of other tokens: their ids differ. Are they of another tokenisation?"
        if torch.equal(a.tokens.sort()[0], b.tokens.sort()[0]):
            fault = "hold the same tokens in another order. Sort the rows of one like those of the other."
        raise InputError(f"{where} {fault}")
    for one, each in product((a, b), (a, b)):
        keys, largest = None if one.scores is None else one.scores.shape[-1], int(each.indices.max())
        if keys is not None and largest >= keys:
            raise InputError(
                f"{each.file.path} names key {largest}, but {one.file.path} has scores of {keys} keys. Are they "
                f"of another tokenisation? Check one alone: semdiag selections {each.file.path}"
            )


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of one selection: their sets (rows, k), and scores and weights where they are known."""

    sets: Tensor
    layers: int
    heads: int
    scores: Tensor | None
    weights: Tensor | None

    def weight(self) -> Tensor | None:
        """Return the weights of the chosen keys: as given, or the softmax of their scores; None if unknown."""
        if self.weights is not None:
            return self.weights
        if self.scores is None:
            return None
        chosen = self.scores.gather(1, self.sets.clamp(min=0)).double().masked_fill(self.sets < 0, -torch.inf)
        return chosen.softmax(1).nan_to_num(0.0)


def _rows(laid: LaidOut, sets: Tensor) -> _Rows:
    """Return the rows, token by token."""
    scores, weights = (None if each is None else each.flatten(0, 1) for each in (laid.scores, laid.weights))
    return _Rows(sets.flatten(0, 1), laid.layers, laid.heads, scores, weights)


def _weight_of(a: LaidOut, b: LaidOut) -> str:
    for name, each in (("A", a), ("B", b)):
        if each.weights is not None or each.scores is not None:
            return f"{'weights' if each.weights is not None else 'softmax of the scores'} of {name}"
    return ""


def _table(a: _Rows, b: _Rows, kind: NumberFormat) -> pd.DataFrame:
    """Return the table of :class:`ComparedSelections`."""
    overlap, displacement = overlaps(a.sets, b.sets)
    number, each = len(overlap), a.layers * a.heads
    layer, head = np.divmod(np.arange(number) % each, a.heads)
    differs = overlap < 1
    grade = np.where(differs.numpy(), UNEXPLAINED, SAME).astype(object)
    grade[differs.numpy()] = _explained(a, b, differs, kind)
    weight = a.weight()
    pair, weight = (a, b) if weight is not None else (b, a), weight if weight is not None else b.weight()
    lost = torch.full((number,), torch.nan, dtype=torch.float64)
    if weight is not None:
        lost = weight_lost(pair[0].sets, pair[1].sets, weight)
    return pd.DataFrame(
        {
            "token": np.arange(number) // each,
            "layer": layer,
            "head": head,
            "overlap": overlap.numpy(),
            "displacement": displacement.numpy(),
            "class": pd.Categorical(grade, categories=[SAME, NUMERIC, BUG, UNEXPLAINED]),
            "lost": lost.numpy(),
        }
    )


def _explained(a: _Rows, b: _Rows, differs: Tensor, kind: NumberFormat) -> np.ndarray:
    """Return the class of each row that differs."""
    at = differs.nonzero().squeeze(1)
    known = [each.scores[at] for each in (a, b) if each.scores is not None]
    if not known or not len(at):
        return np.full(len(at), UNEXPLAINED, dtype=object)
    numeric = torch.zeros(len(at), dtype=torch.bool)
    for scores in known:
        numeric |= _right(scores, a.sets[at], kind) & _right(scores, b.sets[at], kind)
    return np.where(numeric.numpy(), NUMERIC, BUG).astype(object)


def _right(scores: Tensor, sets: Tensor, kind: NumberFormat, engines: int = 2) -> Tensor:
    """Return whether sets are a top-k of scores after the engines have rounded them."""
    keys = scores.shape[1]
    grade = judge_rows(scores, sets, keys, allowed_keys((len(sets),), keys), kind, engines)[0]
    faulty = torch.tensor([name in FAULTS for name in GRAVITY])
    return ~faulty[grade.long()]


def _by_own_scores(a: _Rows, b: _Rows, bug: Tensor, kind: NumberFormat) -> int | None:
    """Return in how many rows of class bug each engine chose the top-k of its own scores."""
    if a.scores is None or b.scores is None:
        return None
    if not bool(bug.any()):
        return 0
    right = [_right(each.scores[bug], each.sets[bug], kind, 1) for each in (a, b) if each.scores is not None]
    return int((right[0] & right[1]).sum())
