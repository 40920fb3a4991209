"""Row statistics on a GPU: which attention calls the kernels take, without importing Triton before the first."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from semdiag.mathematics.score_strips import Scores

_WIDEST = 256  # widest head that fits a program's memory
MOST = 1024  # most scores that are ranked
_OLDEST = 8, 0  # compute capability from which matrices are multiplied in TF32 and bfloat16


def refusal(q: Tensor, selected: Tensor | None, top: int = 0) -> str | None:
    """Return what of an attention call the kernels do not know; None if they take it."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the type {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] > _WIDEST:
        return f"heads of width {q.shape[3]}, above {_WIDEST}"
    if top > MOST:
        return f"{top:,} scores of each query, above {MOST:,}"
    if selected is not None:
        return "selections as lists of keys"
    return _missing(q.device)


@cache
def _missing(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip:
        return "devices other than NVIDIA's"
    if find_spec("triton") is None:
        return "this device without the package triton"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= _OLDEST else f"devices of compute capability {capability[0]}.{capability[1]}"


def rows_by_kernels(
    scores: Scores, top: int, sinks: Tensor | None, received: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the statistics of all rows, key loads and the weights received, from kernels."""
    from semdiag.mathematics.kernels.row_kernels import kernel_rows

    with torch.cuda.device(scores.q.device):
        return kernel_rows(scores, top, sinks, received)
