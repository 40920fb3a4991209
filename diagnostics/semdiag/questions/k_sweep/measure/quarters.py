"""Where in a text a mask changes what a model says, and what it changes in texts of other lengths."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.batches import Batch
from semdiag.capturing.token_masks import MASK_NAMES, PADDED
from semdiag.measuring.table import Table
from semdiag.measuring.token_tables import token_ids
from semdiag_models import InputError

QUARTERS = 4
QUARTERS_TABLE = Table(
    "rerun_quarters",
    (
        "One row per length, mask, k, sample and quarter of the sample's positions (1 to 4; padding aside) of a "
        "model that was run with masks. length: tokens of the inputs where --lengths cut them, 0 where they were "
        "taken as they are. Sums over the quarter: targets, loss (nats), predictions, divergence (nats). kept of "
        "keys: a quarter of the sample's part of all (NaN without a mask)."
    ),
    {
        "model": "str",
        "length": "int64",
        "mask": "str",
        "k": "int64",
        **dict.fromkeys(("sample", "quarter"), "int32"),
        **dict.fromkeys(("targets", "predictions"), "int64"),
        **dict.fromkeys(("loss", "divergence", "kept", "keys"), "float64"),
    },
)


def part_of(counted: Tensor, parts: Tensor | int = QUARTERS) -> Tensor:
    """Return the part of each position (B, P) among its sample's counted positions, 1 to ``parts``; 0: none."""
    before = counted.long().cumsum(1) - 1
    among = counted.sum(1, keepdim=True).clamp(min=1)
    return ((parts * before).div(among, rounding_mode="floor") + 1).where(counted, 0)


def chunk_sums(counted: Tensor, terms: Mapping[str, Tensor], chunk: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return into how many parts of at least ``chunk`` positions samples are cut, and sums over each."""
    if not chunk:
        return counted.new_ones(len(counted), dtype=torch.int64), {n: x.sum(1)[:, None] for n, x in terms.items()}
    parts = counted.sum(1).div(chunk, rounding_mode="floor").clamp(min=1)
    place = part_of(counted, parts[:, None]).clamp(min=1) - 1
    sums = {n: x.new_zeros(len(x), int(parts.max())).scatter_add_(1, place, x) for n, x in terms.items()}
    return parts, sums


def quarter_sums(counted: Tensor, terms: Mapping[str, Tensor]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield sums over each quarter of the samples' positions."""
    place = part_of(counted)
    enough = (counted.sum(1) >= QUARTERS).nonzero()[:, 0].tolist()
    for quarter in range(1, QUARTERS + 1):
        sums = {name: x.where(place == quarter, 0).sum(1).tolist() for name, x in terms.items()}
        for at in enough:
            yield quarter, at, {name: x[at] for name, x in sums.items()}


def packed(batches: Sequence[Batch], length: int, size: int) -> list[Batch]:
    """Cut the tokens of all samples, one behind the other, into pieces of a length."""
    stream = torch.cat([_real_tokens(batch) for batch in batches])
    if len(stream) < length:
        raise InputError(f"--lengths {length}: the inputs hold {len(stream)} tokens in all.")
    pieces = stream[: len(stream) // length * length].view(-1, length)
    name = _ids_of(batches[0])[0]
    parts = [pieces[first : first + size] for first in range(0, len(pieces), size)]
    return [part if name is None else {name: part} for part in parts]


def _ids_of(batch: Batch) -> tuple[str | None, Tensor, Tensor | None]:
    """Return a batch's name of ids, ids, and which of them are real."""
    if isinstance(batch, Tensor):
        ids = token_ids((batch,))
        if ids:
            return None, batch, None
    elif isinstance(batch, Mapping):
        ids = token_ids(batch)
        others = set(batch) - set(ids) - set(MASK_NAMES) - {"token_type_ids"}
        if len(ids) == 1 and not others:
            name, values = next(iter(ids.items()))
            masks = [(mask, batch[mask].bool()) for mask in MASK_NAMES if batch.get(mask) is not None]
            real = [~given if mask in PADDED else given for mask, given in masks]
            return str(name), values, real[0] if real else None
    raise InputError("--lengths cuts texts or token ids alone: leave out labels and other arguments.")


def _real_tokens(batch: Batch) -> Tensor:
    _, ids, real = _ids_of(batch)
    return ids.flatten() if real is None else ids[real]


def check_placed(path: str, again: pd.DataFrame) -> None:
    """Refuse pieces of other lengths of a model whose outputs have no distribution."""
    if not again["predictions"].sum():
        raise InputError(f"--lengths is for models that predict tokens, and of {path} the outputs are compared.")
