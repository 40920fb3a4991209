"""Watching a model's attention while it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag_models import AttentionCore, InputError


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of one attention layer: everything that softmax attention is made of.

    Attributes:
        module: dotted name of the module in the model.
        layer: position among the model's attention layers, from 0.
        q: queries (B, H, Lq, D).
        k: keys (B, H, Lk, D).
        v: values (B, H, Lk, D).
        scale: factor on q kᵀ, temperature included.
        allowed: bool, broadcastable to (B, H, Lq, Lk), keys that may be attended to; None means all.
        queries: (B, Lq) bool, false for padded queries; None means all count.
        selected: (B, H, Lq, S) int64 positions of the keys the model selects, -1 for none; None means all allowed.
        mixed: what the layer returned (B, H, Lq, D).
    """

    module: str
    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    allowed: Tensor | None
    queries: Tensor | None
    selected: Tensor | None
    mixed: Tensor


@contextmanager
def watch_attention(model: nn.Module, consume: Callable[[AttentionCall], None]) -> Iterator[list[str]]:
    """Call ``consume`` for every attention call of the model inside the context.

    Forward hooks are attached to the model's :class:`AttentionCore` modules and removed when the context is
    left, by whatever way. Outputs are those of the model without hooks, to the last bit.

    Args:
        model: a model of ``semdiag_models``.
        consume: gets each call while its tensors are alive; reduce them at once, keep none.

    Yields:
        Names of the watched attention modules, in the order of their layers.

    Raises:
        InputError: if the model has no attention of this kind.
    """
    cores = [(name, module) for name, module in model.named_modules() if isinstance(module, AttentionCore)]
    if not cores:
        raise InputError(
            f"No attention layer found in {type(model).__name__}. Supported are the encoders of semdiag_models "
            "and checkpoints of the paper's released code."
        )
    handles = []
    try:
        for layer, (name, core) in enumerate(cores):
            handles.append(core.register_forward_hook(_hook(name, layer, consume)))
        yield [name for name, _ in cores]
    finally:
        for handle in handles:
            handle.remove()


def _hook(
    name: str, layer: int, consume: Callable[[AttentionCall], None]
) -> Callable[[nn.Module, tuple[object, ...], Tensor], None]:
    def hook(module: nn.Module, inputs: tuple[object, ...], mixed: Tensor) -> None:
        q, k, v, scale, valid, selected = inputs
        call = AttentionCall(
            module=name,
            layer=layer,
            q=q,  # type: ignore[arg-type]  # the signature of AttentionCore.forward
            k=k,  # type: ignore[arg-type]
            v=v,  # type: ignore[arg-type]
            scale=scale,  # type: ignore[arg-type]
            allowed=valid[:, None, None, :] if isinstance(valid, Tensor) else None,
            queries=valid if isinstance(valid, Tensor) else None,
            selected=_ragged(module, selected, valid) if isinstance(selected, Tensor) else None,
            mixed=mixed,
        )
        consume(call)

    return hook


def _ragged(core: nn.Module, selected: Tensor, valid: object) -> Tensor:
    """Fill the rows of queries that attend to all valid keys, if there are any: (B, H, L, K) -> (B, H, L, L)."""
    first, last = core.everywhere  # type: ignore[misc]  # of an AttentionCore
    if first + last == 0:
        return selected
    length = selected.shape[2]
    keys = torch.arange(length, device=selected.device).expand(len(selected), -1)
    keys = keys if not isinstance(valid, Tensor) else keys.where(valid, -1)
    whole = F.pad(selected, (0, max(0, length - selected.shape[3])), value=-1)
    for rows in (slice(first), slice(length - last, length)):
        whole[:, :, rows, :length] = keys[:, None, None, :]
    return whole
