"""The kinds of attention and their properties, in one table."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AttentionKind:
    """What a kind of attention keeps of a query's keys."""

    meaning: str  # in words, for users
    keeps: Literal["all", "fixed", "redrawn", "largest", "smallest", "hashed", "clustered"]
    local: bool = False  # whether the fixed set lies around the query; global tokens go with these kinds alone
    drawn: bool = False

    @property
    def dense(self) -> bool:
        """Whether a query attends to every allowed key."""
        return self.keeps == "all"

    @property
    def input_dependent(self) -> bool:
        """Whether the kept keys depend on queries and keys, and so on the input."""
        return self.keeps in ("largest", "smallest", "hashed", "clustered")

    @property
    def follows_scores(self) -> bool:
        """Whether the scores alone decide which keys are kept: the k largest or smallest."""
        return self.keeps in ("largest", "smallest")

    @property
    def has_bounds(self) -> bool:
        """Whether the theory bounds it: fixed sets and heavy hitters."""
        return self.keeps in ("all", "fixed", "largest")

    @property
    def ranks_scores(self) -> bool:
        """Whether its scores rank all allowed keys, best first, so that counterfactuals exist for any k."""
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
    "redrawn": AttentionKind(
        "k keys drawn anew for each block, head and query at every forward pass, in evaluation, too", "redrawn"
    ),
    "lsh": AttentionKind(
        "the k keys of the query's bucket of sign hashes, in each round (input-dependent)", "hashed", drawn=True
    ),
    "routing": AttentionKind(
        "the k keys nearest to each centroid that has the query among its k nearest (input-dependent)",
        "clustered",
        drawn=True,
    ),
}
LOCAL = tuple(name for name, kind in ATTENTIONS.items() if kind.local)  # these take global tokens
DRAWN = tuple(name for name, kind in ATTENTIONS.items() if kind.drawn)  # these take a selection_seed
