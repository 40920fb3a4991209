"""Watching a model's attention while it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from semdiag.capturing.audit import Audit, Captured
from semdiag_models import AttentionCore, InputError


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of one attention layer: everything that softmax attention is made of.

    Query i of head h sees the keys j that ``allowed`` allows and, if ``causal``, with j ≤ first_query + i:

        z_ij = scale · q_i · k_j;  z_ij ← softcap · tanh(z_ij / softcap);  z_ij ← z_ij + bias_ij
        p_ij = exp(z_ij) / (Σ_j exp(z_ij) + exp(sinks_h));  mixed_i = Σ_j p_ij v_j

    Attributes:
        module: dotted name of the module in the model; "" for the model itself.
        layer: position among the model's attention layers, from 0: in the order of the modules for models of
            semdiag_models, else in the order in which they were first called.
        q: queries (B, H, Lq, D).
        k: keys (B, Hk, Lk, D); Hk divides H, and query head h uses key head h // (H / Hk).
        v: values (B, Hk, Lk, Dv).
        scale: factor on q kᵀ, temperature included.
        allowed: bool, four axes, broadcastable to (B, H, Lq, Lk), keys that may be attended to; None means all.
            The causal rule is not repeated in it where ``causal`` says it.
        queries: (B, Lq) bool, false for padded queries; None means all count.
        selected: (B, H, Lq, S) int64 positions of the keys the model selects, -1 for none; None means all allowed.
        mixed: what the layer returned (B, H, Lq, Dv).
        bias: float, four axes, broadcastable to (B, H, Lq, Lk), finite, added to the scores after scale and
            soft-cap; None means none. Entries that forbid a key (-inf, the dtype's lowest number) are in
            ``allowed`` instead.
        softcap: scores are bent into (-softcap, softcap); None means they are not.
        sinks: (H,) one more logit per head in the softmax's denominator, without a value; None means none.
        causal: whether keys after the query's own position are forbidden, beyond what ``allowed`` says.
        first_query: position of query 0 among the keys; above 0 where earlier keys come from a cache.
        occurrence: how many calls of the same module came before in the same forward of the model. Each forward
            of the model (each step of a generation) starts from 0.
        mechanism: which adapter saw the call.
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
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    causal: bool = False
    first_query: int = 0
    occurrence: int = 0
    mechanism: str = "hook"

    def allowed_keys(self, start: int, stop: int) -> Tensor | None:
        """Which keys the queries start … stop - 1 may attend to, causal rule included.

        Args:
            start: first query.
            stop: one beyond the last; at most Lq.

        Returns:
            Bool, broadcastable to (B, H, stop - start, Lk); None means all.
        """
        allowed = self.allowed
        if allowed is not None and allowed.shape[2] > 1:
            allowed = allowed[:, :, start:stop]
        if not self.causal:
            return allowed
        query = torch.arange(self.first_query + start, self.first_query + stop, device=self.k.device)
        past = torch.arange(self.k.shape[2], device=self.k.device) <= query[:, None]
        return past if allowed is None else allowed & past


@contextmanager
def watch_attention(model: nn.Module, consume: Callable[[AttentionCall], None]) -> Iterator[Audit]:
    """Call ``consume`` for every attention call of the model inside the context.

    Forward hooks are attached to the model's :class:`AttentionCore` modules and removed when the context is
    left, by whatever way. Outputs are those of the model without hooks, to the last bit.

    Args:
        model: a model of ``semdiag_models``.
        consume: gets each call while its tensors are alive; reduce them at once, keep none.

    Yields:
        The audit: which modules have attention, what was captured and what was not. It fills while the model
        runs; the modules of a model of semdiag_models are known from the start.

    Raises:
        InputError: if the model has no attention of this kind.
    """
    cores = [(name, module) for name, module in model.named_modules() if isinstance(module, AttentionCore)]
    if not cores:
        raise InputError(
            f"No attention layer found in {type(model).__name__}. Supported are the encoders of semdiag_models "
            "and checkpoints of the paper's released code."
        )
    audit = Audit(modules=[name for name, _ in cores])

    def count(call: AttentionCall) -> None:
        audit.captured[Captured(call.module, call.mechanism)] += 1
        consume(call)

    handles = []
    try:
        for layer, (name, core) in enumerate(cores):
            handles.append(core.register_forward_hook(_hook(name, layer, count)))
        yield audit
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
            selected=selected if isinstance(selected, Tensor) else None,
            mixed=mixed,
        )
        consume(call)

    return hook
