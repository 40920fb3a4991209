"""Capture models of semdiag_models, whose attention has one hook point."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.kept_keys import allowed_keys
from semdiag.capturing.recording import Recorder
from semdiag_models import AttentionCore, Encoder
from semdiag_models.encoder import Attention, Block

MECHANISM = "hook"
_PARTS = Encoder, Block, Attention, AttentionCore, nn.Embedding, nn.Linear, nn.ModuleList


def hooked_alone(model: nn.Module) -> bool:
    """Return whether a model is an unchanged encoder of semdiag_models, so that hooks see all its attention."""
    return type(model) is Encoder and all(
        type(part) in _PARTS
        and all(map(_own, (*part._forward_hooks.values(), *part._forward_pre_hooks.values())))
        and not any(callable(getattr(type(part), name, None)) for name in vars(part))
        for part in model.modules()
    )


def _own(hook: Callable[..., object]) -> bool:
    return getattr(hook, "__module__", "").startswith("semdiag.")


def core_call(name: str, core: AttentionCore, inputs: tuple[object, ...], mixed: Tensor) -> AttentionCall:
    """Describe one call of an :class:`AttentionCore`."""
    q, k, v, scale, valid, selected = inputs
    queries = cast("Tensor | None", valid)
    allowed = None if queries is None else queries[:, None, None, :]
    if core.apart:
        length = cast(Tensor, q).shape[2]
        apart = torch.ones(1, 1, length, length, dtype=torch.bool, device=cast(Tensor, q).device)
        apart[..., 1:, 0] = False
        allowed = apart if allowed is None else allowed & apart
    return AttentionCall(
        module=name,
        layer=0,
        q=cast(Tensor, q).detach(),
        k=cast(Tensor, k).detach(),
        v=cast(Tensor, v).detach(),
        scale=cast(float, scale),
        allowed=allowed,
        queries=queries,
        selected=_ragged(core, selected, queries) if isinstance(selected, Tensor) else None,
        mixed=mixed.detach(),
        mechanism=MECHANISM,
        dropout=core.p if core.training else 0.0,
    )


def masked_inputs(
    recorder: Recorder, core: AttentionCore, inputs: tuple[object, ...]
) -> tuple[object, ...] | None:
    """Return a core's inputs with only the keys selected that the recorder's mask keeps; None if unchanged."""
    call = core_call("", core, inputs, cast(Tensor, inputs[2]))
    kept = recorder.kept(call)
    return None if kept is None else (*inputs[:5], key_positions(kept & allowed_keys(call.part())))


def key_positions(kept: Tensor) -> Tensor:
    """Return the positions of kept keys, -1 for none: (B, H, L, L) bool -> (B, H, L, K) int64."""
    first, places = kept.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
    most = int(kept.sum(-1).max())
    return places[..., :most].masked_fill(first[..., :most] == 0, -1)


def _ragged(core: AttentionCore, selected: Tensor, valid: Tensor | None) -> Tensor:
    """Fill in the rows of queries that attend to all valid keys, if any: (B, H, L, K) -> (B, H, L, L)."""
    first, last = core.everywhere
    if first + last == 0:
        return selected
    length = selected.shape[2]
    keys = torch.arange(length, device=selected.device).expand(len(selected), -1)
    keys = keys if valid is None else keys.where(valid, -1)
    whole = F.pad(selected, (0, max(0, length - selected.shape[3])), value=-1)
    for rows in (slice(first), slice(length - last, length)):
        whole[:, :, rows, :length] = keys[:, None, None, :]
    return whole
