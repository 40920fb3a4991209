"""Which tables of a model hold its tokens: those in which a forward pass looks up the very ids of its batch."""

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
    """What of a batch may be token ids: tensors (B, L) of whole numbers, unless a name says that they are not.

    Args:
        batch: a tensor, a dictionary or a tuple.

    Returns:
        The tensors by name or position, a decoder's first.

    Example:
        >>> batch = {"attention_mask": torch.ones(1, 2).long(), "ids": torch.tensor([[3, 1]])}
        >>> list(token_ids(batch))
        ['ids']
    """
    given = entries(batch)
    given.sort(key=lambda entry: entry[0] != _DECODED)
    whole = (torch.int64, torch.int32)
    return {
        name: x
        for name, x in given
        if isinstance(x, Tensor) and x.ndim == 2 and x.dtype in whole and name not in _NO_TOKENS
    }


def named_embedding(model: nn.Module) -> nn.Module | None:
    """The module that a model itself names as the embedding of its inputs, as those of transformers do.

    Args:
        model: any.

    Returns:
        The module; None if the model names none.

    Example:
        >>> named_embedding(nn.Embedding(3, 2)) is None
        True
    """
    try:
        named = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, TypeError, NotImplementedError):
        return None
    return named if isinstance(named, nn.Module) else None


class TokenTables(TorchFunctionMode):
    """Sees, inside its context, which tables are asked for the tokens of a batch.

    A table is one of tokens if what is looked up in it are the batch's ids, samples first or second, alone or with
    others before or after them. Ids that are the same in every sample and rise by the same step, as positions do,
    tell only where they are looked up without having been copied.

    Args:
        ids: of the batch, by place, from :func:`token_ids`.

    Attributes:
        tables: by place of the ids, the tables in which they were looked up.

    Example:
        >>> tokens, positions, ids = nn.Embedding(5, 2), nn.Embedding(3, 2), torch.tensor([[4, 0, 4]])
        >>> with TokenTables({"ids": ids}) as seen:
        ...     _ = tokens(ids) + positions(torch.arange(3))
        >>> [table is tokens.weight for table in seen.tables["ids"]], seen.axis(positions.weight)
        ([True], None)
    """

    def __init__(self, ids: Mapping[str | int, Tensor]) -> None:
        super().__init__()
        self._ids = ids
        self.tables: dict[str | int, list[Tensor]] = {place: [] for place in ids}
        self._axes: list[tuple[Tensor, int]] = []

    def axis(self, table: Tensor) -> int | None:
        """Axis of the samples when tokens were last looked up in a table.

        Args:
            table: (V, d), the very tensor.

        Returns:
            0 or 1; None if no tokens were.
        """
        return next((axis for known, axis in reversed(self._axes) if known is table), None)

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function, and look at what is looked up."""
        kwargs = kwargs or {}
        if func is F.embedding:
            named = dict(zip(("input", "weight"), args, strict=False)) | kwargs
            for place, ids in self._ids.items():
                axis = _axis_of(ids, named["input"])
                if axis is not None:
                    self.tables[place].append(named["weight"])
                    self._axes.append((named["weight"], axis))
        return func(*args, **kwargs)


def _axis_of(ids: Tensor, asked: Tensor) -> int | None:
    """Axis of the samples of what was looked up, (B, L') or (L', B), if ids (B, L) are among it."""
    if asked.ndim != 2:
        return None
    steps = ids.diff(dim=1)
    like_positions = not (ids != ids[:1]).any() and not (steps != steps[:, :1]).any()
    if like_positions and asked.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr():
        return None
    for axis, turned in enumerate((asked, asked.T)):
        if len(turned) == len(ids) and turned.shape[1] >= ids.shape[1] > 0:
            parts = turned.unfold(1, ids.shape[1], 1)  # (B, places, L)
            if (parts == ids.to(asked.device)[:, None]).all(2).all(0).any():
                return axis
    return None
