"""Do two engines choose alike?"""

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel, in_evaluation_mode
from semdiag.mathematics.rounding import NumberFormat, number_format
from semdiag.mathematics.selections import FAULTS, GRAVITY, allowed_keys, judge_rows, overlaps, weight_lost
from semdiag.measuring.calls.running import placed
from semdiag.measuring.training_runs import token_ids
from semdiag.questions.selections.capture import (
    Choices,
    OwnRows,
    Selected,
    Tokens,
    causal_modules,
    in_stages,
    own_rows,
    tokens_of,
    watch_selections,
)
from semdiag.questions.selections.check import LaidOut, SelectionFile, lay_out
from semdiag_models import InputError
from semdiag_models.reading import write_bytes

_OTHER_TOKENS = "Are they of another tokenisation, or is one of them padded? Then give its lengths. "
SAME, NUMERIC, BUG, UNEXPLAINED = "same", "numeric", "bug", "unexplained"


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


def compare_selections(
    first: SelectionFile, second: SelectionFile, format: str = "float32", layouts: tuple[str, str] = ("", "")
) -> ComparedSelections:
    """Compare the keys that two engines chose for the same rows, as sets."""
    kind = number_format(format)
    a, b = lay_out(first, layouts[0]), lay_out(second, layouts[1])
    _check_alike(a, b)
    repeats = [int(((each.sets != each.indices) & (each.indices >= 0)).any(1).sum()) for each in (a, b)]
    rows = _table(a, b, kind)
    return ComparedSelections(
        rows, a.tokens, a.indices.shape[-1], kind.name, (repeats[0], repeats[1]),
        _weight_of(a, b), _by_own_scores(a, b, torch.from_numpy(rows["class"].to_numpy() == BUG), kind),
        (a.layout, b.layout), tuple(dict.fromkeys((*first.ignored, *second.ignored))),
    )  # fmt: skip


def _check_alike(a: LaidOut, b: LaidOut) -> None:
    where = f"{a.file.path} and {b.file.path}"
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
    for what in ("scores", "weights"):
        of_a, of_b = getattr(a.file, what), getattr(b.file, what)
        if of_a is not None and of_b is not None and of_a.dtype != of_b.dtype:
            raise InputError(
                f"{where} differ in the type of {what}: {of_a.dtype} and {of_b.dtype}. Save both in one type."
            )
    if a.scores is not None and b.scores is not None and a.scores.shape != b.scores.shape:
        raise InputError(f"{where} differ in the number of keys: {a.scores.shape[-1]} and {b.scores.shape[-1]}.")
    if a.ids is not None and b.ids is not None and not torch.equal(a.ids, b.ids):
        fault = "are of other tokens: their ids differ. Are they of another tokenisation?"
        if torch.equal(a.ids.sort()[0], b.ids.sort()[0]):
            fault = "hold the same tokens in another order. Sort the rows of one like those of the other."
        raise InputError(f"{where} {fault}")
    for one, each in product((a, b), (a, b)):
        keys, largest = None if one.scores is None else one.scores.shape[-1], int(each.indices.max())
        if keys is not None and largest >= keys:
            raise InputError(
                f"{each.file.path} names key {largest}, but {one.file.path} has scores of {keys} keys. Are they "
                f"of another tokenisation? Check one alone: semdiag selections {each.file.path}"
            )


def _weight_of(a: LaidOut, b: LaidOut) -> str:
    for name, each in (("A", a), ("B", b)):
        if each.weights is not None or each.scores is not None:
            return f"{'weights' if each.weights is not None else 'softmax of the scores'} of {name}"
    return ""


def _table(a: LaidOut, b: LaidOut, kind: NumberFormat) -> pd.DataFrame:
    overlap = overlaps(a.sets, b.sets)
    number, each = len(overlap), a.layers * a.heads
    layer, head = np.divmod(np.arange(number) % each, a.heads)
    differs = overlap < 1
    grade = np.where(differs.numpy(), UNEXPLAINED, SAME).astype(object)
    grade[differs.numpy()] = _explained(a, b, differs, kind)
    one, other = (b, a) if a.weight is None else (a, b)
    lost = torch.full((number,), torch.nan, dtype=torch.float64)
    if one.weight is not None:
        lost = weight_lost(one.sets, other.sets, one.weight)
    return pd.DataFrame(
        {
            "token": np.arange(number) // each, "layer": layer, "head": head, "overlap": overlap.numpy(),
            "class": pd.Categorical(grade, categories=[SAME, NUMERIC, BUG, UNEXPLAINED]), "lost": lost.numpy(),
        }
    )  # fmt: skip


def _explained(a: LaidOut, b: LaidOut, differs: Tensor, kind: NumberFormat) -> np.ndarray:
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


def _by_own_scores(a: LaidOut, b: LaidOut, bug: Tensor, kind: NumberFormat) -> int | None:
    if a.scores is None or b.scores is None:
        return None
    if not bool(bug.any()):
        return 0
    right = [_right(each.scores[bug], each.sets[bug], kind, 1) for each in (a, b) if each.scores is not None]
    return int((right[0] & right[1]).sum())


_KINDS = ("experts", "keys", "blocks")
_LARGEST = 2**32  # bytes of a file


class _Part(NamedTuple):
    """What one selection chose in a batch, for the tokens that are real, and their ids if known."""

    indices: Tensor  # (T, k)
    scores: Tensor  # (T, n)
    ids: Tensor | None  # (T,)


class Saving:
    """Collects what selections chose, and writes a file for each kind of choice."""

    def __init__(self, path: Path) -> None:
        if path.suffix != ".npz":
            raise InputError(f"--save takes a file name that ends in .npz. Got {path}.")
        if not path.parent.is_dir():
            raise InputError(f"{path} cannot be written: there is no folder {path.parent}.")
        self._path = path
        self._found: dict[str, dict[tuple[str, int], list[_Part]]] = {}
        self._size = 0

    def add(self, name: str, number: int, choices: Choices, ids: Tensor | None) -> None:
        """Take what a selection chose in a batch."""
        real = choices.real
        if choices.kind == "keys":
            indices, scores = _from_the_first(choices)
        else:
            indices, scores = choices.indices, choices.order
        token_ids = ids.flatten()[real] if ids is not None and choices.shape == tuple(ids.shape) else None
        part = _Part(indices[real].int(), scores[real].float(), token_ids)
        self._size += part.scores.nbytes + part.indices.nbytes
        if self._size > _LARGEST:
            raise InputError(f"{self._path} would be larger than {_LARGEST / 2**30:g} GiB. Save fewer tokens.")
        self._found.setdefault(choices.kind, {}).setdefault((name, number), []).append(part)

    def write(self) -> list[Path]:
        """Write the file, and one beside it for each other kind of choice: FILE.keys.npz, FILE.blocks.npz."""
        kinds = [kind for kind in _KINDS if kind in self._found]
        arrays = {kind: self._arrays(kind) for kind in kinds}
        paths = [
            self._path if not place else self._path.with_suffix(f".{kind}.npz") for place, kind in enumerate(kinds)
        ]
        for path, kind in zip(paths, kinds, strict=True):
            held = io.BytesIO()
            np.savez(held, **arrays[kind])  # type: ignore[arg-type]
            try:
                write_bytes(path, held.getbuffer())
            except OSError as error:
                raise InputError(f"{path} cannot be written: {error.strerror or error}.") from None
        return paths

    def _arrays(self, kind: str) -> dict[str, NDArray[np.generic]]:
        """Return indices (T, layers, k), scores (T, layers, n) and, if known, the token ids (T,)."""
        layers = [*self._found[kind].values()]
        experts = kind == "experts"
        tokens = {sum(len(part.indices) for part in parts) for parts in layers}
        sizes = {(parts[0].indices.shape[1], experts * parts[0].scores.shape[1]) for parts in layers}
        if len(tokens) > 1 or len(sizes) > 1:
            raise InputError(
                f"{self._path} cannot be written: the layers that choose {kind} differ in their tokens, in k, or "
                "in what there is to choose from."
            )
        every = [part for parts in layers for part in parts]
        k, n = (max(rows.shape[1] for rows in each) for each in zip(*(part[:2] for part in every), strict=True))
        indices = [torch.cat([_widened(part.indices, k, -1) for part in parts]) for parts in layers]
        scores = [torch.cat([_widened(part.scores, n, -torch.inf) for part in parts]) for parts in layers]
        arrays = {"indices": torch.stack(indices, 1).numpy(), "scores": torch.stack(scores, 1).numpy()}
        ids = [part.ids for part in layers[0] if part.ids is not None]
        return arrays | ({"tokens": torch.cat(ids).numpy()} if len(ids) == len(layers[0]) else {})


def _from_the_first(choices: Choices) -> tuple[Tensor, Tensor]:
    """Return indices and scores of keys counted from the first real one, as wide as the longest sequence."""
    first, number = choices.first[:, None], choices.order.shape[1]
    lengths = choices.real.view(*choices.shape).sum(-1)
    at = first + torch.arange(int(lengths.max()))
    scores = choices.order.gather(1, at.clamp(max=number - 1)).masked_fill(at >= number, -torch.inf)
    return (choices.indices - first).masked_fill(choices.indices < 0, -1), scores


def _widened(rows: Tensor, width: int, filler: float) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=filler)


@dataclass
class OwnSelection:
    """What one selection of a model chose, in all batches."""

    module: str  # that selects
    layer: int | None  # the first number in its name; None: it has none
    parts: list[OwnRows] = field(default_factory=list)  # rows of each batch


def own_selections(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    kind: NumberFormat,
    device: torch.device,
    dtype: torch.dtype,
    saving: Saving | None = None,
) -> "OwnSelections":
    """Run a model and return what it selects."""
    model = placed(in_evaluation_mode(loaded.module), device, dtype)
    found = OwnSelections(loaded.path, kind, model, saving)
    with torch.no_grad():
        for batch in batches:
            found.run(model, batching.moved(batch, device, dtype))
    found.finish()
    if not found.selections:
        raise InputError(
            f"{loaded.path} selects nothing for its tokens: while it ran, no topk, argmax or sort of scores was "
            "seen in it whose rows are its tokens. This is for models with routers or indexers; what a selection "
            f"would cost a model without: semdiag k-sweep {loaded.path} --rerun"
        )
    return found


class OwnSelections:
    """A model's own selections, in the order in which they ran."""

    def __init__(self, path: str, kind: NumberFormat, model: nn.Module, saving: Saving | None) -> None:
        self.selections: list[OwnSelection] = []
        # number of selections whose rows are not tokens, by module and shape
        self.others: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._path, self._kind, self._causal, self._saving = path, kind, causal_modules(model), saving
        self._found: dict[tuple[str, int, str, int], OwnSelection] = {}
        self._tokens = Tokens(0, frozenset(), {})
        self._ids: Tensor | None = None
        self._failure: Exception | None = None  # ours, not the model's

    def run(self, model: nn.Module, batch: Batch) -> None:
        """Take what a model selects on a batch; exceptions of semdiag's own code are raised as they are."""
        self._tokens = tokens_of(model, batch)
        self._ids = next(iter(token_ids(batch).values()), None)
        try:
            with watch_selections(model, self._consume):
                batching.call(model, batch)
        except InputError:
            raise
        except Exception as error:  # whatever the model raises
            if error is self._failure:
                raise
            message = " ".join(str(error).split())[:200]
            raise InputError(
                f"{self._path} cannot be run on these inputs ({type(error).__name__}: {message})."
            ) from error

    def _consume(self, name: str, module: nn.Module, selected: list[Selected]) -> None:
        text = f"{name} {type(module).__name__}".lower()
        try:
            for number, (chosen, group) in enumerate(in_stages(selected)):
                self._add(name, number, text, chosen, group)
        except InputError as error:
            self._failure = InputError(f"{self._path}: {name}: {error}")
            raise self._failure from None
        except Exception as error:
            self._failure = error
            raise

    def _add(self, name: str, number: int, text: str, chosen: Selected, group: Selected | None) -> None:
        shape = tuple(chosen.scores.shape)
        found = own_rows(text, name in self._causal, self._tokens, chosen, group, self._kind)
        if found is None:
            self.others[name, shape] += 1
            return
        rows, choices = found
        layer = re.search(r"\d+", name)
        key = name, number, rows.kind, shape[-1] if rows.kind == "experts" else 0
        entry = OwnSelection(name, int(layer[0]) if layer else None)
        self._found.setdefault(key, entry).parts.append(rows)
        # not positions in a table of other choices, or what is outside all parts
        if self._saving is not None and name and not chosen.positions:
            self._saving.add(name, number, choices, None if self._ids is None else self._ids.cpu())

    def finish(self) -> None:
        """Leave out selections outside the model's parts: one for a loss, say, decides nothing in a layer."""
        inside = [entry for entry in self._found.values() if entry.module]
        for entry in self._found.values() if inside else ():
            if not entry.module:
                self.others["", (entry.parts[0].choices,)] += len(entry.parts)
        self.selections = inside or list(self._found.values())
