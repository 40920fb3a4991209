"""The kinds of attention, and what everything else needs to know of each: one table."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AttentionKind:
    """What a kind of attention keeps of a query's keys.

    Attributes:
        meaning: in words, for users.
        keeps: ``all`` allowed keys, a ``fixed`` set of them, or those with the ``largest`` or ``smallest`` scores.
        local: whether the fixed set lies around the query; global tokens go with these kinds alone.
        drawn: whether the fixed set is drawn, from a seed.
    """

    meaning: str
    keeps: Literal["all", "fixed", "largest", "smallest"]
    local: bool = False
    drawn: bool = False

    @property
    def dense(self) -> bool:
        """Whether a query attends to every key that is allowed."""
        return self.keeps == "all"

    @property
    def input_dependent(self) -> bool:
        """Whether the kept keys follow from the scores, and so change with the input."""
        return self.keeps in ("largest", "smallest")

    @property
    def has_bounds(self) -> bool:
        """Whether the theory bounds it: fixed sets and heavy hitters."""
        return self.keeps != "smallest"

    @property
    def ranks_scores(self) -> bool:
        """Whether its scores rank all allowed keys, the wanted first, so that any k can be asked of them."""
        return self.keeps in ("all", "largest")


ATTENTIONS = {
    "full": AttentionKind("every query attends to every key", "all"),
    "banded": AttentionKind(
        "k neighbouring keys around the query, shifted inward at the ends (input-agnostic)", "fixed", local=True
    ),
    "block": AttentionKind("the k keys of the query's own block (input-agnostic)", "fixed", local=True),
    "topk": AttentionKind("the k keys with the largest scores (input-dependent: the heavy hitters)", "largest"),
    "bottomk": AttentionKind("the k keys with the smallest scores (input-dependent: a control)", "smallest"),
    "random": AttentionKind(
        "k keys drawn once for each block, head and query (input-agnostic: a control)", "fixed", drawn=True
    ),
}
LOCAL = tuple(name for name, kind in ATTENTIONS.items() if kind.local)  # these take global tokens
DRAWN = tuple(name for name, kind in ATTENTIONS.items() if kind.drawn)  # these take a seed of their own
