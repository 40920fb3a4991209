"""The scores of a few attention calls, kept whole."""

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.measuring.calls.scored_rows import as_mask
from semdiag_models import InputError


class KeptScores:
    """Scores by layer and occurrence, on the CPU, in float32 or the model's own if that is finer."""

    def __init__(self) -> None:
        self._scores: dict[tuple[int, int], list[Tensor]] = {}
        self._sinks: dict[tuple[int, int], Tensor | None] = {}

    def add(self, call: AttentionCall, layer: int) -> None:
        """Keep the scores of a call.

        Args:
            call: with its padded queries marked.
            layer: its number.
        """
        call = call.part()  # which says in ``allowed`` what the causal rule forbids
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
        """Return (B, H, L, Lk), −∞ where a query does not attend; forwards one below the other.

        Args:
            layer: its number.
            occurrence: which call of it in one forward.

        Raises:
            InputError: if there is no such call, or the lengths of the forwards differ.
        """
        found = self._scores.get((layer, occurrence))
        if found is None:
            layers = sorted({layer for layer, _ in self._scores})
            known = f"layers {layers[0]} to {layers[-1]}" if layers else "none: run the model inside the context"
            raise InputError(f"There are no scores of layer {layer}, occurrence {occurrence}. Kept are {known}.")
        shapes = {part.shape[1:] for part in found}
        if len(shapes) > 1:
            raise InputError(
                f"The forwards of layer {layer} differ in their lengths, so that their scores are no one tensor: "
                "capture one forward at a time."
            )
        return torch.cat(found)

    def weights(self, layer: int, occurrence: int) -> Tensor:
        """Return the softmax of :meth:`scores`, with the sink's logit in the denominator; 0 in rows without keys.

        Args:
            layer: its number.
            occurrence: which call of it in one forward.

        Raises:
            InputError: as of :meth:`scores`.
        """
        scores = self.scores(layer, occurrence)
        total = scores.logsumexp(-1, keepdim=True)
        sinks = self._sinks[layer, occurrence]
        if sinks is not None:
            total = torch.logaddexp(total, sinks[:, None, None])
        return torch.where(torch.isfinite(scores), (scores - total).exp(), 0.0)
