"""Which keys a mask keeps: top-k, sinks, window, random; alike for all heads, or by layer and head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.capturing.arguments import whole_number
from semdiag.capturing.attention_call import AttentionCall
from semdiag.mathematics.largest_scores import largest_scores
from semdiag_models import InputError

_AT_ONCE = 2**22  # scores held while a mask is chosen
_CROSS = ("cross", "encoder_attn", "encdec", "enc_dec", "encoder_decoder", "multihead_attn")


@dataclass(frozen=True)
class TopK:
    """Each query keeps its sinks, its window, and the k largest scores among its other keys.

    Of equal scores the one at the lower position is kept. A query with no more keys than that keeps all.

    Args:
        k: how many, 0 or more; or one number for each head.
        sinks: how many of the first keys that are no padding are always kept.
        window: keys less than this many positions from the query are always kept: its own is the first.
        block: above 1, k counts blocks of this many consecutive keys, ranked by their attention weight.

    Raises:
        InputError: if a number is negative, or nothing is kept.

    Example:
        >>> TopK(16, sinks=4, window=64)
        TopK(k=16, sinks=4, window=64, block=1)
    """

    k: int | Sequence[int]
    sinks: int = 0
    window: int = 0
    block: int = 1

    def __post_init__(self) -> None:
        _check(self.k, self.sinks, self.window, self.block)


@dataclass(frozen=True)
class RandomK:
    """A control: each query keeps its sinks, its window, and k of its other keys, drawn at random.

    The draw depends on seed, layer, head and position, not on the batch or on the device: it is the same for all
    samples and in every forward pass.

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
    """Each query keeps the keys less than ``width`` positions from it, and the first ``sinks`` keys.

    Args:
        width: at least 1; in a causal model the query's own key and the ``width - 1`` before it.
        sinks: as in :class:`TopK`.

    Raises:
        InputError: if width is below 1 or sinks are negative.

    Example:
        >>> Window(64, sinks=4)
        TopK(k=0, sinks=4, window=64, block=1)
    """
    if whole_number(width, "width") < 1:
        raise InputError(f"A window is at least 1 key wide. Got {width}.")
    return TopK(0, sinks, width)


Rule = TopK | RandomK
Keep = Rule | Mapping[int | str | tuple[str, int], Rule]


def check_keep(keep: Any) -> None:
    """Refuse what is neither a rule nor rules by place.

    Raises:
        InputError: if it is something else.
    """
    rules = list(keep.values()) if isinstance(keep, Mapping) else [keep]
    for rule in rules:
        if not isinstance(rule, TopK | RandomK):
            raise InputError(
                f"keep is a rule like TopK(3), or a dictionary of rules by layer or module. Got {rule!r}."
            )


def rule_for(keep: Keep, call: AttentionCall) -> Rule:
    """The rule for one call: the rule itself, or what a mapping says of its place.

    Args:
        keep: a rule, or rules by layer (as the tables number them), module name, or (module name, occurrence).
        call: whose layer, module and occurrence are known.

    Raises:
        InputError: if a mapping does not name the call.
    """
    if isinstance(keep, TopK | RandomK):
        return keep
    for key in ((call.module, call.occurrence), call.module, call.layer):
        if key in keep:
            return keep[key]
    raise InputError(
        f"keep has no rule for {call.module or 'the model itself'} (layer {call.layer}, occurrence "
        f"{call.occurrence}); it names {', '.join(map(str, keep)) or 'nothing'}."
    )


def kept_keys(rule: Rule, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    """The keys that a rule leaves to each query of a call.

    A query to which a rule leaves nothing (a window in which all keys are padding) keeps all it had.

    Args:
        rule: the mask.
        call: the attention as it would be; ``v`` and ``mixed`` are not looked at.

    Returns:
        Kept and allowed keys, bool (B, H, Lq, Lk); a query without any key keeps all, as far as it is concerned.
        None if the rule drops no key of any query.

    Raises:
        InputError: if k does not fit the heads, or a window or sinks are asked for and positions are not known.
    """
    heads, length = call.q.shape[1], call.k.shape[2]
    counts = _counts(rule, call)
    block = rule.block if isinstance(rule, TopK) else 1
    if min(counts) * block >= length:
        return None
    batch, _, q_length, _ = call.q.shape
    size = max(1, _AT_ONCE // (heads * q_length * length))
    parts = [call.part(slice(at, min(at + size, batch))) for at in range(0, batch, size)]
    allowed = [allowed_keys(part) for part in parts]
    fixed = [_fixed(rule, call, part) for part in allowed]
    k = torch.tensor(counts, device=call.q.device)[:, None, None]
    kept = torch.cat([_kept(rule, k, *some) for some in zip(parts, allowed, fixed, strict=True)])
    whole = torch.cat(allowed)
    return None if torch.equal(kept, whole) else (kept | ~whole.any(-1, keepdim=True), whole)


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
            f"k, sinks and window are whole numbers from 0 on, block from 1. Got k={k}, sinks={sinks}, "
            f"window={window}, block={block}."
        )
    if min(counts) == 0 and not sinks and not window:
        raise InputError(f"A mask must keep something: k of at least 1, sinks or a window. Got k={k}.")


def _counts(rule: Rule, call: AttentionCall) -> list[int]:
    heads = call.q.shape[1]
    if isinstance(rule.k, int):
        return [rule.k] * heads
    if len(rule.k) != heads:
        raise InputError(f"{call.module} has {heads} heads; k names {len(rule.k)} of them: {list(rule.k)}.")
    return list(rule.k)


def allowed_keys(part: AttentionCall) -> Tensor:
    """(B, H, Lq, Lk) bool: the keys that each query attends to without the mask.

    Args:
        part: from :meth:`AttentionCall.part`, with the causal rule written out.
    """
    size = (*part.q.shape[:3], part.k.shape[2])
    found = torch.ones((), dtype=torch.bool, device=part.q.device) if part.allowed is None else part.allowed
    found = found.expand(size)
    if part.selected is None:
        return found
    chosen = torch.zeros(*size[:3], size[3] + 1, dtype=torch.bool, device=part.q.device)  # the last: none
    places = part.selected.where(part.selected >= 0, size[3]).expand(*size[:3], -1)
    return chosen.scatter_(3, places, torch.ones_like(places, dtype=torch.bool))[..., :-1] & found


def _kept(rule: Rule, k: Tensor, part: AttentionCall, allowed: Tensor, fixed: Tensor | None) -> Tensor:
    free = allowed if fixed is None else allowed & ~fixed
    if isinstance(rule, RandomK):
        kept = _largest(_priorities(rule, part).masked_fill(~free, -torch.inf), k)
    else:
        dtype = torch.float64 if part.q.dtype == torch.float64 else torch.float32
        kept = _largest(block_scores(part.scores(dtype).masked_fill(~free, -torch.inf), rule.block), k)
        if rule.block > 1:
            kept = kept.repeat_interleave(rule.block, -1)[..., : allowed.shape[-1]]
    kept = kept & free
    if fixed is not None:
        kept |= fixed & allowed
    return kept | (allowed & ~kept.any(-1, keepdim=True))


def _largest(values: Tensor, k: Tensor) -> Tensor:
    """Whether each value is among the k largest of its row, k by head; ties go to the lower position."""
    length = values.shape[-1]
    whole = k >= length
    count = int(k.masked_fill(whole, 0).max())
    found = torch.zeros_like(values, dtype=torch.bool) | whole
    if count == 0:
        return found
    places = largest_scores(values, count)[1]
    ranked = (torch.arange(count, device=k.device) < k).expand(places.shape)
    return torch.zeros_like(found).scatter_(-1, places, ranked) | whole


def block_scores(scores: Tensor, block: int) -> Tensor:
    """ln Σ exp(z) of each block of consecutive keys, by which blocks are ranked.

    Args:
        scores: (…, Lk), -inf where a key is hidden.
        block: keys in a block; the last may have fewer.

    Returns:
        (…, ⌈Lk / block⌉).

    Example:
        >>> block_scores(torch.tensor([0.0, 0.0, -torch.inf]), 2).exp().tolist()
        [2.0, 0.0]
    """
    if block == 1:
        return scores
    rest = -scores.shape[-1] % block
    padded = F.pad(scores, (0, rest), value=-torch.inf)
    return padded.view(*scores.shape[:-1], -1, block).logsumexp(-1)


def _priorities(rule: RandomK, call: AttentionCall) -> Tensor:
    size = (call.q.shape[1], call.q.shape[2], call.k.shape[2])
    generator = torch.Generator().manual_seed(rule.seed * 100_003 + 1009 * call.layer + call.occurrence)
    drawn = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(call.q.device, torch.float32 if call.q.device.type == "mps" else None)


def _fixed(rule: Rule, call: AttentionCall, allowed: Tensor) -> Tensor | None:
    """What is kept for its place alone, broadcastable to (B, H, Lq, Lk); None: nothing is."""
    found = None
    if rule.sinks:
        real = allowed.any(1).any(1)  # (B, Lk): keys that some query sees are no padding
        if call.q.shape[2] < real.shape[1] and not bool(real[:, 0].all()):
            raise _unknown(
                call, "sinks", "its first keys are hidden: by padding or by a window of the model's own"
            )
        found = (real & (real.cumsum(-1) <= rule.sinks))[:, None, None]
    if rule.window:
        places = torch.arange(call.q.shape[2], device=call.q.device) + call.first_query
        if not _in_step(call, allowed, places):
            raise _unknown(
                call, "a window", "its queries are not the tokens that its keys are, or come from a cache"
            )
        near = (places[:, None] - torch.arange(call.k.shape[2], device=call.q.device)).abs() < rule.window
        found = near[None, None] if found is None else found | near
    return found


def _in_step(call: AttentionCall, allowed: Tensor, places: Tensor) -> bool:
    """Whether query i is the token at ``first_query + i``: by a causal rule, or as self-attention."""
    last = (allowed * torch.arange(1, allowed.shape[-1] + 1, device=allowed.device)).amax((0, 1, 3)) - 1
    if torch.equal(last, places):
        return True
    square = call.q.shape[2] == call.k.shape[2]
    return square and not any(word in call.module.lower() for word in _CROSS)


def _unknown(call: AttentionCall, what: str, why: str) -> InputError:
    return InputError(
        f"{what} cannot be kept in {call.module or 'the model itself'}: {why}. Give it a rule of its own: keep is "
        "also a dictionary from module names to rules."
    )
