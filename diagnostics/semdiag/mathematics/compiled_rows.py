"""Row statistics of long calls by compiled kernels; imported only if Numba is installed and it pays.

They compute the same as :mod:`~semdiag.mathematics.strip_statistics` does with torch, for finite scores in single
precision on the CPU.
"""

import numpy as np
import torch
from torch import Tensor

from semdiag.mathematics import row_kernels
from semdiag.mathematics.score_strips import ScoreStrip
from semdiag_models.kernels.largest_kernels import in_threads

_NUMBERS = "minimum", "largest_weight", "mean"  # one per row, in single precision


def empty_rows(shape: tuple[int, int, int], top: int) -> dict[str, Tensor]:
    """Return the memory for :func:`read_strip`, for all queries (B, H, Lq)."""
    numbers = {name: torch.zeros(shape) for name in _NUMBERS}
    rows = {"keys": torch.zeros(shape, dtype=torch.int64), "top": torch.zeros(*shape, top + 1), **numbers}
    return rows | ({"order": torch.zeros(*shape, top, dtype=torch.int32)} if top else {})


def read_strip(strip: ScoreStrip, rows: dict[str, Tensor]) -> bool:
    """Read a strip's scores without changing them, in as many threads as torch uses.

    Args:
        strip: the scores, float32, on a processor.
        rows: of :func:`empty_rows`, written to as
            :func:`~semdiag.mathematics.strip_statistics.strip_statistics` says.

    Returns:
        Whether all scores are finite; if not, what was written is useless.
    """
    b, h, r = strip.samples, strip.heads, strip.queries
    rows["keys"][b, h, r] = strip.keys()
    scores, offsets = strip.scores.numpy(), (b.start, h.start, r.start)
    allowed = None if strip.allowed is None else strip.allowed.expand(strip.scores.shape).numpy()
    order = rows["order"].numpy() if "order" in rows else np.empty((0, 0, 0, 0), np.int32)
    written = [rows[name].numpy() for name in ("keys", "top", *_NUMBERS)]

    def read(first: int, last: int) -> bool:
        return row_kernels.read_rows(scores, allowed, first, last, offsets, order, *written)

    return in_threads(read, strip.scores.shape[:3].numel())


def count_ranks_(ranks: Tensor, order: Tensor, top: Tensor, counted: Tensor | None) -> None:
    """Count how often each key has each rank.

    Args:
        ranks: (B, H, K, Lk) int32, added to in place.
        order: (B, H, Lq, K) int32, position of the key of each rank.
        top: (B, H, Lq, K+1), their scores, -inf for none.
        counted: (B, 1 or H, Lq, 1) bool, which queries count; None means all.
    """
    if counted is None:
        counted = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    everyone = counted[..., 0].expand(order.shape[:3])
    row_kernels.count_ranks(ranks.numpy(), order.numpy(), top.numpy(), everyone.numpy())
