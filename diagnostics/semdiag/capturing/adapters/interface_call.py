"""The arguments of Hugging Face's attention interface."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from semdiag.capturing.adapters.cache_positions import CachedKeys, cached_keys
from semdiag.capturing.attention_call import AttentionCall

MECHANISM = "transformers attention interface"


@dataclass(frozen=True, eq=False)
class InterfaceCall:
    """The arguments of one call."""

    name: str  # of the module
    module: nn.Module  # that attends
    implementation: str  # name of the function that the model looked up
    q: Tensor  # queries (B, H, Lq, D)
    k: Tensor  # keys (B, Hk, Lk, D)
    v: Tensor  # values (B, Hk, Lk, Dv)
    options: dict[str, Any]  # all other arguments, by name

    def causal(self, default: bool) -> bool:
        """Return whether the causal rule applies: by the options, else the module, else the default."""
        given = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", default) if given is None else given)

    @cached_property
    def cached(self) -> CachedKeys | None:
        """The keys that a cache returned for it; None if they come from no watched cache."""
        return cached_keys(self.k, getattr(self.module, "layer_idx", None), self.q.shape[2])

    @property
    def more_keys(self) -> bool:
        """Whether other keys follow those from the cache."""
        return self.cached is not None and self.cached.keys < self.k.shape[2]

    @property
    def keys_before(self) -> int | None:
        """Tokens before key 0, which a cache with a window has dropped; None if it does not say how many."""
        before = None if self.cached is None else self.cached.before
        queries, keys, window = self.q.shape[2], self.k.shape[2], self.options.get("sliding_window")
        full = isinstance(window, int) and queries < keys and keys >= window + queries - 1
        return before if before is not None or full else 0

    def attention(
        self,
        mixed: Tensor,
        allowed: Tensor | None,
        *,
        causal: bool,
        first_query: int,
        keys_before: int | None = 0,
        queries: Tensor | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        forbidding: float | None = None,
    ) -> AttentionCall:
        """Describe the attention; its layer and occurrence are not known here."""
        scale, given = self.options.get("scaling"), self.options.get("s_aux")
        sinks = sinks if given is None else given
        return AttentionCall(
            module=self.name,
            layer=0,
            q=self.q.detach(),
            k=self.k.detach(),
            v=self.v.detach(),
            scale=1 / math.sqrt(max(1, self.q.shape[3])) if scale is None else float(scale),
            allowed=allowed,
            queries=queries,
            selected=None,
            mixed=mixed.detach().transpose(1, 2),
            bias=bias,
            softcap=self.options.get("softcap"),
            sinks=None if sinks is None else sinks.detach().flatten(),
            causal=causal,
            first_query=first_query,
            keys_before=keys_before or 0,
            mechanism=MECHANISM,
            dropout=float(self.options.get("dropout") or 0.0),
            forbidding=forbidding,
        )
