"""Is a selection the top-k of its scores?"""

import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.batches import whole_number
from semdiag.mathematics.rounding import NumberFormat, last_places, number_format, score_error
from semdiag.mathematics.selections import (
    CLASSES,
    FAULTS,
    GRAVITY,
    NOT_JUDGED,
    AllowedKeys,
    allowed_keys,
    judge_rows,
    without_repeats,
)
from semdiag.measuring.measurements import array_names, read_arrays
from semdiag.measuring.words import counted
from semdiag_models import InputError

_NAMES = {
    "indices": ("indices", "routed_experts", "topk_indices", "topk_ids", "topk_idx", "selected_experts"),
    "scores": ("scores", "logits", "router_logits"),
    "weights": ("weights", "topk_weights"),
    "lengths": (
        "lengths", "seq_lens", "seqlens", "seq_len", "seq_lengths", "context_lens", "context_lengths", "kv_lens",
        "cache_seqlens",
    ),
    "starts": ("starts",),
    "documents": ("documents",),
    "tokens": ("tokens", "token_ids", "input_ids"),
    "error": ("error",),
    "q": ("q",),
    "k": ("k",),
    "scale": ("scale",),
    "first": ("cu_seqlen_ks",),  # the first key of each row, and the end of its keys
    "end": ("cu_seqlen_ke",),
    "bounds": ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seqlens_k", "query_start_loc"),  # packed
}  # fmt: skip
_PAGES = ("block_table", "block_tables", "page_table", "slot_mapping", "req_to_token")


@dataclass(frozen=True, eq=False)
class SelectionFile:
    """The arrays of a selection in a file; None if it is not there."""

    path: Path
    indices: Tensor  # (..., k) chosen keys, -1 for none
    scores: Tensor | None = None  # (..., n) of all keys
    weights: Tensor | None = None  # (..., k) of the chosen keys
    lengths: Tensor | None = None  # lengths of the sequences
    starts: Tensor | None = None  # the first valid key of each
    documents: Tensor | None = None  # document of each token, in packed sequences
    tokens: Tensor | None = None  # their ids
    error: Tensor | None = None  # how far recomputed scores may be from the engine's
    q: Tensor | None = None  # queries and keys, in place of scores
    k: Tensor | None = None
    scale: Tensor | None = None  # on their products
    ignored: tuple[str, ...] = ()  # names of other arrays

    @property
    def unclear(self) -> str:
        """Return why faults of its rows may be none: an ignored array that may say which keys are valid."""
        for name in self.ignored:
            if name in _PAGES:
                return f"indices may be slots of a paged cache, as it holds {name}. Give positions in the sequence"
            try:
                found = read_arrays(self.path, [name])[name]
            except InputError:  # an array of something else
                continue
            counts = (len(self.indices), len(self.indices) + 1, self.indices[..., 0].numel())
            if not found.is_floating_point() and found.ndim == 1 and len(found) in counts:
                return f"{name}, which is ignored, may say which keys are valid. Name it lengths, or leave it out"
        return ""


def read_selection(path: Path, format: str = "", limits: bool = True) -> SelectionFile:
    """Read a selection."""
    arrays = read_arrays(path, [name for names in _NAMES.values() for name in names])
    found = {kind: [name for name in names if name in arrays] for kind, names in _NAMES.items()}
    bounds = found.pop("bounds")
    for kind, names in found.items():
        if len(names) > 1:
            raise InputError(f"{path} holds {' and '.join(names)}: which are the {kind}? One must be there.")
    known = {kind: arrays[names[0]] for kind, names in found.items() if names}
    if "indices" not in known:
        *names, last = _NAMES["indices"]
        raise InputError(
            f"{path} holds no array of chosen keys: one must be there, named {', '.join(names)} or {last}."
        )
    first, end = known.pop("first", None), known.pop("end", None)
    if limits and end is not None and "lengths" not in known:
        known["starts"] = torch.zeros_like(end) if first is None else first
        known["lengths"] = end - known["starts"]
    if limits and bounds and not {"lengths", "documents"} & set(known):
        known |= _packed(path, known["indices"], {name: arrays[name] for name in bounds})
    if "scores" in known:
        known["scores"] = _numbers(known["scores"], format)
    return SelectionFile(path, **known, ignored=tuple(name for name in array_names(path) if name not in arrays))


def _packed(path: Path, indices: Tensor, bounds: dict[str, Tensor]) -> dict[str, Tensor]:
    rows = next((held for name, held in bounds.items() if name != "cu_seqlens_k"), next(iter(bounds.values())))
    keys = bounds.get("cu_seqlens_k", rows)
    sizes = rows.long().diff()
    if rows.shape != keys.shape or rows.ndim != 1 or bool((sizes < 0).any()) or int(sizes.sum()) != len(indices):
        raise InputError(
            f"{path}: {' and '.join(bounds)} must hold the bounds of the same sequences, up to the "
            f"{len(indices):,} rows of indices."
        )
    begin = keys.long()
    return {"starts": begin[:-1].repeat_interleave(sizes), "lengths": begin.diff().repeat_interleave(sizes)}


def _numbers(scores: Tensor, format: str) -> Tensor:
    """Return scores; whole numbers as wide as those of the format are its bits."""
    if not format or scores.is_floating_point() or scores.dtype == torch.bool:
        return scores
    dtype: torch.dtype = getattr(torch, number_format(format).name)
    return scores.contiguous().view(dtype) if scores.dtype.itemsize == dtype.itemsize < 4 else scores


def as_tensor(given: Any, name: str) -> Tensor:
    """Convert a tensor, an array of any byte order or a nested list into a tensor."""
    if isinstance(given, Tensor):
        if given.layout != torch.strided or given.is_meta:
            raise InputError(f"{name} must be a plain tensor that holds its numbers. Got {given.layout}.")
        return given.detach()
    try:
        array = np.asarray(given)
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
        with warnings.catch_warnings():  # torch warns of read-only arrays; nothing is written
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        kind = getattr(given, "dtype", type(given).__name__)
        raise InputError(f"{name} must be a tensor or an array of numbers. Got {kind}.") from None


def _chosen_keys(given: Any) -> Tensor:
    indices = _whole(given, "indices")
    if indices.ndim == 0 or not indices.numel():
        raise InputError(
            f"indices must have the shape (..., k), with at least one row and one key. Got {_shape(indices)}."
        )
    return indices[None] if indices.ndim == 1 else indices


def _float_scores(given: Any, indices: Tensor) -> Tensor:
    scores = as_tensor(given, "scores")
    if not scores.is_floating_point():
        raise InputError(
            f"scores must be floating-point numbers. Got {_kind(scores)}: are scores and indices swapped? Bits of "
            "bfloat16 are read with the format bfloat16."
        )
    scores = scores[None] if scores.ndim == 1 and len(indices) == 1 and indices.ndim == 2 else scores
    if scores.shape[:-1] != indices.shape[:-1] or not scores.numel():
        raise InputError(
            f"scores (..., n) and indices (..., k) must be of the same rows. Got {_shape(scores)} and "
            f"{_shape(indices)}."
        )
    _check_k(indices.shape[-1], scores.shape[-1])
    return scores


def _check_k(k: int, keys: int) -> None:
    if k > keys:
        raise InputError(
            f"A row chooses k = {k:,} keys, but there are only {keys:,}. Are the scores those of the same tokens? "
            f"If the rest of each row is filled with -1, give its first {keys:,} columns."
        )


def whole_numbers(given: Any, name: str) -> Tensor | None:
    """Return whole numbers as int64; None for None."""
    return None if given is None else _whole(given, name).long().cpu()


def flat_rows(tensor: Tensor) -> Tensor:
    """Return (..., n) as (rows, n)."""
    return tensor.reshape(-1, tensor.shape[-1])


def _whole(given: Any, name: str) -> Tensor:
    tensor = as_tensor(given, name)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"{name} must be whole numbers. Got {_kind(tensor)}.")
    return tensor


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _weights_of(given: Any, indices: Tensor) -> Tensor:
    weights = as_tensor(given, "weights")
    fits = weights.numel() == indices.numel() and weights.shape[-1] == indices.shape[-1]
    if not weights.is_floating_point() or not fits:
        raise InputError(
            f"weights must be floating-point numbers, one for each index. Got {_kind(weights)} of "
            f"{_shape(weights)} for {_shape(indices)}."
        )
    weights = weights.reshape(indices.shape).float()
    if bool((((weights < 0) | ~weights.isfinite()) & (indices >= 0)).any()):
        raise InputError("weights must be finite and not negative.")
    return weights


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

    @property
    def faults(self) -> int:
        """Return how many rows are faulty: wrong, or with a fault of their keys."""
        return sum(number for name, number in self.counts.items() if name in FAULTS)

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
            float8_e4m3fn, float8_e5m2; or short, fp64, fp32, bf16, fp16, fp8-e4m3, fp8-e5m2.
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
    kind = number_format(format)
    chosen = _chosen_keys(indices)
    if q is not None or k is not None:
        scores, error = _recomputed(scores, error, q, k, scale, kind)
    given_scores = None if scores is None else _float_scores(scores, chosen)
    errors = None if error is None else _errors(error, given_scores)
    shape = tuple(chosen.shape[:-1])
    valid, first = whole_numbers(lengths, "lengths"), whole_numbers(starts, "starts")
    known = _keys(keys, given_scores, valid, first, shape[-1] if causal else 0)
    if keys is not None:
        _check_k(chosen.shape[-1], keys)
    beyond = min(max(int(chosen.long().max()) + 1, chosen.shape[-1]), _MOST)  # which no index reaches
    number = known or beyond
    allowed = allowed_keys(shape, number, valid, first, whole_numbers(documents, "documents"), bool(causal))
    if not bool(allowed.counts.any()):
        raise InputError("There is no row to check: every query is padding.")
    judged = judge_rows(
        None if given_scores is None else flat_rows(given_scores), flat_rows(chosen), number, allowed, kind,
        error=errors,
    )  # fmt: skip
    rows = _table(shape, allowed, kind, judged)
    counts = rows["class"].value_counts()
    return CheckedSelection(
        counts={name: int(counts[name]) for name in CLASSES}, rows=rows, k=chosen.shape[-1], keys=known,
        format=kind.name, not_checked=allowed.counts.numel() - len(rows), not_judged=int(counts[NOT_JUDGED]),
    )  # fmt: skip


def _recomputed(
    scores: Any, error: Any, q: Any, k: Any, scale: float, kind: NumberFormat
) -> tuple[Tensor, Tensor]:
    if scores is not None or error is not None or q is None or k is None:
        raise InputError("Give scores (with their error, if they were recomputed), or else both q and k.")
    queries, keys = as_tensor(q, "q").double(), as_tensor(k, "k").double()
    if queries.ndim < 2 or keys.ndim < 2 or queries.shape[-1] != keys.shape[-1]:
        shapes = f"{tuple(queries.shape)} and {tuple(keys.shape)}"
        raise InputError(f"q must have the shape (..., rows, D) and k (..., n, D), of the same D. Got {shapes}.")
    try:
        found = float(scale) * (queries @ keys.mT)
    except RuntimeError:
        shapes = f"{tuple(queries.shape)} and {tuple(keys.shape)}"
        raise InputError(f"The first dimensions of q and k must be the same, or 1. Got {shapes}.") from None
    error = score_error(queries, keys, float(scale), kind).expand_as(found)
    if not bool(error.isfinite().all()):
        raise InputError(
            f"The error of scores in {kind.name} is not known for these q and k. It is for formats up to float32, "
            "heads up to a width of 2^20, and finite numbers whose sums float32 can hold."
        )
    return found, error


def _errors(error: Any, scores: Tensor | None) -> Tensor:
    given = as_tensor(error, "error").double()
    if scores is None:
        raise InputError("error says how far scores may be off, and there are no scores.")
    try:
        spread = given.expand(scores.shape)
    except RuntimeError:
        shapes = f"{tuple(given.shape)} for scores of {tuple(scores.shape)}"
        raise InputError(f"error must be a number, or have the shape of the scores. Got {shapes}.") from None
    if not bool((given >= 0).all()) or not bool(given.isfinite().all()):
        raise InputError("error must be finite and not negative.")
    return spread.reshape(-1, scores.shape[-1])


def _keys(
    given: int | None, scores: Tensor | None, lengths: Tensor | None, starts: Tensor | None, queries: int
) -> int | None:
    if given is not None:
        whole_number(given, "keys", 1)
        if given > _MOST:
            raise InputError(f"keys must be at most {_MOST:,}. Got {given:,}.")
    if scores is not None:
        if given is not None and given != scores.shape[-1]:
            raise InputError(f"keys = {given}, but the scores have {scores.shape[-1]} keys.")
        return int(scores.shape[-1])
    if given is not None:
        return int(given)
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


_AXIS_NAMES = ("batch", "sequence", "tokens", "layers", "heads")
_USUAL = {1: "tokens", 2: "tokens,layers", 3: "batch,sequence,layers", 4: "batch,sequence,layers,heads"}


@dataclass(frozen=True, eq=False)
class LaidOut:
    """A selection as rows: token by token, layer by layer, head by head."""

    file: SelectionFile  # where it is from
    layers: int  # their number; 1 if there are none
    heads: int  # heads of a layer; 1 if there are none
    indices: Tensor  # int64 (rows, k)
    kind: str  # type of the indices, as given
    scores: Tensor | None  # (rows, n); None: unknown
    weights: Tensor | None  # (rows, k); None: unknown
    ids: Tensor | None  # int64 (tokens,); None: unknown
    layout: str  # names of the dimensions before k

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.indices) // (self.layers * self.heads)

    @cached_property
    def sets(self) -> Tensor:
        """Return the indices, a key that a row names twice once."""
        return without_repeats(self.indices)

    @property
    def weight(self) -> Tensor | None:
        """Return the weights of the chosen keys: as given, or the softmax of their scores; None if unknown."""
        if self.weights is not None or self.scores is None:
            return self.weights
        chosen = self.scores.gather(1, self.sets.clamp(min=0)).double().masked_fill(self.sets < 0, -torch.inf)
        return chosen.softmax(1).nan_to_num(0.0)


def lay_out(file: SelectionFile, layout: str = "") -> LaidOut:
    """Return a selection in the one layout. Tokens beyond the lengths of their sequences are left out."""
    try:
        return _laid_out(file, layout)
    except InputError as error:
        raise InputError(f"{file.path}: {error}") from None


def _laid_out(file: SelectionFile, layout: str) -> LaidOut:
    indices = _chosen_keys(file.indices)
    names = _names(layout, indices.ndim - 1)
    sizes = dict(zip(names, indices.shape, strict=False))
    scores = None if file.scores is None else _float_scores(file.scores, indices)
    weights = None if file.weights is None else _weights_of(file.weights, indices)
    kept = _valid_tokens(file, sizes, names)
    order = [names.index(name) for name in _AXIS_NAMES if name in names]
    layers, heads = sizes.get("layers", 1), sizes.get("heads", 1)

    def one(tensor: Tensor) -> Tensor:
        moved = tensor.permute(*order, tensor.ndim - 1)
        return moved.reshape(-1, layers * heads, tensor.shape[-1])[kept].flatten(0, 1).cpu()

    ids = whole_numbers(file.tokens, "tokens")
    if ids is not None:
        if ids.numel() != kept.numel():
            raise InputError(f"tokens holds {ids.numel():,} ids, but there are {kept.numel():,} tokens.")
        ids = ids.flatten()[kept]
    scores, weights = (None if each is None else one(each) for each in (scores, weights))
    if scores is not None and bool(scores.isnan().any()):
        raise InputError("the scores hold NaN, which is neither larger nor smaller than another score.")
    indices, kind = one(indices).long(), _kind(indices)
    return LaidOut(file, layers, heads, indices, kind, scores, weights, ids, ",".join(names))


def _names(layout: str, count: int) -> list[str]:
    given = layout or _USUAL.get(count, "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    wrong = [name for name in names if name not in _AXIS_NAMES]
    has_tokens = "tokens" in names or "sequence" in names
    if wrong or len(set(names)) < len(names) or len(names) != count or not has_tokens:
        raise InputError(
            f"indices have {count} dimensions before k. Name each of them once with --layout, like "
            f"batch,sequence,layers: {', '.join(_AXIS_NAMES)}, with tokens or sequence among them. Got {given!r}."
        )
    return names


def _valid_tokens(file: SelectionFile, sizes: dict[str, int], names: list[str]) -> Tensor:
    batch, sequence = sizes.get("batch", 1), sizes.get("sequence", 1) * sizes.get("tokens", 1)
    kept = torch.ones(batch, sequence, dtype=torch.bool)
    at = torch.arange(sequence)
    lengths, starts = whole_numbers(file.lengths, "lengths"), whole_numbers(file.starts, "starts")
    for numbers, name in ((lengths, "lengths"), (starts, "starts")):
        if numbers is not None and tuple(numbers.shape) not in ((), (1,), (batch,)):
            raise InputError(
                f"{name} must be one number for each of {batch} sequences. Got {tuple(numbers.shape)}."
            )
    first = torch.zeros(1, dtype=torch.int64) if starts is None else starts.reshape(-1)
    if lengths is not None:
        end = first + lengths.reshape(-1)
        if bool(((first < 0) | (end < first) | (end > sequence)).any()):
            raise InputError(f"lengths and starts must lie within the {sequence:,} tokens of a sequence.")
        kept &= at < end[:, None]
    return (kept & (at >= first[:, None])).flatten()
