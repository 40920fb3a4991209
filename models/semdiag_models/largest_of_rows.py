"""The k largest scores of each row by a Triton kernel: torch's own takes ten times as long for a small k."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 16, 8192  # largest k, and longest row


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(scores, values, positions, length, K: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    rest = tl.load(scores + row * length + column, mask=column < length, other=-float("inf"))
    for n in tl.static_range(K):
        best = tl.argmax(rest, axis=0)
        tl.store(values + row * K + n, tl.max(rest, axis=0))
        tl.store(positions + row * K + n, tl.minimum(best, length - 1).to(tl.int64))  # in the row also after NaN
        rest = tl.where(column == best, -float("inf"), rest)


@torch.library.custom_op("semdiag_models::largest_of_rows", mutates_args=())
def largest_of_rows(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row and their positions; of equal ones, the first; of -inf, any."""
    rows = scores.contiguous().view(-1, scores.shape[-1])
    values, positions = _empty(scores, k)
    width = triton.next_power_of_2(rows.shape[1])
    warps = max(1, min(8, width // 1024))
    _kernel[(len(rows),)](rows, values, positions, rows.shape[1], K=k, WIDTH=width, num_warps=warps)
    return values, positions


@largest_of_rows.register_fake
def _empty(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = *scores.shape[:-1], k
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)
