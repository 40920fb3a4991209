"""Numba kernels for attention over selected keys, forward and backward, one query at a time.

Imported only if Numba is installed and sequences are long. A query's few keys and values are read in place, from
the nearest caches; only the weights are kept for the backward pass.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semdiag_models.kernels.largest_kernels import INF, ONE, ZERO, Floats, U, in_threads, kernel, part

Positions = NDArray[np.int64]
Strides = tuple[int, int, int]


@torch.library.custom_op("semdiag::mix_selected", mutates_args=())
def mix_selected(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, kept: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over selected keys.

    Args:
        q: queries (B, H, L, D), float32 on the CPU.
        k: keys (B, H, L, D).
        v: values (B, H, L, D).
        selected: (B, H, L, K) int64 positions of the keys, distinct in a row; -1 stands for none.
        kept: (B, H, L, K), factors on the weights, for dropout.
        scale: factor on the scores.

    Returns:
        Mixed values (B, H, L, D), zero for a query without a key, and the weights before those factors
        (B, H, L, K).

    Raises:
        IndexError: if a position is out of range.
    """
    mixed, weights = _memory(q, k, v, selected, kept, scale)
    rows: list[Any] = [_by_matrix(t) for t in (selected, kept, weights, mixed)]
    arguments = [q.shape[1], *_alike(q, k, v), *rows, scale]
    if not in_threads(lambda first, last: _mix(first, last, *arguments), len(rows[0])):
        raise IndexError(f"A selected key's position is not below {k.shape[2]}.")
    return mixed, weights


@mix_selected.register_fake
def _memory(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, kept: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the memory for the mixed values and the weights."""
    return q.new_empty(q.shape), q.new_empty(selected.shape)


@torch.library.custom_op("semdiag::mix_selected_backward", mutates_args=())
def mix_selected_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, selected: Tensor, kept: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, (B, H, L, D) each, for that of the mixed values."""
    grads: tuple[Tensor, Tensor, Tensor] = _gradients(grad, q, k, v, selected, kept, weights, scale)
    rows: list[Any] = [_by_matrix(t) for t in (selected, kept, weights, grad, *grads)]
    arguments = [q.shape[1], *_alike(q, k, v), *rows, scale]
    in_threads(lambda first, last: _differentiate(first, last, *arguments), len(rows[0]))
    return grads


@mix_selected_backward.register_fake
def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, selected: Tensor, kept: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the memory for the gradients."""
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _alike(*tables: Tensor) -> Any:
    """Return tables (B, H, L, D) as flat memory, and their common strides of batch, head and token."""
    if any(t.stride() != tables[0].stride() or t.stride(3) != 1 for t in tables):
        tables = tuple(t.contiguous() for t in tables)
    strides = tables[0].stride()
    size = 1 + sum((n - 1) * step for n, step in zip(tables[0].shape, strides, strict=True))
    return *(t.as_strided((size,), (1,)).numpy() for t in tables), strides[:3]


def _by_matrix(x: Tensor) -> Any:
    return x.contiguous().view(-1, *x.shape[2:]).numpy()


@part
def _dot(a: Floats, i: int, b: Floats, j: int, width: int) -> Any:
    total = ZERO
    for d in range(width):
        total += a[i + d] * b[j + d]
    return total


@part
def _add(factor: np.float32, a: Floats, i: int, to: Floats, j: int, width: int) -> None:
    for d in range(width):
        to[j + d] += factor * a[i + d]


@kernel(
    "boolean(int64, int64, int64, float32[::1], float32[::1], float32[::1], UniTuple(int64, 3), int64[:, :, ::1], "
    "float32[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1], float32)"
)
def _mix(
    first: int,
    last: int,
    heads: int,
    q: Floats,
    k: Floats,
    v: Floats,
    strides: Strides,
    selected: Positions,
    kept: Floats,
    weights: Floats,
    mixed: Floats,
    scale: float,
) -> bool:
    """Mix for the matrices from ``first`` to ``last``, of B·H; return whether all positions are valid."""
    length, count, width = U(selected.shape[1]), U(selected.shape[2]), U(mixed.shape[2])
    step, out = U(strides[2]), mixed.reshape(-1)
    for matrix in range(U(first), U(last)):
        start = matrix // U(heads) * U(strides[0]) + matrix % U(heads) * U(strides[1])
        for i in range(length):
            keys, w, factors, to = selected[matrix, i], weights[matrix, i], kept[matrix, i], matrix * length + i
            high = -INF
            for j in range(count):
                if keys[j] >= selected.shape[1]:
                    return False
                if keys[j] >= 0:
                    w[j] = scale * _dot(q, start + i * step, k, start + U(keys[j]) * step, width)
                    high = w[j] if w[j] > high else high
            total = ZERO
            for j in range(count):
                w[j] = math.exp(w[j] - high) if keys[j] >= 0 else ZERO
                total += w[j]
            share = ZERO if total == ZERO else ONE / total
            mixed[matrix, i] = ZERO
            for j in range(count):
                w[j] *= share
                if keys[j] >= 0:
                    _add(w[j] * factors[j], v, start + U(keys[j]) * step, out, to * width, width)
    return True


@kernel(
    "boolean(int64, int64, int64, float32[::1], float32[::1], float32[::1], UniTuple(int64, 3), int64[:, :, ::1], "
    "float32[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1], "
    "float32[:, :, ::1], float32)"
)
def _differentiate(
    first: int,
    last: int,
    heads: int,
    q: Floats,
    k: Floats,
    v: Floats,
    strides: Strides,
    selected: Positions,
    kept: Floats,
    weights: Floats,
    grad: Floats,
    d_q: Floats,
    d_k: Floats,
    d_v: Floats,
    scale: float,
) -> bool:
    """Write the gradients of the matrices from ``first`` to ``last``, of B·H."""
    length, count, width = U(selected.shape[1]), U(selected.shape[2]), U(grad.shape[2])
    step, d_weights = U(strides[2]), np.empty(selected.shape[2], np.float32)
    g, to_q, to_k, to_v = grad.reshape(-1), d_q.reshape(-1), d_k.reshape(-1), d_v.reshape(-1)
    for matrix in range(U(first), U(last)):
        start = matrix // U(heads) * U(strides[0]) + matrix % U(heads) * U(strides[1])
        own = matrix * length
        d_q[matrix] = ZERO
        d_k[matrix] = ZERO
        d_v[matrix] = ZERO
        for i in range(length):
            keys, w, factors, at = selected[matrix, i], weights[matrix, i], kept[matrix, i], (own + i) * width
            mean = ZERO
            for j in range(count):
                if keys[j] >= 0:
                    d_weights[j] = factors[j] * _dot(g, at, v, start + U(keys[j]) * step, width)
                    mean += w[j] * d_weights[j]
            for j in range(count):
                if keys[j] >= 0:
                    d_score, key = scale * w[j] * (d_weights[j] - mean), U(keys[j])
                    _add(d_score, k, start + key * step, to_q, at, width)
                    _add(d_score, q, start + i * step, to_k, (own + key) * width, width)
                    _add(factors[j] * w[j], g, at, to_v, (own + key) * width, width)
    return True
