"""Keep all scores of a few attention calls."""

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.measuring.calls.scored_rows import as_mask
from semdiag_models import InputError


class KeptScores:
    """Scores by layer, on the CPU, in float32 or the model's dtype if that is finer."""

    def __init__(self) -> None:
        self._scores: dict[int, list[Tensor]] = {}
        self._sinks: dict[int, Tensor | None] = {}
        self._occurrences: dict[int, int] = {}

    def add(self, call: AttentionCall, layer: int) -> None:
        """Keep the scores of a call whose padded queries are marked."""
        call = call.part()  # writes the causal rule into ``allowed``
        exact = torch.promote_types(call.q.dtype, torch.float32)
        with torch.autocast(call.q.device.type, enabled=False):
            scores = call.scores(exact)
        seen = call.counted[..., None]
        seen = seen if call.allowed is None else seen & call.allowed
        seen = seen if call.selected is None else seen & as_mask(call.selected, scores.shape[-1])
        self._occurrences[layer] = call.occurrence
        self._scores.setdefault(layer, []).append(scores.masked_fill(~seen, -torch.inf).cpu())
        self._sinks[layer] = None if call.sinks is None else call.sinks.detach().to(exact).cpu()

    def scores(self, layer: int, occurrence: int | None = None) -> Tensor:
        """Return scores (B, H, L, Lk), −∞ where a query does not attend; forward passes are concatenated along B."""
        own = self._occurrences.get(layer)
        if own is None:
            known = (
                f"layers 0 to {max(self._scores)}" if self._scores else "none: run the model inside the context"
            )
            raise InputError(f"There are no scores of layer {layer}. Kept: {known}.")
        if occurrence not in (None, own):
            raise InputError(f"Layer {layer} is occurrence {own} of its module. Got {occurrence}.")
        parts = self._scores[layer]
        shapes = {part.shape[1:] for part in parts}
        if len(shapes) > 1:
            raise InputError(
                f"The forward passes of layer {layer} differ in length, so their scores do not fit one tensor: "
                "capture one forward pass at a time."
            )
        return torch.cat(parts)

    def weights(self, layer: int, occurrence: int | None = None) -> Tensor:
        """Return the softmax of :meth:`scores`, with the sink's logit in the denominator; 0 in rows without keys."""
        scores = self.scores(layer, occurrence)
        total = scores.logsumexp(-1, keepdim=True)
        sinks = self._sinks[layer]
        if sinks is not None:
            total = torch.logaddexp(total, sinks[:, None, None])
        return torch.where(torch.isfinite(scores), (scores - total).exp(), 0.0)
