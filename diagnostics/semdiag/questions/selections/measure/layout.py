"""Convert the layouts in which engines return selections into one: tokens × rows of a token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.questions.selections.measure.arrays import chosen_keys, float_scores, weights_of, whole_numbers
from semdiag.questions.selections.measure.files import SelectionFile
from semdiag_models import InputError

_NAMES = ("batch", "sequence", "tokens", "layers", "heads")
_USUAL = {1: "tokens", 2: "tokens,layers", 3: "batch,sequence,layers", 4: "batch,sequence,layers,heads"}


@dataclass(frozen=True, eq=False)
class LaidOut:
    """A selection as tokens × (layers × heads) × k."""

    file: SelectionFile  # where it is from
    layers: int  # their number; 1 if there are none
    heads: int  # of a layer; 1 if there are none
    indices: Tensor  # int64 (T, layers · heads, k)
    kind: str  # type of the indices, as given
    scores: Tensor | None  # (T, layers · heads, n); None: unknown
    weights: Tensor | None  # (T, layers · heads, k); None: unknown
    tokens: Tensor | None  # int64 (T,), their ids; None: unknown
    layout: str  # names of the dimensions before k


def lay_out(file: SelectionFile, layout: str = "") -> LaidOut:
    """Return a selection in the one layout. Tokens beyond the lengths of their sequences are left out."""
    try:
        return _laid_out(file, layout)
    except InputError as error:
        raise InputError(f"{file.path}: {error}") from None


def _laid_out(file: SelectionFile, layout: str) -> LaidOut:
    indices = chosen_keys(file.indices)
    names = _names(layout, indices.ndim - 1)
    sizes = dict(zip(names, indices.shape, strict=False))
    scores = None if file.scores is None else float_scores(file.scores, indices)
    weights = None if file.weights is None else weights_of(file.weights, indices)
    kept = _valid_tokens(file, sizes, names)
    order = [names.index(name) for name in _NAMES if name in names]
    layers, heads = sizes.get("layers", 1), sizes.get("heads", 1)

    def one(tensor: Tensor) -> Tensor:
        moved = tensor.permute(*order, tensor.ndim - 1)
        return moved.reshape(-1, layers * heads, tensor.shape[-1])[kept]

    ids = whole_numbers(file.tokens, "tokens")
    if ids is not None:
        if ids.numel() != kept.numel():
            raise InputError(f"tokens holds {ids.numel():,} ids, but there are {kept.numel():,} tokens.")
        ids = ids.flatten()[kept]
    laid_out = one(indices).long().cpu()
    if scores is not None and bool(one(scores).isnan().any()):
        raise InputError("the scores hold NaN, which is neither larger nor smaller than another score.")
    return LaidOut(
        file, layers, heads, laid_out, str(indices.dtype).removeprefix("torch."),
        None if scores is None else one(scores).cpu(), None if weights is None else one(weights).cpu(), ids,
        ",".join(names),
    )  # fmt: skip


def _names(layout: str, count: int) -> list[str]:
    """Return the names of the dimensions before k."""
    given = layout or _USUAL.get(count, "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    wrong = [name for name in names if name not in _NAMES]
    has_tokens = "tokens" in names or "sequence" in names
    if wrong or len(set(names)) < len(names) or len(names) != count or not has_tokens:
        raise InputError(
            f"indices have {count} dimensions before k. Name each of them once with --layout, like "
            f"batch,sequence,layers: {', '.join(_NAMES)}, with tokens or sequence among them. Got {given!r}."
        )
    return names


def _valid_tokens(file: SelectionFile, sizes: dict[str, int], names: list[str]) -> Tensor:
    """Return which tokens are not padding, bool (T,), in the order batch, sequence, tokens."""
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
