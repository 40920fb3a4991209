"""A selection in a file: indices, and optional scores, weights, lengths and tokens."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from semdiag.measuring.array_files import read_arrays
from semdiag_models import InputError

_INDICES = ("indices", "routed_experts", "topk_indices", "topk_ids")
_OTHERS = ("scores", "weights", "lengths", "starts", "documents", "tokens")


@dataclass(frozen=True, eq=False)
class SelectionFile:
    """The arrays of a selection in a file; None if it is not there.

    Attributes:
        path: of the file.
        indices: (..., k) chosen keys, -1 for none.
        scores: (..., n) of all keys.
        weights: (..., k) of the chosen keys.
        lengths: of the sequences.
        starts: their first valid keys.
        documents: of each token, in packed sequences.
        tokens: ids of the tokens.
    """

    path: Path
    indices: Tensor
    scores: Tensor | None = None
    weights: Tensor | None = None
    lengths: Tensor | None = None
    starts: Tensor | None = None
    documents: Tensor | None = None
    tokens: Tensor | None = None


def read_selection(path: Path) -> SelectionFile:
    """Read a selection.

    Args:
        path: ``.npz``, ``.safetensors`` or ``.parquet`` with ``indices`` (or ``routed_experts``,
            ``topk_indices``, ``topk_ids``), and ``scores``, ``weights``, ``lengths``, ``starts``, ``documents``,
            ``tokens`` where they are known.

    Raises:
        InputError: if it cannot be read, or does not hold indices under exactly one of their names.
    """
    arrays = read_arrays(path, (*_INDICES, *_OTHERS))
    named = [name for name in _INDICES if name in arrays]
    if len(named) != 1:
        fault = f"holds {' and '.join(named)}" if named else "holds no array of chosen keys"
        raise InputError(f"{path} {fault}: one must be there, named {', '.join(_INDICES[:-1])} or {_INDICES[-1]}.")
    return SelectionFile(path, arrays[named[0]], **{name: arrays[name] for name in _OTHERS if name in arrays})
