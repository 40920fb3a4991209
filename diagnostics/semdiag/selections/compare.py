"""Do two engines choose alike?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from semdiag.mathematics.rounding import NumberFormat, may_swap, number_format
from semdiag.mathematics.selections import (
    FAULTS,
    GRAVITY,
    allowed_keys,
    judge_rows,
    lacking,
    overlaps,
    weight_lost,
    without_repeats,
)
from semdiag.selections.files import (
    SelectionFile,
    chosen_keys,
    chosen_weights,
    float_scores,
    integer_tensor,
    type_name,
)
from semdiag.selections.localise import Located, Suspect, localise
from semdiag.selections.stages import indexer_of_arrays
from semdiag_files import InputError

_OTHER_TOKENS = "Are they of another tokenisation, or is one of them padded? Then give its lengths. "
SAME = "same"
NUMERIC = "numeric"
BUG = "bug"
UNEXPLAINED = "unexplained"


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
        raise InputError(f"{file.name}: {error}") from None


def _laid_out(file: SelectionFile, layout: str) -> LaidOut:
    indices = chosen_keys(file.indices)
    names = _names(layout, indices.ndim - 1)
    sizes = dict(zip(names, indices.shape, strict=False))
    scores = None if file.scores is None else float_scores(file.scores, indices)
    weights = None if file.weights is None else chosen_weights(file.weights, indices)
    valid = _valid_tokens(file, sizes, names)
    order = [names.index(name) for name in _AXIS_NAMES if name in names]
    layers = sizes.get("layers", 1)
    heads = sizes.get("heads", 1)

    def one(tensor: Tensor) -> Tensor:
        ordered = tensor.permute(*order, tensor.ndim - 1)
        return ordered.reshape(-1, layers * heads, tensor.shape[-1])[valid].flatten(0, 1).cpu()

    ids = integer_tensor(file.tokens, "tokens")
    if ids is not None:
        if ids.numel() != valid.numel():
            raise InputError(f"tokens holds {ids.numel():,} ids, but there are {valid.numel():,} tokens.")
        ids = ids.flatten()[valid]
    scores, weights = (None if each is None else one(each) for each in (scores, weights))
    if scores is not None and bool(scores.isnan().any()):
        raise InputError("the scores hold NaN, which is neither larger nor smaller than another score.")
    rows = one(indices).long()
    return LaidOut(file, layers, heads, rows, type_name(indices), scores, weights, ids, ",".join(names))


def _names(layout: str, count: int) -> list[str]:
    named = layout or _USUAL.get(count, "")
    names = [name.strip() for name in named.split(",") if name.strip()]
    wrong = [name for name in names if name not in _AXIS_NAMES]
    has_tokens = "tokens" in names or "sequence" in names
    if wrong or len(set(names)) < len(names) or len(names) != count or not has_tokens:
        raise InputError(
            f"indices have {count} dimensions before k. Name each of them once with --layout, like "
            f"batch,sequence,layers: {', '.join(_AXIS_NAMES)}, with tokens or sequence among them. Got {named!r}."
        )
    return names


def _valid_tokens(file: SelectionFile, sizes: dict[str, int], names: list[str]) -> Tensor:
    batch = sizes.get("batch", 1)
    sequence = sizes.get("sequence", 1) * sizes.get("tokens", 1)
    valid = torch.ones(batch, sequence, dtype=torch.bool)
    at = torch.arange(sequence)
    lengths = integer_tensor(file.lengths, "lengths")
    starts = integer_tensor(file.starts, "starts")
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
        valid &= at < end[:, None]
    return (valid & (at >= first[:, None])).flatten()


@dataclass(frozen=True, eq=False)
class ComparedSelections:
    """What :func:`compare_selections` found."""

    rows: pd.DataFrame
    tokens: int  # tokens of each selection
    k: int  # keys that a row chooses
    format: str  # number format of the engines' scores
    repeats: tuple[int, int]  # how many rows of A and of B name a key twice; it counts once
    weight_of: str  # from which file's weights or scores the lost weight is; empty: unknown
    by_own_scores: int | None
    layouts: tuple[str, str]  # layouts of A and B, named by the user or guessed
    ignored: tuple[str, ...]  # names of arrays that were not looked at
    module: str  # that chose; empty: the files name none
    located: Located | None = None  # where the first module that differs goes wrong; None: unknown, or another one

    @property
    def unexplained(self) -> pd.DataFrame:
        """Return the rows whose difference rounding does not explain."""
        rows = self.rows[self.rows["class"].isin((BUG, UNEXPLAINED))]
        return rows.assign(module=self.module)[["module", *rows.columns]] if self.module else rows


def compare_files(
    first: Sequence[SelectionFile], second: Sequence[SelectionFile], format: str, layouts: tuple[str, str]
) -> list[ComparedSelections]:
    """Compare the selections of two files, module by module."""
    _check_modules(first, second)
    _check_modules(second, first)
    by_module = {each.module: each for each in second}
    compared = [compare_selections(each, by_module[each.module], format, layouts) for each in first]
    at = next((at for at, each in enumerate(compared) if len(each.unexplained)), None)
    if at is not None:
        donors = {each.module: each.scores for each in first if each.scores is not None and each is not first[at]}
        compared[at] = replace(compared[at], located=_located(first[at], by_module[first[at].module], donors))
    return compared


def _check_modules(first: Sequence[SelectionFile], second: Sequence[SelectionFile]) -> None:
    """Refuse selections of modules that a second file does not hold."""
    modules = {each.module for each in second}
    missing = [each.module for each in first if each.module not in modules]
    if missing:
        raise InputError(
            f"{second[0].path} holds no choices of {missing[0] or 'a module without a name'}: compare like with "
            "like."
        )


def _located(reference: SelectionFile, suspect: SelectionFile, donors: dict[str, Tensor]) -> Located | None:
    """Return where a suspect goes wrong, if the reference says how it chose."""
    indexer = indexer_of_arrays(reference.module, reference.stages, reference.indices.shape[-1])
    if indexer is None or reference.indices.ndim != 2:
        return None
    rows = len(reference.indices)
    stages = suspect.stages
    return localise(
        indexer,
        Suspect(
            suspect.indices.long(), suspect.scores, stages.get("index_queries"), stages.get("index_keys"),
            stages.get("head_weights"),
        ),
        {name: scores for name, scores in donors.items() if scores.ndim == 2 and len(scores) == rows},
    )  # fmt: skip


def compare_selections(
    first: SelectionFile, second: SelectionFile, format: str = "float32", layouts: tuple[str, str] = ("", "")
) -> ComparedSelections:
    """Compare the keys that two engines chose for the same rows, as sets."""
    kind = number_format(format)
    a = lay_out(first, layouts[0])
    b = lay_out(second, layouts[1])
    _check_alike(a, b)
    repeats = [int(((each.sets != each.indices) & (each.indices >= 0)).any(1).sum()) for each in (a, b)]
    rows = _table(a, b, kind)
    return ComparedSelections(
        rows, a.tokens, a.indices.shape[-1], kind.name, (repeats[0], repeats[1]),
        _weight_of(a, b), _by_own_scores(a, b, torch.from_numpy(rows["class"].to_numpy() == BUG), kind),
        (a.layout, b.layout), tuple(dict.fromkeys((*first.ignored, *second.ignored))), first.module,
    )  # fmt: skip


def _check_alike(a: LaidOut, b: LaidOut) -> None:
    where = f"{a.file.name} and {b.file.name}"
    pairs = (
        ("k", a.indices.shape[-1], b.indices.shape[-1], ""),
        ("tokens", a.tokens, b.tokens, _OTHER_TOKENS),
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
    _check_types(a, b, where)
    _check_ids(a, b, where)
    _check_range(a, b)


def _check_types(a: LaidOut, b: LaidOut, where: str) -> None:
    """Refuse scores or weights of other types, and scores of other keys."""
    for what in ("scores", "weights"):
        of_a = getattr(a.file, what)
        of_b = getattr(b.file, what)
        if of_a is not None and of_b is not None and of_a.dtype != of_b.dtype:
            raise InputError(
                f"{where} differ in the type of {what}: {of_a.dtype} and {of_b.dtype}. Save both in one type."
            )
    if a.scores is not None and b.scores is not None and a.scores.shape != b.scores.shape:
        raise InputError(f"{where} differ in the number of keys: {a.scores.shape[-1]} and {b.scores.shape[-1]}.")


def _check_ids(a: LaidOut, b: LaidOut, where: str) -> None:
    """Refuse choices for other tokens."""
    if a.ids is not None and b.ids is not None and not torch.equal(a.ids, b.ids):
        fault = "are of other tokens: their ids differ. Are they of another tokenisation?"
        if torch.equal(a.ids.sort()[0], b.ids.sort()[0]):
            fault = "hold the same tokens in another order. Sort the rows of one like those of the other."
        raise InputError(f"{where} {fault}")


def _check_range(a: LaidOut, b: LaidOut) -> None:
    """Refuse keys for which there are no scores."""
    for one, each in product((a, b), (a, b)):
        keys = None if one.scores is None else one.scores.shape[-1]
        largest = int(each.indices.max())
        if keys is not None and largest >= keys:
            raise InputError(
                f"{each.file.name} names key {largest}, but {one.file.name} has scores of {keys} keys. Are they "
                f"of another tokenisation? Check one alone: semdiag selections {each.file.path}"
            )


def _weight_of(a: LaidOut, b: LaidOut) -> str:
    for name, each in (("A", a), ("B", b)):
        if each.weights is not None or each.scores is not None:
            return f"{'weights' if each.weights is not None else 'softmax of the scores'} of {name}"
    return ""


def _table(a: LaidOut, b: LaidOut, kind: NumberFormat) -> pd.DataFrame:
    overlap = overlaps(a.sets, b.sets)
    number = len(overlap)
    each = a.layers * a.heads
    layer, head = np.divmod(np.arange(number) % each, a.heads)
    differs = overlap < 1
    grade = np.where(differs.numpy(), UNEXPLAINED, SAME).astype(object)
    grade[differs.numpy()] = _explained(a, b, differs, kind)
    one, without = (b, a) if a.weight is None else (a, b)
    lost = torch.full((number,), torch.nan, dtype=torch.float64)
    if one.weight is not None:
        lost = weight_lost(one.sets, without.sets, one.weight)
    return pd.DataFrame(
        {
            "token": np.arange(number) // each, "layer": layer, "head": head, "overlap": overlap.numpy(),
            "class": pd.Categorical(grade, categories=[SAME, NUMERIC, BUG, UNEXPLAINED]), "lost": lost.numpy(),
        }
    )  # fmt: skip


def _explained(a: LaidOut, b: LaidOut, differs: Tensor, kind: NumberFormat) -> np.ndarray:
    """Return what each row that differs is: by all scores that are there, both choices must be right."""
    at = differs.nonzero().squeeze(1)
    scores = [each.scores[at] for each in (a, b) if each.scores is not None]
    if not scores or not len(at):
        return np.full(len(at), UNEXPLAINED, dtype=object)
    first = a.sets[at]
    second = b.sets[at]
    numeric = torch.ones(len(at), dtype=torch.bool)
    for each in scores:
        numeric &= _right(each, first, kind) & _right(each, second, kind)
    if len(scores) == 2:
        for one, without in ((first, second), (second, first)):
            numeric &= (_alike(scores, one.clamp(min=0), kind) | ~lacking(one, without)).all(1)
    return np.where(numeric.numpy(), NUMERIC, BUG).astype(object)


def _alike(scores: Sequence[Tensor], keys: Tensor, kind: NumberFormat) -> Tensor:
    """Return for which keys the scores of A and of B are one number, rounded by two engines.

    A key that is forbidden on one side alone is none.
    """
    first, second = (each.gather(1, keys) for each in scores)
    rounded_alike = may_swap(torch.minimum(first, second), torch.maximum(first, second), kind, engines=2)
    barred_first, barred_second = (each <= torch.finfo(each.dtype).min / 2 for each in (first, second))
    return torch.where(barred_first | barred_second, barred_first & barred_second, rounded_alike)


def _right(scores: Tensor, sets: Tensor, kind: NumberFormat, engines: int = 2) -> Tensor:
    """Return whether sets are a top-k of scores after the engines have rounded them."""
    keys = scores.shape[1]
    grade = judge_rows(scores, sets, keys, allowed_keys((len(sets),), keys), kind, engines)[0]
    faulty = torch.tensor([name in FAULTS for name in GRAVITY])
    return ~faulty[grade.long()]


def _by_own_scores(a: LaidOut, b: LaidOut, bug: Tensor, kind: NumberFormat) -> int | None:
    if a.scores is None or b.scores is None:
        return None
    if not bool(bug.any()):
        return 0
    right = [_right(each.scores[bug], each.sets[bug], kind, 1) for each in (a, b) if each.scores is not None]
    return int((right[0] & right[1]).sum())
