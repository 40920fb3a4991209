"""A selection in a file: indices, and optional scores, weights, lengths and tokens."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from semdiag.mathematics.selections.number_formats import number_format
from semdiag.measuring.array_files import array_names, read_arrays
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
    lengths: Tensor | None = None  # of the sequences
    starts: Tensor | None = None  # the first valid key of each
    documents: Tensor | None = None  # of each token, in packed sequences
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
    """Return the first key and the number of keys of each row of packed sequences."""
    rows = next((held for name, held in bounds.items() if name != "cu_seqlens_k"), None)
    keys = bounds.get("cu_seqlens_k", rows)
    rows = keys if rows is None else rows
    assert keys is not None
    assert rows is not None
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
