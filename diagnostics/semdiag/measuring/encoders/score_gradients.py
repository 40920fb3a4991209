"""Bound the gradient in queries and keys by the measured gradients in the mixed values."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.capturing.block_calls import BlockCall, watch_blocks
from semdiag.mathematics.bounds.point_bounds import score_gradient_sums
from semdiag.mathematics.logarithms import log, log_root_sum_squares
from semdiag.measuring.calls.scored_rows import scored_rows
from semdiag_models import Encoder

_SCORES = 2**20  # scores of one pass, at most (or one sample's)
BOUNDED_TENSORS = ("attention.q.weight", "attention.q.bias", "attention.k.weight")


def score_gradient_bounds(encoder: Encoder, tokens: Tensor, labels: Tensor) -> dict[str, float]:
    """Bound the gradient of the mean cross-entropy in W_q, b_q and W_k of every block at this point."""
    length = tokens.shape[1] + encoder.config.extra_tokens
    per_pass = max(1, _SCORES // (encoder.config.heads * length**2))
    sums = torch.zeros(len(encoder.blocks), len(BOUNDED_TENSORS), encoder.config.heads).to(tokens.device).double()
    for ids, classes in zip(torch.split(tokens, per_pass), torch.split(labels, per_pass), strict=True):
        calls: list[BlockCall] = []
        with torch.enable_grad(), _mixed_values(encoder) as mixed, watch_blocks(encoder, calls.append):
            loss = F.cross_entropy(encoder(ids), classes, reduction="sum") / len(tokens)
        for call, cotangents in zip(calls, torch.autograd.grad(loss, mixed), strict=True):
            attention = call.attention
            with torch.no_grad():
                vectors = (attention.q, attention.k, attention.v)
                weights = scored_rows(attention).weights
                sums[call.layer] += score_gradient_sums(weights, vectors, call.tokens, cotangents, attention.scale)
    logs = log_root_sum_squares(log(sums)).tolist()
    return {
        f"blocks.{layer}.{name}": value
        for layer, values in enumerate(logs)
        for name, value in zip(BOUNDED_TENSORS, values, strict=True)
    }


@contextmanager
def _mixed_values(encoder: Encoder) -> Iterator[list[Tensor]]:
    """Collect, inside the context, the output of each block's attention, with its graph."""
    outputs: list[Tensor] = []
    handles = [
        encoder.attention(layer).core.register_forward_hook(lambda core, inputs, output: outputs.append(output))
        for layer in range(len(encoder.blocks))
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
