"""The table of kinds of attention; quick to import, without torch. ``selection.py`` has their functions."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AttentionKind:
    """What a kind of attention keeps of a query's keys."""

    meaning: str  # meaning in words, for users
    keeps: Literal["all", "fixed", "redrawn", "largest", "smallest", "hashed", "clustered", "indexed", "pooled"]
    options: tuple[str, ...] = ("k",)  # fields of ModelConfig that only kinds that name them take

    @property
    def dense(self) -> bool:
        """Whether a query attends to every allowed key."""
        return self.keeps == "all"

    @property
    def input_dependent(self) -> bool:
        """Whether the kept keys depend on queries and keys, and so on the input."""
        return self.keeps not in ("all", "fixed", "redrawn")

    @property
    def changed_by_steps(self) -> bool:
        """Whether each training step moves, or counts in, a state of the selection."""
        return self.keeps in ("clustered", "indexed")


ATTENTIONS = {
    "full": AttentionKind("every query attends to every key", "all", ()),
    "banded": AttentionKind("k neighbouring keys around the query, shifted inward at the ends (input-agnostic)",
        "fixed", ("k", "global_tokens", "cls_as_key")),
    "block": AttentionKind("the k keys of the query's own block (input-agnostic)",
        "fixed", ("k", "global_tokens", "cls_as_key")),
    "topk": AttentionKind("the k keys with the largest scores (input-dependent: the heavy hitters)",
        "largest", ("k", "score_gradient", "cls_as_key")),
    "bottomk": AttentionKind("the k keys with the smallest scores (input-dependent: a control)",
        "smallest", ("k", "cls_as_key")),
    "random": AttentionKind("k keys drawn once for each block, head and query (input-agnostic: a control)",
        "fixed", ("k", "selection_seed")),
    "redrawn": AttentionKind("k keys drawn anew for each block, head and query at every forward pass, in "
        "evaluation, too", "redrawn"),
    "lsh": AttentionKind("the k keys of the query's bucket of sign hashes, in each round (input-dependent)",
        "hashed", ("k", "selection_seed", "hash_rounds", "hash_bits", "hashes")),
    "routing": AttentionKind("the k keys nearest to each centroid that has the query among its k nearest "
        "(input-dependent)", "clustered", ("k", "selection_seed", "clusters", "centroid_decay")),
    "indexer": AttentionKind("the k keys that a small head scores highest, which learns the layer's own attention "
        "(input-dependent)", "indexed", ("k", "indexer_width", "indexer_warm_up")),
    "moba": AttentionKind("the k keys of the query's own block, and of the blocks whose mean keys score highest "
        "(input-dependent)", "pooled", ("k", "chosen_blocks")),
}  # fmt: skip
LOCAL = tuple(name for name, kind in ATTENTIONS.items() if "global_tokens" in kind.options)
DRAWN = tuple(name for name, kind in ATTENTIONS.items() if "selection_seed" in kind.options)
