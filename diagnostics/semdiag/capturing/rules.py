"""Rules that choose keys: top-k of keys or of blocks for tiles of queries, top-p, windows, random, thresholds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import as_whole_number, as_whole_numbers
from semdiag.mathematics.block_estimates import ESTIMATES, Estimate
from semdiag_files import InputError, unknown_name

BLOCK_SCORES = "weight", "best", "mean"
SHARING = "head", "group", "layer"


@dataclass(frozen=True)
class TopK:
    """Each query keeps its sinks, its window, and the k largest scores among its other keys.

    Of equal scores, the one at the lower position is kept. A query with no more keys than that keeps all its keys,
    and so does one whose keys are all outside its window, sinks or blocks: the audit has the number of these.

    Args:
        k: number of kept keys, 0 or more; or one number for each head.
        sinks: number of first keys, after padding, that are always kept.
        window: keys less than this many positions from the query are always kept; 1 keeps the query's own key.
        block: above 1, k counts blocks of this many consecutive keys, from the first key that is not padding.
        by: score of a block: its keys' attention ``weight``, or their largest (``best``) or ``mean`` score.
        shared: heads that keep the same keys, ranked by their mean attention weight over these heads, of all that
            the query sees: ``head``, each its own; ``group``, heads with the same key head; ``layer``, all heads.
        every: with ``shared="layer"``, number of consecutive layers that use the keys of the first of them.
        centred: whether ``window`` counts the nearest keys in all, not those on each side.
        query_block: above 1, k keys or blocks are chosen for a tile of this many consecutive queries by the scores
            of the whole tile: the mean over the heads that share a choice (of ``best`` the largest). Where queries
            see no later keys, the blocks of the tile's own positions are kept, and count among the k. Tiles begin
            at the first query that is not padding.
        estimate: in place of exact scores, the name of an estimate (mean, quest, antidiagonal, last), or a
            function like :func:`~semdiag.mathematics.block_estimates.mean_estimate`, of the tokens of one text
            without padding. It needs ``query_block``.

    Raises:
        InputError: if a number is negative, nothing is kept, or a word is unknown.

    Example:
        >>> TopK(16, sinks=4, window=64) == TopK(16, 4, 64), TopK(2, block=16, by="mean").by
        (True, 'mean')
    """

    k: int | Sequence[int]
    sinks: int = 0
    window: int = 0
    block: int = 1
    by: Literal["weight", "best", "mean"] = "weight"
    shared: Literal["head", "group", "layer"] = "head"
    every: int = 1
    centred: bool = False
    query_block: int = 1
    estimate: str | Estimate | None = None

    def __post_init__(self) -> None:
        _check(self.k, self.sinks, self.window, block=self.block, query_block=self.query_block, every=self.every)
        if self.estimate is not None and self.query_block == 1:
            raise InputError("query_block must be above 1 with an estimate. Got 1.")
        if not (self.estimate is None or callable(self.estimate) or self.estimate in ESTIMATES):
            raise unknown_name("estimate", str(self.estimate), ESTIMATES)
        if self.by not in BLOCK_SCORES or self.shared not in SHARING:
            raise InputError(
                f"by is one of {', '.join(BLOCK_SCORES)}, shared one of {', '.join(SHARING)}. Got {self.by!r}, "
                f"{self.shared!r}."
            )
        if self.every > 1 and self.shared != "layer":
            raise InputError(f'every may be above 1 only with shared="layer". Got {self.every}.')
        if self.shared != "head" and not isinstance(self.k, int):
            raise InputError(f"Heads that share their keys need a single k. Got {self.k}.")


@dataclass(frozen=True)
class TopP:
    """Each query keeps the fewest keys that hold a fraction p of its attention weight.

    K_i holds the largest scores until Σ_{j in K_i} p_ij ≥ p; of equal scores, the lower position is first.

    Source: nucleus sampling's rule, applied to attention (Lin et al. 2025, Twilight). Deviation: none.

    Args:
        p: fraction of the attention weight, above 0, at most 1.

    Raises:
        InputError: if p is outside this range.

    Example:
        >>> TopP(0.9)
        TopP(p=0.9)
    """

    p: float

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise InputError(f"p is a fraction of the attention weight, above 0 and at most 1. Got {self.p}.")


@dataclass(frozen=True)
class RandomK:
    """A control: each query keeps its sinks, its window, and k of its other keys, drawn at random.

    The draw depends on seed, layer, head and position: it is the same for all samples and in every forward pass.

    Args:
        k: number of keys drawn, 0 or more; or one number for each head.
        seed: random seed for the draw.
        sinks: number of first keys that are always kept, as in :class:`TopK`.
        window: distance within which keys are always kept, as in :class:`TopK`.

    Raises:
        InputError: if a number is negative, or nothing is kept.
    """

    k: int | Sequence[int]
    seed: int = 0
    sinks: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        _check(self.k, self.sinks, self.window)


def Window(width: int, sinks: int = 0) -> TopK:  # noqa: N802 (reads as a kind of mask)
    """Each query keeps ``width`` keys in all: the first ``sinks`` keys, and the nearest other keys.

    In a causal model it keeps as many keys as ``TopK(width)``; in others, queries near both ends keep fewer.

    Args:
        width: number of kept keys, above ``sinks``; in a causal model, the query's own key and the
            ``width - sinks - 1`` keys before it, otherwise as many on either side.
        sinks: number of first keys, after padding, that are always kept.

    Raises:
        InputError: if width is not above sinks, or sinks are negative.

    Example:
        >>> Window(64, sinks=4) == TopK(0, sinks=4, window=60, centred=True)
        True
    """
    if as_whole_number(width, "width") <= as_whole_number(sinks, "sinks"):
        raise InputError(f"A window keeps its sinks and at least 1 key more. Got width={width}, sinks={sinks}.")
    return TopK(0, sinks, width - sinks, centred=True)


@dataclass(frozen=True)
class SkipTiles:
    """Tiles of queries skip the blocks of keys whose scores all are far below the running maxima of their rows.

    A tile skips block n if max_{j in n} z_ij < max_{j in n or earlier} z_ij − λ for each of its queries i.

    Source: Yuan et al. 2025, BLASST (arXiv 2512.12087), with exp(−λ) as its threshold. Deviation: no sinks.

    Args:
        threshold: λ in nats, at least 0.
        query_block: number of queries in a tile.
        block: number of keys in a block.

    Raises:
        InputError: if the threshold is negative or no number, or a size is below 1.

    Example:
        >>> SkipTiles(8.0)
        SkipTiles(threshold=8.0, query_block=64, block=64)
    """

    threshold: float
    query_block: int = 64
    block: int = 64

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise InputError(f"A threshold is a number of nats, at least 0. Got {self.threshold}.")
        _check(1, query_block=self.query_block, block=self.block)


@dataclass(frozen=True)
class SameAs:
    """Each query keeps the keys that it kept in an earlier layer, its donor, whose mask is held until then.

    Args:
        layer: number of the donor, which has a rule of its own: ``keep={0: TopK(64), 1: SameAs(0), …}``.

    Example:
        >>> SameAs(0)
        SameAs(layer=0)
    """

    layer: int


@dataclass(frozen=True, eq=False)
class ByIndexer:
    """Each query keeps the k allowed keys that a function scores highest, the same in all heads.

    Args:
        k: number of kept keys, 1 or more; of equal scores the first key is kept.
        score: a function of queries (B, H, Lq, D) and keys (B, Hk, Lk, D) in float32 to scores (B, Lq, Lk).

    Raises:
        InputError: if k is below 1.

    Example:
        >>> ByIndexer(4, lambda q, k: (q @ k.mT).mean(1)).k
        4
    """

    k: int
    score: Callable[[Tensor, Tensor], Tensor]

    def __post_init__(self) -> None:
        as_whole_number(self.k, "k", 1)


Rule = TopK | TopP | RandomK | SkipTiles | SameAs | ByIndexer
Keep = Rule | Mapping[int | str | tuple[str, int], Rule]


def check_keep(keep: Any) -> None:
    """Refuse anything but a rule or a dictionary of rules."""
    rules = list(keep.values()) if isinstance(keep, Mapping) else [keep]
    for rule in rules:
        if not isinstance(rule, Rule):
            raise InputError(
                f"keep must be a rule like TopK(3), or a dictionary of rules by layer or module. Got {rule!r}."
            )


def rule_for(keep: Keep, call: AttentionCall) -> Rule:
    """Return the rule for one call: the only rule, or the call's entry in the mapping."""
    if isinstance(keep, Rule):
        return keep
    for key in ((call.module, call.occurrence), call.module, call.layer):
        if key in keep:
            return keep[key]
    raise InputError(
        f"keep has no rule for {call.module or 'the model itself'} (layer {call.layer}, occurrence "
        f"{call.occurrence}); it names {', '.join(map(str, keep)) or 'nothing'}."
    )


def _check(k: int | Sequence[int], sinks: int = 0, window: int = 0, **sizes: int) -> None:
    for least, named in ((0, {"sinks": sinks, "window": window}), (1, sizes)):
        for name, value in named.items():
            as_whole_number(value, name, least)
    if min(as_whole_numbers(k, "k", 0), default=0) == 0 and not sinks and not window:
        raise InputError(f"A mask must keep something: k of at least 1, sinks or a window. Got k={k}.")
