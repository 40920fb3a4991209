"""Keep all scores of a few attention calls."""

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.measuring.calls.scored_rows import as_mask
from semdiag_models import InputError


class KeptScores:
    """Scores by layer and occurrence, on the CPU, in float32 or the model's dtype if that is finer."""

    def __init__(self) -> None:
        self._scores: dict[tuple[int, int], list[Tensor]] = {}
        self._sinks: dict[tuple[int, int], Tensor | None] = {}

    def add(self, call: AttentionCall, layer: int) -> None:
        """Keep the scores of a call whose padded queries are marked."""
        call = call.part()  # writes the causal rule into ``allowed``
        exact = torch.promote_types(call.q.dtype, torch.float32)
        with torch.autocast(call.q.device.type, enabled=False):
            scores = call.scores(exact)
        seen = call.counted[..., None]
        seen = seen if call.allowed is None else seen & call.allowed
        seen = seen if call.selected is None else seen & as_mask(call.selected, scores.shape[-1])
        place = layer, call.occurrence
        self._scores.setdefault(place, []).append(scores.masked_fill(~seen, -torch.inf).cpu())
        self._sinks[place] = None if call.sinks is None else call.sinks.detach().to(exact).cpu()

    def scores(self, layer: int, occurrence: int) -> Tensor:
        """Return scores (B, H, L, Lk), −∞ where a query does not attend; forward passes are concatenated along B.

        Raises:
            InputError: if there is no such call, or the forward passes differ in length.
        """
        parts = self._scores.get((layer, occurrence))
        if parts is None:
            layers = sorted({layer for layer, _ in self._scores})
            known = f"layers {layers[0]} to {layers[-1]}" if layers else "none: run the model inside the context"
            raise InputError(f"There are no scores of layer {layer}, occurrence {occurrence}. Kept: {known}.")
        shapes = {part.shape[1:] for part in parts}
        if len(shapes) > 1:
            raise InputError(
                f"The forward passes of layer {layer} differ in length, so their scores do not fit one tensor: "
                "capture one forward pass at a time."
            )
        return torch.cat(parts)

    def weights(self, layer: int, occurrence: int) -> Tensor:
        """Return the softmax of :meth:`scores`, with the sink's logit in the denominator; 0 in rows without keys.

        Raises:
            InputError: as :meth:`scores`.
        """
        scores = self.scores(layer, occurrence)
        total = scores.logsumexp(-1, keepdim=True)
        sinks = self._sinks[layer, occurrence]
        if sinks is not None:
            total = torch.logaddexp(total, sinks[:, None, None])
        return torch.where(torch.isfinite(scores), (scores - total).exp(), 0.0)
