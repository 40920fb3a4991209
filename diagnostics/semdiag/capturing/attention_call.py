"""One call of one attention layer."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
        dropout: probability with which weights were dropped; above 0, ``mixed`` is not the formula's.
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
    dropout: float = 0.0

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
