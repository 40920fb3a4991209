"""Rules by which a mask keeps keys: top-k, top-p, blocks, sinks, window, random; per head or shared by heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from semdiag.capturing.arguments import whole_number
from semdiag.capturing.attention_call import AttentionCall
from semdiag_models import InputError

BLOCK_SCORES = "weight", "best", "mean"
SHARING = "head", "group", "layer"


@dataclass(frozen=True)
class TopK:
    """Each query keeps its sinks, its window, and the k largest scores among its other keys.

    Of equal scores, the one at the lower position is kept. A query with no more keys than that keeps them all.

    Args:
        k: how many, 0 or more; or one number for each head.
        sinks: how many of the first keys that are not padding are always kept.
        window: keys less than this many positions from the query are always kept; 1 keeps its own key only.
        block: above 1, k counts blocks of this many consecutive keys, from the first that is not padding.
        by: how blocks are ranked: ``weight``, by the attention weight of their keys; ``best``, by their largest
            score; ``mean``, by the mean of their keys' scores, which is the score of their mean key.
        shared: which heads keep the same keys: ``head``, none do; ``group``, those with the same key head;
            ``layer``, all of a layer. Keys are then ranked by their attention weight, averaged over these heads.
        every: with ``shared="layer"``, so many consecutive layers use the keys of the first of them.
        centred: where queries see later keys, too, ``window`` is the number of nearest keys in all, not of those
            on each side.

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

    def __post_init__(self) -> None:
        _check(self.k, self.sinks, self.window, self.block)
        if self.by not in BLOCK_SCORES or self.shared not in SHARING:
            raise InputError(
                f"by is one of {', '.join(BLOCK_SCORES)}, shared one of {', '.join(SHARING)}. Got {self.by!r}, "
                f"{self.shared!r}."
            )
        if whole_number(self.every, "every") < 1 or (self.every > 1 and self.shared != "layer"):
            raise InputError(f'every is at least 1, and above 1 only with shared="layer". Got {self.every}.')
        if self.shared != "head" and not isinstance(self.k, int):
            raise InputError(f"Heads that share their keys need a single k. Got {self.k}.")


@dataclass(frozen=True)
class TopP:
    """Each query keeps the fewest keys that hold a fraction p of its attention weight.

    K_i = the largest scores until Σ_{j in K_i} p_ij ≥ p; of equal scores, the one at the lower position comes
    first.

    Source: nucleus sampling's rule, applied to attention (Lin et al. 2025, Twilight). Deviation: none.

    Args:
        p: above 0, at most 1.

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

    The draw depends on seed, layer, head and position, but not on batch or device: it is the same for all samples
    and in every forward pass.

    Args:
        k: how many, 0 or more; or one number for each head.
        seed: of the draw.
        sinks: as in :class:`TopK`.
        window: as in :class:`TopK`.

    Raises:
        InputError: if a number is negative, or nothing is kept.
    """

    k: int | Sequence[int]
    seed: int = 0
    sinks: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        _check(self.k, self.sinks, self.window, 1)


def Window(width: int, sinks: int = 0) -> TopK:  # noqa: N802 (reads as a kind of mask)
    """Each query keeps ``width`` keys in all: the first ``sinks`` keys, and the others nearest to it.

    In a causal model it keeps as many keys as ``TopK(width)``. In others the window is cut off at both ends of the
    sequence, or covers the sinks: queries there keep fewer.

    Args:
        width: above ``sinks``; in a causal model, the query's own key and the ``width - sinks - 1`` before it are
            kept, otherwise as many on either side.
        sinks: how many of the first keys that are not padding are always kept.

    Raises:
        InputError: if width is not above sinks, or sinks are negative.

    Example:
        >>> Window(64, sinks=4) == TopK(0, sinks=4, window=60, centred=True)
        True
    """
    if whole_number(width, "width") <= whole_number(sinks, "sinks"):
        raise InputError(f"A window keeps its sinks and at least 1 key more. Got width={width}, sinks={sinks}.")
    return TopK(0, sinks, width - sinks, centred=True)


Rule = TopK | TopP | RandomK
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
    """Return the rule for one call: the rule itself, or the mapping's entry for the call."""
    if isinstance(keep, Rule):
        return keep
    for key in ((call.module, call.occurrence), call.module, call.layer):
        if key in keep:
            return keep[key]
    raise InputError(
        f"keep has no rule for {call.module or 'the model itself'} (layer {call.layer}, occurrence "
        f"{call.occurrence}); it names {', '.join(map(str, keep)) or 'nothing'}."
    )


def _check(k: int | Sequence[int], sinks: int, window: int, block: int) -> None:
    counts = list(k) if isinstance(k, Sequence) else [k]
    for name, value in (
        *(("k", count) for count in counts),
        ("sinks", sinks),
        ("window", window),
        ("block", block),
    ):
        whole_number(value, name)
    if not counts or min(counts) < 0 or min(sinks, window) < 0 or block < 1:
        raise InputError(
            f"k, sinks and window must be at least 0, block at least 1. Got k={k}, sinks={sinks}, "
            f"window={window}, block={block}."
        )
    if min(counts) == 0 and not sinks and not window:
        raise InputError(f"A mask must keep something: k of at least 1, sinks or a window. Got k={k}.")
