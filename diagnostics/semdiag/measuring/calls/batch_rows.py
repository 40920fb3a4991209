"""Relate the rows of an attention's batch axis to samples: one row each, or several (heads, windows)."""

import numpy as np
from numpy.typing import NDArray

from semdiag.capturing.attention_call import AttentionCall
from semdiag.measuring.calls.scored_rows import NotAvailableError
from semdiag.measuring.counted import counted


def rows_per_sample(rows: int, samples: int) -> int:
    """Return how many consecutive rows count as one sample."""
    return rows // samples if samples and rows % samples == 0 else 1


class SampleNumbers:
    """Numbers samples across batches; no two batches share a number, whatever counts as a sample."""

    def __init__(self) -> None:
        self._batch, self._first, self._next = 0, 0, 0

    def start(self, samples: int) -> None:
        """Start a batch with so many samples."""
        self._batch, self._first, self._next = samples, self._next, self._next + samples

    def of(self, rows: int) -> NDArray[np.int32]:
        """Return the sample number of each row of a call's batch axis."""
        numbers = self._first + np.arange(rows, dtype=np.int32) // rows_per_sample(rows, self._batch)
        self._next = max(self._next, int(numbers[-1]) + 1)
        return numbers.astype(np.int32)


def folded(rows: int, samples: int) -> str | None:
    """Say that a batch axis does not hold one row per sample."""
    if not samples or rows == samples:
        return None
    if rows % samples == 0:
        return f"its batch axis holds {rows // samples} rows per sample (heads or windows)"
    return f"its batch axis holds {counted(rows, 'row')}, but the batch has {samples} samples"


def counted_as(rows: int, samples: int) -> str:
    """Say as which sample the rows of such a batch axis count: the second half of a sentence."""
    several = rows_per_sample(rows, samples)
    if several == 1:
        return "each row counts as a sample"
    return f"the first {several} count as sample 0, and so on, which mixes samples if heads come before them"


def check_rows(call: AttentionCall, samples: int) -> None:
    """Refuse a call whose rows cannot be assigned to samples."""
    problem = folded(call.q.shape[0], samples)
    if problem is not None:
        raise NotAvailableError(
            f"the attention of {call.module or 'the model'} does not keep the samples apart: {problem}, in an "
            "unknown order; queries with four axes (batch, heads, length, width) would tell"
        )
