"""Rules that choose keys (top-k, top-p, windows, random), and the keys that they keep in a call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import whole_number
from semdiag.mathematics.score_strips import largest_scores
from semdiag_models import InputError

BLOCK_SCORES = "weight", "best", "mean"
SHARING = "head", "group", "layer"


@dataclass(frozen=True)
class TopK:
    """Each query keeps its sinks, its window, and the k largest scores among its other keys.

    Of equal scores, the one at the lower position is kept. A query with no more keys than that keeps all its keys.

    Args:
        k: number of kept keys, 0 or more; or one number for each head.
        sinks: number of first keys, after padding, that are always kept.
        window: keys less than this many positions from the query are always kept; 1 keeps the query's own key.
        block: above 1, k counts blocks of this many consecutive keys, from the first key that is not padding.
        by: score of a block: ``weight``, the attention weight of its keys; ``best``, their largest score;
            ``mean``, the mean of their scores, which is the score of their mean key.
        shared: heads that keep the same keys: ``head``, each its own; ``group``, heads with the same key head;
            ``layer``, all heads of a layer. Keys are then ranked by their mean attention weight over these heads.
        every: with ``shared="layer"``, number of consecutive layers that use the keys of the first of them.
        centred: where queries also see later keys, whether ``window`` is the number of nearest keys in all, not of
            those on each side.

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

    K_i holds the largest scores until Σ_{j in K_i} p_ij ≥ p; of equal scores, the one at the lower position comes
    first.

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

    The draw depends on seed, layer, head and position, not on batch or device: it is the same for all samples and
    in every forward pass.

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
        _check(self.k, self.sinks, self.window, 1)


def Window(width: int, sinks: int = 0) -> TopK:  # noqa: N802 (reads as a kind of mask)
    """Each query keeps ``width`` keys in all: the first ``sinks`` keys, and the nearest other keys.

    In a causal model it keeps as many keys as ``TopK(width)``. In other models the window is cut off at both ends
    of the sequence, or covers the sinks; queries there keep fewer.

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


_AT_ONCE = 2**22  # scores held at a time while a mask is chosen
_SORTED = 512  # keys up to which sorting a row is faster than partitioning it
# Parts of module names whose keys and queries come from different sequences.
CROSS = ("cross", "encoder_attn", "encdec", "enc_dec", "encoder_decoder", "multihead_attn")


class SharedChoices:
    """The keys that rules keep, where layers may reuse the choice of an earlier layer."""

    def __init__(self) -> None:
        self._layer, self._chosen = 0, torch.empty(0)

    def kept(self, rule: Rule, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
        """Return the result of :func:`kept_keys`; the choice may be an earlier layer's."""
        every = rule.every if isinstance(rule, TopK) else 1
        if every == 1:
            return kept_keys(rule, call)
        batch, _, queries, _ = call.q.shape
        size = (batch, 1, queries, call.k.shape[2])
        if 0 < call.layer - self._layer < every and self._chosen.shape == size:
            whole = allowed_keys(call.part())
            kept = whole & self._chosen.to(whole.device)
            return kept | ~kept.any(-1, keepdim=True), whole
        masks = kept_keys(rule, call)
        chosen = torch.ones(size, dtype=torch.bool, device=call.q.device) if masks is None else masks[0][:, :1]
        self._layer, self._chosen = call.layer, chosen
        return masks


def kept_keys(rule: Rule, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    """Return the keys that a rule keeps for each query of a call."""
    heads, length = call.q.shape[1], call.k.shape[2]
    if isinstance(rule, TopP):
        counts = [1] * heads  # unused
    else:
        counts = _counts(rule, call)
        block = rule.block if isinstance(rule, TopK) else 1
        if min(counts) * block >= length:
            return None
    size = (len(call.q), heads, call.q.shape[2], length)
    allowed = narrowed(allowed_keys(call.part()))
    fixed = None if isinstance(rule, TopP) else _fixed(rule, call, allowed)
    free = allowed if fixed is None else allowed & ~fixed
    k = torch.tensor(counts, device=call.q.device)[:, None, None]
    if max(counts) == 0:
        kept = torch.zeros_like(free)
    elif isinstance(rule, RandomK):
        kept = _largest(_priorities(rule, call).masked_fill(~free, -torch.inf), k) & free
    else:
        order = real_first(allowed, call) if isinstance(rule, TopK) and rule.block > 1 else None
        kept = _scored(rule, k, call, free, order)
    if fixed is not None:
        kept = kept | (fixed & allowed)
    some = allowed.any(-1, keepdim=True)
    number = counted(kept)[..., None]
    if bool(((number == 0) & some).any()):  # a query without any key keeps all
        kept = kept | (allowed & (number == 0))
    if not bool((allowed & ~kept).any()):
        return None
    kept = kept if bool(some.all()) else kept | ~some
    return kept.expand(size), allowed.expand(size)


def narrowed(mask: Tensor) -> Tensor:
    """Return a mask (B, H, Lq, Lk) before expansion: with one entry for samples, or heads, that are all alike."""
    one = [slice(1) if step == 0 else slice(None) for step in mask.stride()[:2]]
    return mask[tuple(one)]


def counted(kept: Tensor) -> Tensor:
    """Return the number of true entries in each row, int32; five times faster than summing bools."""
    return kept.view(torch.uint8).sum(-1, dtype=torch.int32)


def _scored(rule: TopK | TopP, k: Tensor, call: AttentionCall, free: Tensor, order: Tensor | None) -> Tensor:
    """Return the free keys that are kept for their scores, computed for a few samples or queries at a time."""
    batch, heads, queries, _ = call.q.shape
    row = heads * call.k.shape[2]
    size, strip = max(1, _AT_ONCE // (row * queries)), max(1, _AT_ONCE // row)
    dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    parts = []
    for at in range(0, batch, size):
        samples, rows = slice(at, at + size), []
        for first in range(0, queries, strip):
            places = slice(first, first + strip)
            part = call.part(samples, places)
            own = (free if len(free) == 1 else free[samples])[:, :, places]
            scores = _hide_(part.scores(dtype), own)
            some = order if order is None or len(order) == 1 else order[samples]
            kept = _heaviest(scores, rule.p) if isinstance(rule, TopP) else _ranked(rule, k, scores, call, some)
            rows.append(kept & own)
        parts.append(rows[0] if len(rows) == 1 else torch.cat(rows, 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _hide_(scores: Tensor, free: Tensor) -> Tensor:
    """Set the scores of keys that are not free to -inf, in place; adding -inf takes a fifth of the time."""
    if bool(scores.sum().isfinite()):
        limit = torch.zeros(free.shape, dtype=scores.dtype, device=scores.device).masked_fill(~free, -torch.inf)
        return scores.add_(limit)
    return scores.masked_fill_(~free, -torch.inf)


def _counts(rule: TopK | RandomK, call: AttentionCall) -> list[int]:
    heads = call.q.shape[1]
    if isinstance(rule.k, int):
        return [rule.k] * heads
    if len(rule.k) != heads:
        raise InputError(f"{call.module} has {heads} heads; k has {len(rule.k)} numbers: {list(rule.k)}.")
    return list(rule.k)


def allowed_keys(part: AttentionCall) -> Tensor:
    """Return the keys that each query attends to without the mask, (B, H, Lq, Lk) bool."""
    size = (*part.q.shape[:3], part.k.shape[2])
    allowed = torch.ones((), dtype=torch.bool, device=part.q.device) if part.allowed is None else part.allowed
    allowed = allowed.expand(size)
    if part.selected is None:
        return allowed
    # the last column takes the position -1
    chosen = torch.zeros(*size[:3], size[3] + 1, dtype=torch.bool, device=part.q.device)
    places = part.selected.where(part.selected >= 0, size[3]).expand(*size[:3], -1)
    return chosen.scatter_(3, places, torch.ones_like(places, dtype=torch.bool))[..., :-1] & allowed


def real_first(allowed: Tensor, call: AttentionCall) -> Tensor | None:
    """Return an order of the keys that puts those before the first key that a query sees (padding) at the end."""
    first = allowed.any(1).any(1).int().argmax(-1, keepdim=True)
    if call.first_query or call.keys_before or not bool(first.any()):
        return None
    length = allowed.shape[-1]
    return (torch.arange(length, device=first.device) + first) % length


def ordered(rows: Tensor, order: Tensor | None) -> Tensor:
    """Return rows (B, …, Lk) with their keys in an order from :func:`real_first`."""
    return rows if order is None else rows.gather(-1, order[:, None, None].expand_as(rows))


def _ranked(rule: TopK, k: Tensor, scores: Tensor, call: AttentionCall, order: Tensor | None) -> Tensor:
    """Return the k largest scores, or blocks, of each head or of heads that share a choice."""
    heads, length = scores.shape[1], scores.shape[3]
    sets = {"head": heads, "group": call.k.shape[1], "layer": 1}[rule.shared]
    if sets < heads:
        several = scores.view(len(scores), sets, heads // sets, *scores.shape[2:])
        if call.sinks is not None:
            sinks = call.sinks.to(several.dtype).view(1, sets, -1, 1, 1)
            weights = (several - torch.logaddexp(several.logsumexp(-1, keepdim=True), sinks)).exp()
        else:
            weights = several.softmax(-1)
        weights, hidden = weights.nan_to_num(0).mean(2), several.amax(2) == -torch.inf
        # A weight that underflows must not become -inf, which means a hidden key.
        smallest = torch.finfo(weights.dtype).tiny
        scores, k = weights.clamp(min=smallest).log().masked_fill(hidden, -torch.inf), k[:1]
    kept = _largest(block_scores(ordered(scores, order), rule.block, rule.by), k)
    if rule.block > 1:
        back = None if order is None else order.argsort(-1)
        kept = ordered(kept.repeat_interleave(rule.block, -1)[..., :length], back)
    return kept if sets in (1, heads) else kept.repeat_interleave(heads // sets, 1)


def _heaviest(scores: Tensor, p: float) -> Tensor:
    """Return which scores are the fewest largest ones whose weights add up to p."""
    ordered, places = scores.sort(dim=-1, descending=True, stable=True)
    weights = ordered.softmax(-1).nan_to_num(0)
    before = weights.cumsum(-1) - weights  # weight of all keys before
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, places, before < p)


def _largest(values: Tensor, k: Tensor) -> Tensor:
    """Return which values are among the k largest of their row, k by head; the first of equal ones, never -inf."""
    length = values.shape[-1]
    kept = ~(values < _bound(values, k.clamp(max=length)))  # NaN counts as the largest
    doubtful = counted(kept) > k[..., 0]  # some of equal values must go
    if bool(doubtful.any()):
        number = k[..., 0].expand(doubtful.shape)[doubtful][:, None]
        count = min(int(number.max()), length - 1)
        if count == 0:
            return kept & ~doubtful[..., None]
        rows = values[doubtful]
        places = largest_scores(rows, count)[1]
        ranked = (torch.arange(count, device=k.device) < number).expand(places.shape)
        kept[doubtful] = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, places, ranked)
    return kept


def _bound(values: Tensor, k: Tensor) -> Tensor:
    """Return each row's k-th largest value (…, 1), at least the lowest finite number; +inf where k is 0."""
    length, whole = values.shape[-1], sorted(set(k.flatten().tolist()) - {0})
    if values.device.type == "cpu":  # NumPy sorts with vector instructions
        array = values.detach().numpy()
        if length > _SORTED and len(whole) == 1:
            ordered = torch.from_numpy(np.partition(array, length - whole[0], -1))
        else:
            ordered = torch.from_numpy(np.sort(array, -1))
    else:
        ordered = values.sort(-1).values
    places = (length - k).clamp(max=length - 1).expand(*values.shape[:-1], 1)
    bound = ordered.gather(-1, places).clamp(min=torch.finfo(values.dtype).min)
    return bound.masked_fill((k == 0).expand(bound.shape), torch.inf)


def block_scores(scores: Tensor, block: int, by: str = "weight") -> Tensor:
    """Return scores that rank blocks of consecutive keys: ln Σ exp(z), the largest z, or the mean z."""
    if block == 1:
        return scores
    rest = -scores.shape[-1] % block
    padded = F.pad(scores, (0, rest), value=-torch.inf)
    blocks = padded.view(*scores.shape[:-1], -1, block)
    if by == "weight":
        return blocks.logsumexp(-1)
    if by == "best":
        return blocks.amax(-1)
    seen = counted(blocks > -torch.inf) + blocks.isnan().sum(-1)
    return (blocks.nan_to_num(torch.nan, torch.inf, 0).sum(-1) / seen).masked_fill(seen == 0, -torch.inf)


def _priorities(rule: RandomK, call: AttentionCall) -> Tensor:
    size = (call.q.shape[1], call.q.shape[2], call.k.shape[2])
    generator = torch.Generator().manual_seed(rule.seed * 100_003 + 1009 * call.layer + call.occurrence)
    drawn = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(call.q.device, torch.float32 if call.q.device.type == "mps" else None)


def _fixed(rule: TopK | RandomK, call: AttentionCall, allowed: Tensor) -> Tensor | None:
    """Return the keys kept for their position alone, broadcastable to (B, H, Lq, Lk); None if there are none."""
    fixed = None
    if rule.sinks:
        real = allowed.any(1).any(1)  # (B, Lk): a key that some query sees is not padding
        if call.q.shape[2] < real.shape[1] and not bool(real[:, 0].all()):
            raise _unknown(
                call, "sinks", "its first keys are hidden: by padding or by a window of the model's own"
            )
        fixed = (real & (real.cumsum(-1) <= rule.sinks))[:, None, None]
    if rule.window:
        places = torch.arange(call.q.shape[2], device=call.q.device) + call.first_query
        if not _in_step(call, allowed, places):
            raise _unknown(
                call, "a window", "its queries and keys are different tokens, or the queries follow a cache"
            )
        back = places[:, None] - torch.arange(call.k.shape[2], device=call.q.device)
        near = back.abs() < rule.window
        if isinstance(rule, TopK) and rule.centred and bool((allowed & (back < 0)).any()):
            near = (back <= rule.window // 2) & (back > rule.window // 2 - rule.window)
        fixed = near[None, None] if fixed is None else fixed | near
    return fixed


def _in_step(call: AttentionCall, allowed: Tensor, places: Tensor) -> bool:
    """Return whether query i is the token at ``first_query + i``: by a causal rule, or as self-attention."""
    last = (allowed * torch.arange(1, allowed.shape[-1] + 1, device=allowed.device)).amax((0, 1, 3)) - 1
    if torch.equal(last, places):
        return True
    square = call.q.shape[2] == call.k.shape[2]
    return square and not any(word in call.module.lower() for word in CROSS)


def _unknown(call: AttentionCall, what: str, why: str) -> InputError:
    return InputError(
        f"{what} cannot be kept in {call.module or 'the model itself'}: {why}. Leave this kind of "
        "mask out, or give that module a rule of its own (in Python, keep={name: rule})."
    )
