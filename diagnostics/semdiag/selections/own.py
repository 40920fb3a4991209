"""What a model chooses itself."""

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel, in_evaluation_mode
from semdiag.mathematics.rounding import NumberFormat
from semdiag.measuring.calls.running import placed
from semdiag.measuring.training_runs import token_ids
from semdiag.selections.capture import (
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
from semdiag_files import InputError, write_bytes

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
