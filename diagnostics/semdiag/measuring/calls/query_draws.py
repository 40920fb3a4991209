"""Which queries of the attention calls of a model are looked at, where not all are."""

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from semdiag.capturing.arguments import whole_number
from semdiag.capturing.attention_call import AttentionCall
from semdiag.mathematics.query_draws import draw_queries
from semdiag_models import InputError

DRAWN = "queries were drawn:"  # how a remark about them begins
FEWEST = 2  # of one query nothing says how much the next would differ


class QueryDraws:
    """Draws the same share of the queries of every call: so many per sample and head of the longest sequence.

    N are drawn of the L queries of the longest sequence that is expected, or of the first call, if that has more.
    The share stays what it was at the first call, so that plain means are estimates; where a longer sequence comes
    later, :attr:`said` says how many are drawn of it.
    What is drawn of a sample depends on the seed, the layer and which sample it is, not on the batches.

    Args:
        count: N, queries per sample and head; None: all are looked at.
        seed: of the draws.

    Raises:
        InputError: if count is no whole number of at least 2.
    """

    def __init__(self, count: int | None, seed: int) -> None:
        if isinstance(count, Tensor):
            raise InputError("queries is how many to draw. Which of them are padding is said with real=mask.")
        if count is not None:
            whole_number(count, "Queries to draw per sample and head", FEWEST)
        self.count, self._seed, self._longest, self._started = count, seed, 1, False
        self._seen = 0  # queries of the longest sequence so far that are no padding
        self._samples: Counter[tuple[int, int]] = Counter()

    def expect(self, longest: int) -> None:
        """Say, before the first call, how long the longest sequence is.

        Args:
            longest: its queries.
        """
        self._longest = longest

    @property
    def share(self) -> float:
        """The chance of every query, N / L; 1 where all are looked at."""
        return 1.0 if self.count is None else min(1.0, self.count / self._longest)

    @property
    def said(self) -> list[str]:
        """What is to be known of the draws: how many there are of the longest sequence so far, if not N of it."""
        if self.count is None or abs(self.share * self._seen - min(self.count, self._seen)) < 1:
            return []
        return [
            f"{DRAWN} {self.share * self._seen:.3g} of {self._seen} per sample and head of the longest sequence, "
            f"not {self.count}: the share, {self.count} of {self._longest}, was set before that was seen"
        ]

    def places(self, call: AttentionCall) -> Tensor | None:
        """Draw from the queries of a call that count.

        Args:
            call: with its padded queries marked.

        Returns:
            (B, H, R) int64 positions, -1 (at the end) for none; None: all are looked at. Columns 2s and 2s + 1 are
            of stratum s.
        """
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
            own, rng = np.flatnonzero(counted), np.random.default_rng([self._seed, *place, row])
            found = draw_queries(len(own), heads, self.count, self._longest, rng)
            drawn.append(np.where(found >= 0, own[found], -1) if len(own) else found)
        places = np.full((batch, heads, max(found.shape[1] for found in drawn)), -1)
        for row, found in enumerate(drawn):
            places[row, :, : found.shape[1]] = found
        return torch.from_numpy(places).to(call.q.device)
