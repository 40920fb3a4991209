"""One call of one attention layer, and the kinds of masks that its queries may have."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from semdiag.mathematics.score_strips import AttentionRows, fixed_mask_rows, heavy_hitter_rows, part_of
from semdiag_models import ATTENTIONS, AttentionKind

if TYPE_CHECKING:
    import pandas as pd

Args = tuple[Any, ...]  # of any function
Kwargs = dict[str, Any]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of one attention layer: all inputs of softmax attention, and its output.

    Query i of head h sees the keys j that ``allowed`` allows and, if ``causal``, with j ≤ first_query + i:

        z_ij = scale · q_i · k_j;  z_ij ← softcap · tanh(z_ij / softcap);  z_ij ← z_ij + bias_ij
        p_ij = exp(z_ij) / (Σ_j exp(z_ij) + exp(sinks_h));  mixed_i = Σ_j p_ij v_j

    Attributes:
        module: dotted name of the module in the model; "" for the model itself.
        layer: position among the model's attention layers, from 0; of other models in the order of first calls.
        q: queries (B, H, Lq, D).
        k: keys (B, Hk, Lk, D); Hk divides H, and query head h uses key head h // (H / Hk).
        v: values (B, Hk, Lk, Dv).
        scale: factor on q kᵀ, temperature included.
        allowed: bool, four axes, broadcastable to (B, H, Lq, Lk), keys that may be attended to; None means all.
        queries: (B, Lq) bool, false for padded queries; None means that all count.
        selected: (B, H, Lq, S) int64, positions of selected keys, -1 for none; None means all allowed keys.
        mixed: output of the attention (B, H, Lq, Dv).
        bias: float, four axes, broadcastable to (B, H, Lq, Lk), finite, added to the scores; None means none.
            Entries that forbid a key (-inf, the dtype's lowest number) are in ``allowed`` instead.
        softcap: scores are limited to (-softcap, softcap) by tanh; None means they are not.
        sinks: (H,) a further logit per head in the softmax's denominator, without a value; None means none.
        causal: whether keys after the query's own position are forbidden, beyond what ``allowed`` says.
        first_query: position of query 0 among the keys; above 0 where earlier keys come from a cache.
        keys_before: number of tokens before key 0, dropped by a cache: query 0 is token keys_before + first_query.
        occurrence: number of earlier calls of the module in this forward pass; each generation step is one.
        mechanism: adapter that saw the call.
        forbidding: finite constant by which the model forbids keys, such as -10,000; None if there is none.
        dropout: probability with which weights were dropped; above 0, ``mixed`` differs from the formula.
        fully_masked: bool, broadcastable to (B, H, Lq, Lk): where finite constants forbid a query every key, the
            keys with the largest constant, to which the model attends all the same; ``allowed`` leaves it no key.
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
    keys_before: int = 0
    occurrence: int = 0
    mechanism: str = "hook"
    dropout: float = 0.0
    forbidding: float | None = None
    fully_masked: Tensor | None = None

    @property
    def counted(self) -> Tensor:
        """(B, H, Lq) bool: queries that count, because they are not padding."""
        real = torch.ones(1, 1, dtype=torch.bool, device=self.q.device) if self.queries is None else self.queries
        return real[:, None].expand(self.q.shape[:3])

    @property
    def factored(self) -> bool:
        """Whether q and k are known; else only the scores are, as the bias, and q and k are zeros of width 1."""
        return self.q.shape[3] > 1 or bool(self.q.any()) or bool(self.k.any())

    def part(self, samples: slice | Tensor = slice(None), queries: slice | Tensor = slice(None)) -> Self:
        """Return some samples and queries, slices or positions (int64); ``allowed`` then holds the causal rule."""
        allowed = part_of(self.allowed, samples, queries)
        if self.causal:
            place = torch.arange(self.first_query, self.first_query + self.q.shape[2], device=self.k.device)
            past = torch.arange(self.k.shape[2], device=self.k.device) <= place[queries][:, None]
            allowed = past[None, None] if allowed is None else allowed & past
        parts = {n: part_of(getattr(self, n), samples, queries) for n in ("selected", "bias", "fully_masked")}
        q, mixed = (x[:, :, queries][samples] for x in (self.q, self.mixed))
        real = None if self.queries is None else self.queries[samples][:, queries]
        k = self.k[samples]
        v = self.v[samples]
        parts |= {"q": q, "k": k, "v": v, "mixed": mixed, "queries": real, "allowed": allowed}
        return replace(self, causal=False, first_query=0, **parts)  # type: ignore[arg-type]

    def averaged(self) -> Self:
        """Return the call with the keys that real, fully masked queries attend to: see ``fully_masked``."""
        if self.fully_masked is None or self.allowed is None:
            return self
        return replace(self, allowed=self.allowed | (self.fully_masked & self.counted[..., None]))

    def scores(self, dtype: torch.dtype) -> Tensor:
        """Return the scores z (B, H, Lq, Lk) in nats, also of forbidden keys; take a part of a large call."""
        keys = self.k.to(dtype).repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)
        scores = (self.q.to(dtype) * self.scale) @ keys.transpose(2, 3)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores if self.bias is None else scores + self.bias


def four_axes(tensor: Tensor, heads: int | None = None) -> Tensor:
    """Return (…, L, D) viewed as (B, H, L, D)."""
    if tensor.ndim == 2:
        return tensor[None, None]
    if tensor.ndim == 3:
        return tensor[:, None] if heads is None else tensor.reshape(-1, heads, *tensor.shape[1:])
    return tensor if tensor.ndim == 4 else tensor.flatten(0, -4)


def call_from_tensors(
    q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, *, scale: float | None = None, heads: int | None = None,
    allowed: Tensor | None = None, bias: Tensor | None = None, fully_masked: Tensor | None = None,
    full: Tensor | None = None, fused: bool = False, **fields: Any,
) -> AttentionCall:  # fmt: skip
    """Return the attention of tensors (…, L, D), with masks that broadcast to (…, Lq, Lk).

    Without sinks, ``full`` is ``fully_masked``, and its queries, but a fused function's in half precision, become
    0: such a query attends to all its keys equally. ``fields``: of :class:`AttentionCall`.
    """
    if fully_masked is None and fields.get("sinks") is None:
        fully_masked = full
    lead = mixed.shape[:-2]
    allowed, bias, fully_masked = (_mask_of_four_axes(m, lead, heads) for m in (allowed, bias, fully_masked))
    q, k, v, mixed = (four_axes(x.detach(), heads) for x in (q, k, v, mixed))
    if full is not None and fully_masked is not None and not (fused and q.dtype == torch.float16):
        q = q.masked_fill(fully_masked.any(-1, keepdim=True), 0)
    unknown: dict[str, Any] = {"module": "", "layer": 0, "queries": None, "selected": None}
    return AttentionCall(
        **(unknown | fields), q=q, k=k, v=v, mixed=mixed, allowed=allowed, bias=bias, fully_masked=fully_masked,
        scale=1 / math.sqrt(max(1, q.shape[3])) if scale is None else float(scale),
    )  # fmt: skip


def _mask_of_four_axes(mask: Tensor | None, lead: tuple[int, ...], heads: int | None) -> Tensor | None:
    """Return a mask that broadcasts to (*lead, Lq, Lk) as one that broadcasts to (B, H, Lq, Lk)."""
    if mask is None:
        return None
    if len(lead) == 2 or mask.ndim <= 2:
        return mask[(None,) * (4 - mask.ndim)]
    return four_axes(mask.expand(*lead, -1, -1), heads)


# Masks of external models allow every key, the keys up to the query's position, or other fixed sets.
KINDS = {
    **ATTENTIONS,
    "causal": AttentionKind("every query attends to the keys up to its own position", "all"),
    "masked": AttentionKind("every query attends to the keys that its mask allows", "all"),
}
DENSE = tuple(name for name, kind in KINDS.items() if kind.dense)
FIXED_MASKS = tuple(name for name, kind in KINDS.items() if kind.keeps in ("all", "fixed"))
HEAVY_HITTERS = tuple(name for name, kind in KINDS.items() if kind.keeps == "largest")
BOUNDED = tuple(name for name, kind in KINDS.items() if kind.keeps in ("all", "fixed", "largest"))
SCORED = tuple(name for name, kind in KINDS.items() if kind.keeps in ("all", "largest"))
# These kinds look for the largest scores by something cheaper than all scores.
APPROXIMATE = tuple(
    name for name, kind in KINDS.items() if kind.keeps in ("hashed", "clustered", "indexed", "pooled")
)
# An external model was not made by semdiag_models or the paper's code: only its attention is known.
EXTERNAL_SOURCES = ("hugging face", "factory", "module")


def external(models: "pd.DataFrame") -> "pd.Series[bool]":
    """Return whether each model is external: only its attention is known."""
    return models["source"].isin(EXTERNAL_SOURCES)


def mask_kind(keys: Tensor, reached: Tensor, queries: Tensor, places: Tensor | None = None) -> str:
    """Return the kind of a mask from the numbers of keys of its queries, and the keys that some head reaches."""
    counts = keys.numpy()
    reached_counts = reached.sum(-1).numpy()
    real = queries.numpy()
    if (~real | (counts == reached_counts[:, None, None])).all():
        return "full"
    both = np.broadcast_to(real[..., 1:] & real[..., :-1], counts[..., 1:].shape)
    rises = np.diff(counts, axis=-1)[both]
    steps = 1 if places is None else np.diff(places.numpy(), axis=-1)[both]
    return "causal" if len(rises) and (rises == steps).all() else "masked"


def joint_kind(kinds: set[str]) -> str:
    """Return the kind that all layers have in common, else ``masked``."""
    return next(iter(kinds)) if len(kinds) == 1 else "masked"


def rows_of_kind(kind: str, dispersion: Tensor, separation: Tensor, counts: Tensor) -> AttentionRows | None:
    """Return the rows for the bounds of a kind of attention; None for a kind that no bound covers."""
    if kind in FIXED_MASKS:
        return fixed_mask_rows(dispersion, counts)
    if kind in HEAVY_HITTERS:
        return heavy_hitter_rows(dispersion, separation, counts)
    return None
