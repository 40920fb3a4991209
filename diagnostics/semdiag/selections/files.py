"""A selection in a file, and its arrays in one form."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semdiag.mathematics.rounding import number_format
from semdiag.selections.arrays import array_names, read_arrays
from semdiag.selections.stages import ARRAYS
from semdiag_files import InputError, write_bytes

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
    "q_scales": ("q_scales", "q_scale"),
    "k_scales": ("k_scales", "k_scale"),
    "first": ("cu_seqlen_ks",),  # the first key of each row, and the end of its keys
    "end": ("cu_seqlen_ke",),
    **{name: (name,) for name in ARRAYS},  # of an indexer, from which its choice can be computed
    "bounds": ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seqlens_k", "query_start_loc"),  # packed
}  # fmt: skip
_ROLES = {name: role for role, names in _NAMES.items() for name in names}
_SHARED = ("lengths", "starts", "documents", "tokens")  # by all modules of a file
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
    q_scales: Tensor | None = None  # of the blocks of each query, and key
    k_scales: Tensor | None = None
    ignored: tuple[str, ...] = ()  # names of other arrays
    module: str = ""  # that chose; empty: the file names none
    stages: dict[str, Tensor] = field(default_factory=dict)  # what an indexer computed before it chose

    @property
    def name(self) -> str:
        """Return what to call it: the file, and its module."""
        return f"{self.path}, {self.module}" if self.module else str(self.path)

    @property
    def unclear(self) -> str:
        """Return why faults of its rows may be none: an ignored array that may say which keys are valid."""
        for name in self.ignored:
            if name in _PAGES:
                return f"indices may be slots of a paged cache, as it holds {name}. Give positions in the sequence"
            try:
                array = read_arrays(self.path, [name])[name]
            except InputError:  # an array of something else
                continue
            counts = (len(self.indices), len(self.indices) + 1, self.indices[..., 0].numel())
            if not array.is_floating_point() and array.ndim == 1 and len(array) in counts:
                return f"{name}, which is ignored, may say which keys are valid. Name it lengths, or leave it out"
        return ""


def read_selections(path: Path, format: str = "", limits: bool = True) -> list[SelectionFile]:
    """Read a file's selections: one, or one for each module whose name stands before its arrays' names."""
    names = array_names(path)
    modules = _modules(path, names)
    taken = {name for name in names if _parted(name)[0] in modules and _parted(name)[1] in _ROLES}
    if "" not in modules:
        taken |= {name for name in names if _ROLES.get(name) in _SHARED}
    arrays = read_arrays(path, sorted(taken))
    ignored = tuple(name for name in names if name not in taken)
    shared = {name: array for name, array in arrays.items() if "" not in modules and name in _ROLES}
    return [
        _selection(path, format, limits, module, shared | _of_module(arrays, module), ignored)
        for module in modules
    ]


def _modules(path: Path, names: list[str]) -> list[str]:
    """Return the modules whose choices a file holds, in their order; an empty name stands for none."""
    modules = list(dict.fromkeys(stem for stem, role in map(_parted, names) if role in _NAMES["indices"]))
    if not modules:
        *first_names, last = _NAMES["indices"]
        raise InputError(
            f"{path} holds no array of chosen keys: one must be there, named {', '.join(first_names)} or {last}."
        )
    if path.suffix != ".npz":  # whose arrays are in the order in which they were written
        modules.sort(key=lambda module: [int(part) if part.isdigit() else -1 for part in module.split(".")])
    return modules


def read_selection(path: Path, format: str = "", limits: bool = True) -> SelectionFile:
    """Read the only selection of a file."""
    first, *more = read_selections(path, format, limits)
    if more:
        raise InputError(f"{path} holds {len(more) + 1} selections, that of {first.module} and others.")
    return first


def _parted(name: str) -> tuple[str, str]:
    """Return the module before the name of an array, and what is behind it."""
    module, _, role = name.rpartition(".")
    return module, role


def _of_module(arrays: dict[str, Tensor], module: str) -> dict[str, Tensor]:
    return {_parted(name)[1]: array for name, array in arrays.items() if _parted(name)[0] == module}


def _selection(
    path: Path, format: str, limits: bool, module: str, arrays: dict[str, Tensor], ignored: tuple[str, ...]
) -> SelectionFile:
    bounds = {name: array for name, array in arrays.items() if _ROLES[name] == "bounds"}
    parts = _by_role(path, {name: array for name, array in arrays.items() if name not in bounds})
    first = parts.pop("first", None)
    end = parts.pop("end", None)
    if limits and end is not None and "lengths" not in parts:
        parts |= _between(path, first, end)
    if limits and bounds and not {"lengths", "documents"} & set(parts):
        parts |= _packed(path, parts["indices"], bounds)
    if "scores" in parts:
        parts["scores"] = _numbers(parts["scores"], format)
    stages = {name: parts.pop(name) for name in ARRAYS if name in parts}
    return SelectionFile(path, **parts, ignored=ignored, module=module, stages=stages)


def _by_role(path: Path, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    names: dict[str, list[str]] = {}
    for name in arrays:
        names.setdefault(_ROLES[name], []).append(name)
    for role, of_role in names.items():
        if len(of_role) > 1:
            raise InputError(f"{path} holds {' and '.join(of_role)}: which are the {role}? One must be there.")
    return {role: arrays[of_role[0]] for role, of_role in names.items()}


def _between(path: Path, first: Tensor | None, end: Tensor) -> dict[str, Tensor]:
    """Return starts and lengths of the keys between two bounds."""
    stop = _whole_of(path, end, "cu_seqlen_ke")
    start = torch.zeros_like(stop) if first is None else _whole_of(path, first, "cu_seqlen_ks")
    if start.shape != stop.shape:
        raise InputError(
            f"{path}: cu_seqlen_ks and cu_seqlen_ke must have one shape. Got {_shape(start)} and {_shape(stop)}."
        )
    return {"starts": start, "lengths": stop - start}


def _whole_of(path: Path, array: Tensor, name: str) -> Tensor:
    """Return whole numbers of a file as int64."""
    try:
        return _whole(array, name).long()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _packed(path: Path, indices: Tensor, bounds: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, array in bounds.items():
        _whole_of(path, array, name)
    rows = next((held for name, held in bounds.items() if name != "cu_seqlens_k"), next(iter(bounds.values())))
    keys = bounds.get("cu_seqlens_k", rows)
    sizes = rows.long().diff() if rows.ndim else rows.long()[None]
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


def require_suffix(path: Path, option: str, suffix: str) -> None:
    """Refuse the name of a file to be written, before anything is measured."""
    if path.suffix != suffix:
        raise InputError(f"{option} takes a file name that ends in {suffix}. Got {path}.")
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}.")


def write_output(path: Path, content: bytes | memoryview) -> None:
    """Write a file that the user named."""
    try:
        write_bytes(path, content)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}.") from None


def as_tensor(numbers: Any, name: str) -> Tensor:
    """Convert a tensor, an array of any byte order or a nested list into a tensor."""
    if isinstance(numbers, Tensor):
        if numbers.layout != torch.strided or numbers.is_meta:
            raise InputError(f"{name} must be a plain tensor that holds its numbers. Got {numbers.layout}.")
        return numbers.detach()
    try:
        array = np.asarray(numbers)
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
        with warnings.catch_warnings():  # torch warns of read-only arrays; nothing is written
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        kind = getattr(numbers, "dtype", type(numbers).__name__)
        raise InputError(f"{name} must be a tensor or an array of numbers. Got {kind}.") from None


def real_numbers(numbers: Any, name: str) -> Tensor:
    """Return floating-point numbers as float64."""
    tensor = as_tensor(numbers, name)
    if not tensor.is_floating_point():
        raise InputError(f"{name} must be floating-point numbers. Got {type_name(tensor)}.")
    return tensor.double()


def one_number(numbers: Any, name: str) -> float:
    """Return the only number of a tensor; it must be finite."""
    tensor = as_tensor(numbers, name)
    if tensor.numel() != 1 or tensor.is_complex() or not bool(tensor.double().isfinite()):
        raise InputError(f"{name} must be one finite number. Got {type_name(tensor)} of {_shape(tensor)}.")
    return float(tensor)


def chosen_keys(numbers: Any) -> Tensor:
    """Return indices (..., k), at least one row of them."""
    indices = _whole(numbers, "indices")
    if indices.ndim == 0 or not indices.numel():
        raise InputError(
            f"indices must have the shape (..., k), with at least one row and one key. Got {_shape(indices)}."
        )
    return indices[None] if indices.ndim == 1 else indices


def float_scores(numbers: Any, indices: Tensor) -> Tensor:
    """Return the scores (..., n) of the rows of some indices."""
    scores = as_tensor(numbers, "scores")
    if not scores.is_floating_point():
        raise InputError(
            f"scores must be floating-point numbers. Got {type_name(scores)}: are scores and indices swapped? "
            "Bits of bfloat16 are read with the format bfloat16."
        )
    scores = scores[None] if scores.ndim == 1 and len(indices) == 1 and indices.ndim == 2 else scores
    if scores.shape[:-1] != indices.shape[:-1] or not scores.numel():
        raise InputError(
            f"scores (..., n) and indices (..., k) must be of the same rows. Got {_shape(scores)} and "
            f"{_shape(indices)}."
        )
    check_k(indices.shape[-1], scores.shape[-1])
    return scores


def check_k(k: int, keys: int) -> None:
    """Refuse a row that chooses more keys than there are."""
    if k > keys:
        raise InputError(
            f"A row chooses k = {k:,} keys, but there are only {keys:,}. Are the scores those of the same tokens? "
            f"If the rest of each row is filled with -1, give its first {keys:,} columns."
        )


def integer_tensor(numbers: Any, name: str) -> Tensor | None:
    """Return whole numbers as int64; None for None."""
    return None if numbers is None else _whole(numbers, name).long().cpu()


def flat_rows(tensor: Tensor) -> Tensor:
    """Return (..., n) as (rows, n)."""
    return tensor.reshape(-1, tensor.shape[-1])


def _whole(numbers: Any, name: str) -> Tensor:
    tensor = as_tensor(numbers, name)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"{name} must be whole numbers. Got {type_name(tensor)}.")
    return tensor


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def type_name(tensor: Tensor) -> str:
    """Return the name of a tensor's type, without torch's."""
    return str(tensor.dtype).removeprefix("torch.")


def chosen_weights(numbers: Any, indices: Tensor) -> Tensor:
    """Return weights in the shape of some indices."""
    weights = as_tensor(numbers, "weights")
    fits = weights.numel() == indices.numel() and weights.shape[-1:] == indices.shape[-1:]
    if not weights.is_floating_point() or not fits:
        raise InputError(
            f"weights must be floating-point numbers, one for each index. Got {type_name(weights)} of "
            f"{_shape(weights)} for {_shape(indices)}."
        )
    weights = weights.reshape(indices.shape).float()
    if bool((((weights < 0) | ~weights.isfinite()) & (indices >= 0)).any()):
        raise InputError("weights must be finite and not negative.")
    return weights
