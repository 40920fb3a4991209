"""The residual of a captured call as plain numbers."""

from typing import NamedTuple

import torch

from semdiag.capturing.attention_call import AttentionCall
from semdiag.measuring.calls.residual import residual_numbers


class Residual(NamedTuple):
    """Deviation of the attention's formula, recomputed on random rows, from the layer's output."""

    residual: float  # largest deviation, relative to the largest output of these rows
    over_rounding: float  # largest deviation in units of the possible effect of rounding on that output
    rounding: float


def recomputation_residual(call: AttentionCall, generator: torch.Generator | None = None) -> Residual:
    """Return the deviation of the attention's formula, recomputed on random rows, from the layer's output."""
    return Residual(*residual_numbers(call, generator or torch.Generator().manual_seed(0)).tolist())
