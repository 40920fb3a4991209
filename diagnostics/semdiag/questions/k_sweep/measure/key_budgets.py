"""Key budgets by layer and head: the table, and the budgets that keep a share of the attention weight."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.kept_keys import allowed_keys, block_scores, ordered, real_first
from semdiag.capturing.mask_rules import TopK
from semdiag.measuring.table import Table

BUDGET_TABLE = Table(
    "budgets",
    (
        "One row per budget, layer and head. k: keys, or blocks of keys if block is above 1, that each query "
        "keeps. Sums over the queries of the samples on which the budget was chosen: all_keys, the keys that they "
        "have, and kept_keys, those of them that the budget keeps."
    ),
    {
        "model": "str",
        "budget": "str",
        **dict.fromkeys(("block", "layer", "head"), "int64"),
        "module": "str",
        **dict.fromkeys(("occurrence", "k", "all_keys", "kept_keys"), "int64"),
    },
)
BY_MASS = (0.95, 0.99)  # of the attention weight
QUERIES = 0.95  # share of a head's queries for which its k must keep that weight
BLOCKS = (1, 64, 128)
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_AT_ONCE = 2**22
GREEDY = "loss"  # name of the budget that keeps the loss
Place = tuple[str, int]  # module, occurrence


@dataclass
class NeededKeys:
    """Counts how many of its largest keys, or blocks of keys, each query needs for a share of its weight."""

    min_keys: int = 1  # queries with fewer keys are left out
    layers: dict[Place, int] = field(default_factory=dict)  # number of each place
    # by place, block and level: (H, 1 + most) queries that need so many
    counts: dict[tuple[Place, int, float], NDArray[np.int64]] = field(default_factory=dict)
    ranked: dict[tuple[Place, int], NDArray[np.int64]] = field(default_factory=dict)

    def add(self, call: AttentionCall) -> None:
        """Count the queries of a call."""
        batch, heads, queries, _ = call.q.shape
        size = max(1, _AT_ONCE // (heads * queries * call.k.shape[2]))
        for at in range(0, batch, size):
            self._add(call.part(slice(at, min(at + size, batch))), call)

    def _add(self, part: AttentionCall, call: AttentionCall) -> None:
        place = call.module, call.occurrence
        self.layers.setdefault(place, call.layer)
        allowed = allowed_keys(part)
        counted = part.counted & (allowed.sum(-1) >= max(1, self.min_keys))
        order = real_first(allowed, call)
        allowed, scores = ordered(allowed, order), ordered(part.scores(torch.float64), order)
        scores = scores.masked_fill(~allowed, -torch.inf)
        weights = scores.softmax(-1).masked_fill(~allowed, 0)
        for block in BLOCKS:
            falling = block_scores(scores, block).argsort(dim=-1, descending=True, stable=True)
            ranked = _by_block(allowed.long(), block).gather(-1, falling) * counted[..., None]
            old = self.ranked.get((place, block), np.zeros((1, 1), np.int64))
            self.ranked[place, block] = _padded_sum(old, ranked.sum((0, 2)).cpu().numpy())
            if block > 1 and weights.shape[-1] <= block:
                continue
            kept = _by_block(weights, block).gather(-1, falling).cumsum(-1)
            for level in LEVELS:
                need = 1 + (kept < level).sum(-1).clamp(max=kept.shape[-1] - 1)
                for head in range(need.shape[1]):
                    counts = torch.bincount(need[:, head][counted[:, head]], minlength=kept.shape[-1] + 1)
                    self._count((place, block, level), head, need.shape[1], counts.cpu().numpy())

    def _count(self, key: tuple[Place, int, float], head: int, heads: int, counts: NDArray[np.int64]) -> None:
        old = self.counts.get(key, np.zeros((heads, 1), np.int64))
        if old.shape[1] < len(counts):
            old = np.pad(old, ((0, 0), (0, len(counts) - old.shape[1])))
        old[head, : len(counts)] += counts
        self.counts[key] = old

    def smallest(self, level: float, block: int = 1) -> dict[Place, list[int]]:
        """Return the smallest k of each head with which 95% of its queries keep a share of their weight."""
        ks = {}
        for place in self.layers:
            if (place, block, level) in self.counts:
                shares = self.counts[place, block, level].cumsum(1)
                enough = shares >= QUERIES * np.maximum(shares[:, -1:], 1)
                ks[place] = [max(1, int(k)) for k in enough.argmax(1)]
        return ks

    @property
    def blocks(self) -> list[int]:
        """Return the block sizes of which some layer has several."""
        return [block for block in BLOCKS if any(key[1] == block for key in self.counts)]

    def table(self, model: str, budgets: Mapping[tuple[str, int], Mapping[Place, Sequence[int]]]) -> pd.DataFrame:
        """Return the table of budgets."""
        rows: list[dict[str, Any]] = []
        for (name, block), budget in budgets.items():
            for place, numbers in budget.items():
                ranked = self.ranked[place, block]
                rows += [
                    {
                        "model": model,
                        "budget": name,
                        "block": block,
                        "layer": self.layers[place],
                        "head": head,
                        "module": place[0],
                        "occurrence": place[1],
                        "k": k,
                        "all_keys": ranked[head].sum(),
                        "kept_keys": ranked[head, :k].sum(),
                    }
                    for head, k in enumerate(numbers)
                ]
        return BUDGET_TABLE.of_rows(rows)


def budget_name(level: float, block: int = 1) -> str:
    """Return the name of a budget that keeps a share of the weight: ``mass-95``, ``mass-99-blocks-of-64``."""
    return f"mass-{100 * level:.0f}" + (f"-blocks-of-{block}" if block > 1 else "")


def rules(budget: Mapping[Place, Sequence[int]], block: int = 1) -> dict[int | str | Place, TopK]:
    """Return a budget as :func:`~semdiag.capturing.sparsify.sparsify` takes it."""
    return {place: TopK(tuple(numbers), block=block) for place, numbers in budget.items()}


def _padded_sum(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Add two rows of counts that may differ in length."""
    width = max(first.shape[1], second.shape[1])
    wide = (np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in (first, second))
    return np.add(*wide)


def _by_block(weights: torch.Tensor, block: int) -> torch.Tensor:
    if block == 1:
        return weights
    rest = -weights.shape[-1] % block
    return torch.nn.functional.pad(weights, (0, rest)).view(*weights.shape[:-1], -1, block).sum(-1)
