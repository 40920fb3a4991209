"""What Hugging Face's attention interface gives to a function that attends."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall

MECHANISM = "transformers attention interface"


@dataclass(frozen=True, eq=False)
class InterfaceCall:
    """The arguments of one call.

    Attributes:
        name: of the module.
        module: that attends.
        implementation: which function the model looked up.
        q: queries (B, H, Lq, D).
        k: keys (B, Hk, Lk, D).
        v: values (B, Hk, Lk, Dv).
        options: all other arguments, by name.
    """

    name: str
    module: nn.Module
    implementation: str
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    def causal(self, default: bool) -> bool:
        """Whether the causal rule is asked for; the module says so where the options do not, else the default."""
        given = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", default) if given is None else given)

    def attention(
        self,
        mixed: Tensor,
        allowed: Tensor | None,
        *,
        causal: bool,
        first_query: int,
        queries: Tensor | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        forbidding: float | None = None,
    ) -> AttentionCall:
        """Describe the attention; its layer and occurrence are not known here.

        Args:
            mixed: what the function returned, (B, Lq, H, Dv).
            allowed: as in :class:`~semdiag.capturing.attention_call.AttentionCall`, like all that follow.
            causal: its causal rule.
            first_query: position of query 0.
            queries: real ones.
            bias: on the scores.
            sinks: where the options name none.
            forbidding: constant that forbids.
        """
        scale, given = self.options.get("scaling"), self.options.get("s_aux")
        sinks = sinks if given is None else given
        return AttentionCall(
            module=self.name,
            layer=0,
            q=self.q.detach(),
            k=self.k.detach(),
            v=self.v.detach(),
            scale=1 / math.sqrt(self.q.shape[3]) if scale is None else float(scale),
            allowed=allowed,
            queries=queries,
            selected=None,
            mixed=mixed.detach().transpose(1, 2),
            bias=bias,
            softcap=self.options.get("softcap"),
            sinks=None if sinks is None else sinks.detach().flatten(),
            causal=causal,
            first_query=first_query,
            mechanism=MECHANISM,
            dropout=float(self.options.get("dropout") or 0.0),
            forbidding=forbidding,
        )
