"""How much each block stretches its input: Jacobian norms from below, beside the bound λ_X."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from semdiag.capturing.block_calls import BlockCall, watch_blocks
from semdiag.mathematics.bounds.block_bounds import log_input_constant
from semdiag.mathematics.power_iteration import token_jacobian_norm
from semdiag.measuring.encoders.network_constants import network_forms
from semdiag.measuring.encoders.point_jacobians import blocks_at_points, log_exact_constant, log_point_constant
from semdiag.measuring.encoders.traces import trace_inputs
from semdiag_models import AttentionCore, Encoder
from semdiag_models.attention.selected_attention import plain_selected_attention

SAMPLES = 20
_COLUMNS = 2**16  # pairs of tokens whose derivatives are taken, at most: 20 inputs of 57 tokens, one of 256
# Torch's forward derivatives call something that torch itself deprecates; the words depend on the Python version.
_TORCH_DEPRECATION = r"`torch\.jit\.script` is (deprecated|not supported in Python 3\.14\+)"
Row = dict[str, Any]


class _PlainCore(AttentionCore):
    """Attention in operations that have forward derivatives; the same function as the core it replaces."""

    def __init__(self, core: AttentionCore) -> None:
        super().__init__(core.p, core.everywhere)
        self.train(core.training)

    def forward(self, *inputs: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(*inputs)

    def attend_selected(self, q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor, p: float) -> Tensor:
        return plain_selected_attention(q, k, v, scale, selected)


def block_jacobians(encoder: Encoder, tokens: Tensor, seed: int = 0) -> Iterator[Row]:
    """Yield every block's largest stretch found by power iteration, by sample."""
    tokens = tokens[:SAMPLES]
    forms = network_forms(encoder, trace_inputs(encoder, tokens))
    points = _points(encoder, tokens)
    generator = torch.Generator().manual_seed(seed)
    for layer, (block, x, valid) in enumerate(_block_inputs(encoder, tokens)):
        start = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        with plain_attention(block):
            norms = _stretch(block, x, valid, start)
        bounds = log_input_constant(forms.blocks[layer].sound).expand(len(x))
        for sample, values in enumerate(zip(*norms, bounds.tolist(), *points[layer], strict=True)):
            yield {
                "layer": layer,
                "sample": sample,
                **dict(zip(("norm", "settled", "ln_sound", "ln_point", "ln_exact"), values, strict=True)),
            }


def _points(encoder: Encoder, tokens: Tensor) -> list[tuple[list[float], list[float]]]:
    """Return closed form and exact column sum by block and sample; NaN where the exact one costs too much."""
    bounds: list[tuple[list[float], list[float]]] = [([], []) for _ in encoder.blocks]
    for sample, ids in enumerate(torch.split(tokens, 1)):
        calls: list[BlockCall] = []
        with torch.no_grad(), watch_blocks(encoder, calls.append):
            encoder(ids)
        for call in calls:
            (at,) = blocks_at_points(encoder, call, encoder.valid(ids))
            affordable = (sample + 1) * call.tokens.shape[1] ** 2 <= _COLUMNS
            bounds[call.layer][0].append(log_point_constant(at))
            bounds[call.layer][1].append(log_exact_constant(at) if affordable else math.nan)
    return bounds


@contextmanager
def plain_attention(block: nn.Module) -> Iterator[None]:
    """Let a block attend in operations that have forward derivatives, inside the context."""
    attention: Any = block.attention
    core = attention.core
    attention.core = _PlainCore(core)
    try:
        yield
    finally:
        attention.core = core


def _block_inputs(encoder: Encoder, tokens: Tensor) -> list[tuple[nn.Module, Tensor, Tensor | None]]:
    inputs_of_blocks: list[tuple[nn.Module, Tensor, Tensor | None]] = []

    def keep(block: nn.Module, inputs: tuple[Tensor, Tensor | None]) -> None:
        inputs_of_blocks.append((block, inputs[0].clone(), inputs[1]))

    handles = []
    try:
        for block in encoder.blocks:
            handles.append(block.register_forward_pre_hook(keep))
        with torch.no_grad():
            encoder(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return inputs_of_blocks


def _stretch(block: nn.Module, x: Tensor, valid: Tensor | None, start: Tensor) -> tuple[list[float], list[bool]]:
    """Return the power iteration on the block's Jacobian; padded tokens neither move nor count."""
    counted = torch.ones_like(x[..., :1]) if valid is None else valid[..., None].to(x)

    def mapped(tokens: Tensor) -> Tensor:
        moved: Tensor = block(tokens, valid) * counted
        return moved

    def jvp(tangent: Tensor) -> Tensor:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):  # torch's version decides which
                warnings.filterwarnings("ignore", _TORCH_DEPRECATION, category)
            moved: Tensor = torch.func.jvp(mapped, (x,), (tangent,))[1]
        return moved

    back = torch.func.vjp(mapped, x)[1]

    def vjp(cotangent: Tensor) -> Tensor:
        pulled: Tensor = back(cotangent)[0]
        return pulled * counted

    norm = token_jacobian_norm(jvp, vjp, start * counted)
    return norm.value.tolist(), norm.settled.tolist()
