"""Find the tables that hold a model's tokens: those in which a forward pass looks up its batch's ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from semdiag.capturing.batches import Batch, entries
from semdiag.capturing.token_masks import MASK_NAMES

_DECODED = "decoder_input_ids"
_NO_TOKENS = (*MASK_NAMES, "labels", "position_ids", "token_type_ids")


def token_ids(batch: Batch) -> dict[str | int, Tensor]:
    """Return what may be token ids in a batch: tensors (B, L) of whole numbers, unless the name says otherwise."""
    given = entries(batch)
    given.sort(key=lambda entry: entry[0] != _DECODED)
    whole = (torch.int64, torch.int32)
    return {
        name: x
        for name, x in given
        if isinstance(x, Tensor) and x.ndim == 2 and x.dtype in whole and name not in _NO_TOKENS
    }


def named_embedding(model: nn.Module) -> nn.Module | None:
    """Return the module that a model names as its input embedding, as transformers' models do; None if none."""
    try:
        named = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, TypeError, NotImplementedError):
        return None
    return named if isinstance(named, nn.Module) else None


class TokenTables(TorchFunctionMode):
    """Records, inside its context, in which tables the tokens of a batch are looked up."""

    def __init__(self, ids: Mapping[str | int, Tensor]) -> None:
        super().__init__()
        self._ids = ids
        self.tables: dict[str | int, list[Tensor]] = {place: [] for place in ids}
        self._axes: list[tuple[Tensor, int]] = []

    def axis(self, table: Tensor) -> int | None:
        """Return the axis of samples at the last look-up of tokens in a table (V, d): 0 or 1; None if never."""
        return next((axis for known, axis in reversed(self._axes) if known is table), None)

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function, and record table look-ups."""
        kwargs = kwargs or {}
        if func is F.embedding:
            named = dict(zip(("input", "weight"), args, strict=False)) | kwargs
            for place, ids in self._ids.items():
                axis = _axis_of(ids, named["input"])
                if axis is not None:
                    self.tables[place].append(named["weight"])
                    self._axes.append((named["weight"], axis))
        return func(*args, **kwargs)


def _axis_of(ids: Tensor, looked_up: Tensor) -> int | None:
    """Return the axis of samples in looked-up ids (B, L') or (L', B) that contain ``ids`` (B, L); else None."""
    if looked_up.ndim != 2:
        return None
    steps = ids.diff(dim=1)
    like_positions = not (ids != ids[:1]).any() and not (steps != steps[:, :1]).any()
    if like_positions and looked_up.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr():
        return None
    for axis, turned in enumerate((looked_up, looked_up.T)):
        if len(turned) == len(ids) and turned.shape[1] >= ids.shape[1] > 0:
            parts = turned.unfold(1, ids.shape[1], 1)  # (B, places, L)
            if (parts == ids.to(looked_up.device)[:, None]).all(2).all(0).any():
                return axis
    return None
