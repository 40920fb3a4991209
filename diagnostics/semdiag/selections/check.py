"""Is a selection the top-k of its scores?"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.batches import as_whole_number
from semdiag.mathematics.block_formats import SCALED, operands
from semdiag.mathematics.rounding import NumberFormat, last_places, number_format, score_error
from semdiag.mathematics.selections import (
    CLASSES,
    FAULTS,
    GRAVITY,
    NOT_JUDGED,
    AllowedKeys,
    allowed_keys,
    judge_rows,
)
from semdiag.measuring.words import counted
from semdiag.selections.files import (
    SelectionFile,
    as_tensor,
    check_k,
    chosen_keys,
    flat_rows,
    float_scores,
    integer_tensor,
    one_number,
    real_numbers,
)
from semdiag_files import InputError

_MOST = 2**62  # keys: no memory holds an index of more
_CLASS = pd.CategoricalDtype(list(GRAVITY), ordered=True)


@dataclass(frozen=True, eq=False)
class CheckedSelection:
    """What :func:`check_selection` found."""

    counts: dict[str, int]  # how many rows are of each class
    rows: pd.DataFrame  # a row for each checked row, described at :func:`check_selection`
    k: int  # keys that a row chooses
    keys: int | None  # that a row has; None: unknown
    format: str  # number format of the engine's scores
    not_checked: int  # rows of padded queries
    not_judged: int  # rows without a fault and without scores
    stale: int = 0  # faulty rows that choose what the row before chose, or what was right for it
    module: str = ""  # that chose; empty: unknown

    @property
    def faults(self) -> int:
        """Return how many rows are faulty: wrong, or with a fault of their keys."""
        return sum(number for name, number in self.counts.items() if name in FAULTS)

    @property
    def faulty(self) -> pd.DataFrame:
        """Return the faulty rows."""
        rows = self.rows[self.rows["class"].isin(FAULTS)]
        return rows.assign(module=self.module)[["module", *rows.columns]] if self.module else rows

    @property
    def worst(self) -> dict[str, Any]:
        """Return the worst row of the gravest class that has rows."""
        return self.worst_of(GRAVITY[int(self.rows["class"].cat.codes.max())])

    def worst_of(self, name: str) -> dict[str, Any]:
        """Return the row of a class with the smallest separation; of several, the first."""
        of_class = (self.rows["class"] == name).to_numpy()
        numbers = self.rows["separation"].to_numpy()[of_class]
        least = int(np.nanargmin(numbers)) if not np.isnan(numbers).all() else 0
        return {str(column): value for column, value in self.rows.iloc[of_class.nonzero()[0][least]].items()}

    def __repr__(self) -> str:
        counts = ", ".join(f"{number:,} {name}" for name, number in self.counts.items() if number)
        return f"CheckedSelection({counted(len(self.rows), 'row')}: {counts or 'none judged'})"


def check_selection(
    scores: Any,
    indices: Any,
    lengths: Any = None,
    causal: bool = False,
    format: str = "float32",
    *,
    starts: Any = None,
    documents: Any = None,
    keys: int | None = None,
    error: Any = None,
    q: Any = None,
    k: Any = None,
    scale: float = 1.0,
    q_scales: Any = None,
    k_scales: Any = None,
) -> CheckedSelection:
    """Check whether the chosen keys of each row are its top-k.

    A row is right if its separation, worst chosen score − best score left out, is ≥ 0: then no allowed key that is
    left out has a larger score than a chosen one. A row has one class, the gravest that applies. From the gravest:

    - ``out_of_range``: an index is not a key (below -1, or n or more).
    - ``future``: a key stands after the query. Only with ``causal``.
    - ``padding``: a key does not belong to the valid keys of the row's sequence or document.
    - ``duplicate``: a key is chosen twice.
    - ``missing``: fewer than min(k, allowed keys) are chosen; those with a score of -inf need not be.
    - ``wrong``: the separation is negative, and neither rounding nor error explains it.
    - ``within_error``: with ``error``, or q and k: it is negative, but some scores within their errors have the
      choice as a top-k: min over the chosen of z + E ≥ max over the others of z − E.
    - ``within_rounding``: it is negative, but not that of scores rounded once to ``format``: min over the chosen
      of fl(z) ≥ max over the others of fl(z). Never of scores that are numbers of the format.
    - ``legal_tie``: it is 0: a key that is left out has the same score as the worst chosen one.
    - ``exact``: it is positive: this is the only top-k.

    Source: docs/theory.md#rounded-scores; not in the paper. Deviation: none.

    Args:
        scores: (..., n), a tensor or an array of floating-point numbers; NaN is refused where a key may be
            chosen. None: unknown, and only faults of the keys themselves are found.
        indices: (..., k) whole numbers from 0, -1 for none.
        lengths: how many keys of each sequence are valid: one number, one for each entry of the first dimension,
            or with as many dimensions as the rows, each of their size or 1. None: all.
        causal: whether a key after the query is one of the future. The last dimension before the keys is then
            the query's, and the queries are the last tokens: query i of q is token n − q + i. If q < n and lengths
            are known it is token starts + lengths − q + i. Rows of padded queries are not checked.
        format: what the engine rounded its scores to before it chose: float64, float32, bfloat16, float16,
            float8_e4m3fn, float8_e5m2; or short, fp64, fp32, bf16, fp16, fp8-e4m3, fp8-e5m2. Or, with q and k,
            the format with scales to which the engine rounded these, its scores being float32: mxfp4, mxfp8,
            fp8-row, fp8-block, fp8-block-power, int8-row.
        starts: like ``lengths``, the first valid key of each sequence: with padding on the left, how many tokens
            that is. The valid keys are starts ≤ j < starts + lengths. None: 0.
        documents: (n,) or (batch, n) whole numbers: the document of each token of a packed sequence, whose tokens
            stand together; negative for padding. A key of another document is ``padding``.
        keys: n, if there are no scores. None: as many as the largest length; with ``causal`` and no lengths as
            many as there are queries; else unknown, and no index is too large.
        error: how far each score may be from the engine's, where scores were recomputed: a number, or an array
            of their shape.
        q: queries (..., D) of the rows, in place of scores: these are computed in float64, and their error is
            :func:`~semdiag.mathematics.rounding.score_error` of ``format``.
        k: keys (..., n, D), in the dimensions in front like those of q, or 1.
        scale: on the products of q and k.
        q_scales: of stored queries, (..., rows, B), one for each of B equal blocks of D, which are not rounded
            again; whole numbers e stand for 2^(e - 127).
        k_scales: of stored keys, (..., n, B).

    Returns:
        Counts by class; and a table with a row for each checked row: its place in each dimension (``dim_0``, …),
        ``class``, ``worst_chosen`` (score), ``kth`` (the least score of a top-k), ``gap`` = kth − worst_chosen,
        not below 0, ``gap_ulps`` (in units of the last place in ``format``), ``left_out`` (the best score left
        out), ``separation`` = worst_chosen − left_out (+inf where no key is left) and ``separation_ulps``. Units
        of the last place are those of the larger of the two scores. NaN: not known, or nothing chosen.

    Raises:
        InputError: if shapes or types do not fit together, k is above n, a score is NaN, or no row is to be
            checked.

    Example:
        >>> scores = torch.tensor([[3.0, 1.0, 2.0, 2.0], [3.0, 1.0, 2.0, 0.0]])
        >>> found = check_selection(scores, torch.tensor([[0, 2], [0, 1]]))
        >>> found, found.faults
        (CheckedSelection(2 rows: 1 legal_tie, 1 wrong), 1)
        >>> found.rows[["class", "worst_chosen", "kth", "gap"]].values.tolist()
        [['legal_tie', 2.0, 2.0, 0.0], ['wrong', 1.0, 2.0, 1.0]]
    """
    kind = _format_of_scores(format)
    chosen = chosen_keys(indices)
    if _multiplies(format, q, k, q_scales, k_scales):
        scores, error = _recomputed((scores, error), (q, q_scales), (k, k_scales), float(scale), format)
    given_scores = None if scores is None else float_scores(scores, chosen)
    errors = None if error is None else _errors(error, given_scores)
    shape = tuple(chosen.shape[:-1])
    valid = integer_tensor(lengths, "lengths")
    first = integer_tensor(starts, "starts")
    key_number = _keys(keys, given_scores, valid, first, shape[-1] if causal else 0)
    if keys is not None:
        check_k(chosen.shape[-1], keys)
    beyond = min(max(int(chosen.long().max()) + 1, chosen.shape[-1]), _MOST)  # which no index reaches
    number = key_number or beyond
    allowed = allowed_keys(shape, number, valid, first, integer_tensor(documents, "documents"), bool(causal))
    if not bool(allowed.counts.any()):
        raise InputError("There is no row to check: every query is padding.")
    flat = None if given_scores is None else flat_rows(given_scores)
    flat_keys = flat_rows(chosen)
    judged = judge_rows(flat, flat_keys, number, allowed, kind, error=errors)
    rows = _table(shape, allowed, kind, judged)
    counts = rows["class"].value_counts()
    return CheckedSelection(
        counts={name: int(counts[name]) for name in CLASSES}, rows=rows, k=chosen.shape[-1], keys=key_number,
        format=_name_of(format),
        not_checked=allowed.counts.numel() - len(rows), not_judged=int(counts[NOT_JUDGED]),
        stale=_stale(flat, flat_keys, allowed, kind, rows, shape),
    )  # fmt: skip


def check_file(file: SelectionFile, causal: bool, format: str, keys: int | None) -> CheckedSelection:
    """Check a selection of a file; faults that an ignored array may explain are refused."""
    rules: dict[str, Any] = {"starts": file.starts, "documents": file.documents, "keys": keys, "error": file.error}
    rules |= {"q": file.q, "k": file.k, "q_scales": file.q_scales, "k_scales": file.k_scales}
    try:
        if file.scale is not None:
            rules["scale"] = one_number(file.scale, "scale")
        checked = check_selection(file.scores, file.indices, file.lengths, causal, format, **rules)
        if checked.faults and (why := file.unclear):
            raise InputError(f"{checked.faults:,} rows would be faulty, but {why}.")
    except InputError as error:
        raise InputError(f"{file.name}: {error}") from None
    return replace(checked, module=file.module)


def _stale(
    scores: Tensor | None,
    indices: Tensor,
    allowed: AllowedKeys,
    kind: NumberFormat,
    rows: pd.DataFrame,
    shape: tuple[int, ...],
) -> int:
    """Return how many faulty rows repeat the row before, along the dimension in which most do."""
    faulty = allowed.counts.nonzero().squeeze(1)[torch.tensor(rows["class"].isin(FAULTS).to_numpy())]
    number = 0
    for axis, size in enumerate(shape):
        step = math.prod(shape[axis + 1 :])
        at = faulty[faulty // step % size > 0]
        if not len(at):
            continue
        chosen, before = (indices[each].long() for each in (at, at - step))
        same = (chosen.sort(1).values == before.sort(1).values).all(1).cpu()
        if scores is not None:
            keys = AllowedKeys(
                allowed.first[at - step], allowed.end[at - step], None, torch.ones_like(at, dtype=torch.bool)
            )
            grade = judge_rows(scores[at - step], chosen, scores.shape[1], keys, kind)[0]
            same |= grade < GRAVITY.index("wrong")
        number = max(number, int(same.sum()))
    return number


def _format_of_scores(format: str) -> NumberFormat:
    return number_format("float32" if format in SCALED else format)


def _name_of(format: str) -> str:
    return format if format in SCALED else number_format(format).name


def _multiplies(format: str, *arrays: Any) -> bool:
    """Return whether scores are to be computed from queries and keys."""
    return format in SCALED or any(array is not None for array in arrays)


def _operands(name: str, numbers: Any, scales: Any, format: str) -> Tensor:
    """Return queries or keys as the engine multiplied them; stored numbers with scales may be whole."""
    if scales is None:
        return operands(real_numbers(numbers, name), name, format)
    stored = as_tensor(numbers, name)
    sizes = as_tensor(scales, f"{name}_scales")
    if any(array.is_complex() or array.dtype == torch.bool for array in (stored, sizes)):
        raise InputError(f"{name} and {name}_scales must be real numbers.")
    return operands(stored, name, format, sizes)


def _recomputed(
    scores_and_error: tuple[Any, Any], q: tuple[Any, Any], k: tuple[Any, Any], scale: float, format: str
) -> tuple[Tensor, Tensor]:
    """Return scores from queries and keys, each with their scales, and the error of these scores."""
    if any(array is not None for array in scores_and_error) or q[0] is None or k[0] is None:
        named = f" {format} is a format of q and k." if format in SCALED else ""
        raise InputError(f"Give scores (with their error, if they were recomputed), or else both q and k.{named}")
    kind = _format_of_scores(format)
    queries = _operands("q", *q, format)
    keys = _operands("k", *k, format)
    if queries.ndim < 2 or keys.ndim < 2 or queries.shape[-1] != keys.shape[-1]:
        shapes = f"{tuple(queries.shape)} and {tuple(keys.shape)}"
        raise InputError(f"q must have the shape (..., rows, D) and k (..., n, D), of the same D. Got {shapes}.")
    try:
        scores_of_products = scale * (queries @ keys.mT)
    except RuntimeError:
        shapes = f"{tuple(queries.shape)} and {tuple(keys.shape)}"
        raise InputError(f"The first dimensions of q and k must be the same, or 1. Got {shapes}.") from None
    error = score_error(queries, keys, scale, kind).expand_as(scores_of_products)
    if not bool(error.isfinite().all()):
        raise InputError(
            f"The error of scores in {kind.name} is not known for these q and k. It is for formats up to float32, "
            "heads up to a width of 2^20, and finite numbers whose sums float32 can hold."
        )
    return scores_of_products, error


def _errors(error: Any, scores: Tensor | None) -> Tensor:
    errors = real_numbers(error, "error")
    if scores is None:
        raise InputError("error says how far scores may be off, and there are no scores.")
    try:
        spread = errors.expand(scores.shape)
    except RuntimeError:
        shapes = f"{tuple(errors.shape)} for scores of {tuple(scores.shape)}"
        raise InputError(f"error must be a number, or have the shape of the scores. Got {shapes}.") from None
    if not bool((errors >= 0).all()) or not bool(errors.isfinite().all()):
        raise InputError("error must be finite and not negative.")
    return spread.reshape(-1, scores.shape[-1])


def _keys(
    number: int | None, scores: Tensor | None, lengths: Tensor | None, starts: Tensor | None, queries: int
) -> int | None:
    if number is not None:
        as_whole_number(number, "keys", 1)
        if number > _MOST:
            raise InputError(f"keys must be at most {_MOST:,}. Got {number:,}.")
    if scores is not None:
        if number is not None and number != scores.shape[-1]:
            raise InputError(f"keys = {number}, but the scores have {scores.shape[-1]} keys.")
        return int(scores.shape[-1])
    if number is not None:
        return int(number)
    if lengths is None or not lengths.numel():
        return queries or None
    if starts is None or not starts.numel():
        return max(1, queries, int(lengths.max()))
    ends = lengths + starts if starts.shape == lengths.shape else lengths.max() + starts.max()
    return max(1, queries, int(ends.max()))


def _table(
    shape: tuple[int, ...], allowed: AllowedKeys, kind: NumberFormat, judged: tuple[Tensor, ...]
) -> pd.DataFrame:
    grade, worst, kth, left = judged
    places = np.unravel_index(allowed.counts.nonzero().squeeze(1).numpy(), shape)
    gap = torch.where(kth == worst, 0.0, kth - worst).clamp(min=0)
    separation = torch.where(worst == left, 0.0, worst - left)
    separation = torch.where(left.isnan() & ~worst.isnan(), torch.inf, separation)
    columns = {
        "worst_chosen": worst, "kth": kth, "gap": gap,
        "gap_ulps": last_places(gap, torch.fmax(worst.abs(), kth.abs()), kind), "left_out": left,
        "separation": separation,
        "separation_ulps": last_places(separation, torch.fmax(worst.abs(), left.abs()), kind),
    }  # fmt: skip
    return pd.DataFrame(
        {
            **{f"dim_{axis}": place for axis, place in enumerate(places)},
            "class": pd.Categorical.from_codes(np.asarray(grade.numpy(), np.int8), dtype=_CLASS),
            **{name: values.numpy() for name, values in columns.items()},
        }
    )
