"""Capturing the models of semdiag_models: their attention has one hook point."""

from typing import cast

from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag_models import AttentionCore

MECHANISM = "hook"


def core_call(name: str, core: AttentionCore, inputs: tuple[object, ...], mixed: Tensor) -> AttentionCall:
    """Describe one call of an :class:`AttentionCore`.

    Args:
        name: of the module.
        core: the module.
        inputs: arguments of its forward, by position.
        mixed: what it returned.

    Returns:
        The call; its layer and occurrence are not known here.
    """
    q, k, v, scale, valid, selected = inputs
    queries = cast("Tensor | None", valid)
    return AttentionCall(
        module=name,
        layer=0,
        q=cast(Tensor, q).detach(),
        k=cast(Tensor, k).detach(),
        v=cast(Tensor, v).detach(),
        scale=cast(float, scale),
        allowed=None if queries is None else queries[:, None, None, :],
        queries=queries,
        selected=cast("Tensor | None", selected),
        mixed=mixed.detach(),
        mechanism=MECHANISM,
        dropout=core.p if core.training else 0.0,
    )
