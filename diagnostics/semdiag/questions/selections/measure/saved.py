"""A model's own selections as files, which ``semdiag selections A B`` compares."""

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semdiag.questions.selections.measure.own_rows import Choices
from semdiag_models import InputError
from semdiag_models.writing import write_bytes

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
        sizes = {
            (
                sum(len(part.indices) for part in parts),
                parts[0].indices.shape[1],
                experts * parts[0].scores.shape[1],
            )
            for parts in layers
        }
        if len(sizes) > 1:
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
    """Return rows with a filler behind them."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=filler)
