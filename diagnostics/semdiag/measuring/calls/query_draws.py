"""Draw which queries of a model's attention calls are looked at."""

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from semdiag.capturing.arguments import whole_number
from semdiag.capturing.attention_call import AttentionCall
from semdiag.mathematics.query_draws import draw_queries
from semdiag_models import InputError

DRAWN = "queries were drawn:"  # start of a remark about them
FEWEST = 2  # a single query shows no variation


class QueryDraws:
    """Draws the same fraction of the queries of every call: N per sample and head of the longest sequence."""

    def __init__(self, count: int | None, seed: int) -> None:
        if isinstance(count, Tensor):
            raise InputError("queries is the number to draw. To mark padding, use real=mask.")
        if count is not None:
            whole_number(count, "Queries to draw per sample and head", FEWEST)
        self.count, self.seed, self._longest, self._started = count, seed, 1, False
        self._seen = 0  # real queries of the longest sequence so far
        self._samples: Counter[tuple[int, int]] = Counter()

    def expect(self, longest: int) -> None:
        """Set, before the first call, the number of queries of the longest sequence."""
        self._longest = longest

    @property
    def share(self) -> float:
        """Probability of every query, N / L; 1 if all are looked at."""
        return 1.0 if self.count is None else min(1.0, self.count / self._longest)

    @property
    def remarks(self) -> list[str]:
        """A remark on how many are drawn of the longest sequence so far, if not N; else empty."""
        if self.count is None or abs(self.share * self._seen - min(self.count, self._seen)) < 1:
            return []
        return [
            f"{DRAWN} {self.share * self._seen:.3g} of {self._seen} per sample and head of the longest sequence, "
            f"not {self.count}: the fraction, {self.count} of {self._longest}, was fixed before it was seen"
        ]

    def places(self, call: AttentionCall) -> Tensor | None:
        """Draw from the queries of a call that count."""
        batch, heads, length, _ = call.q.shape
        if not self._started:
            self._longest, self._started = max(self._longest, length), True
        if self.count is None:
            return None
        real = np.ones((batch, length), bool) if call.queries is None else call.queries.cpu().numpy()
        self._seen = max(self._seen, int(real.sum(1).max(initial=0)))
        if self.share == 1:
            return None
        place = call.layer, call.occurrence
        first, self._samples[place] = self._samples[place], self._samples[place] + batch
        drawn = []
        for row, counted in enumerate(real, first):
            own, rng = np.flatnonzero(counted), np.random.default_rng([self.seed, *place, row])
            indices = draw_queries(len(own), heads, self.count, self._longest, rng)
            drawn.append(np.where(indices >= 0, own[indices], -1) if len(own) else indices)
        places = np.full((batch, heads, max(columns.shape[1] for columns in drawn)), -1)
        for row, columns in enumerate(drawn):
            places[row, :, : columns.shape[1]] = columns
        return torch.from_numpy(places).to(call.q.device)
