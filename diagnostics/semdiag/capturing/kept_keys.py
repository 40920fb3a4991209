"""Which keys of a call a rule keeps."""

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.mask_rules import RandomK, Rule, TopK, TopP
from semdiag.mathematics.largest_scores import largest_scores
from semdiag_models import InputError

_AT_ONCE = 2**22  # scores held while a mask is chosen
# In the names of modules whose keys are of another sequence than their queries.
CROSS = ("cross", "encoder_attn", "encdec", "enc_dec", "encoder_decoder", "multihead_attn")


class SharedChoices:
    """The keys that rules keep, where some layers keep those of a layer before them."""

    def __init__(self) -> None:
        self._layer, self._chosen = 0, torch.empty(0)

    def kept(self, rule: Rule, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
        """As :func:`kept_keys`.

        Args:
            rule: the mask.
            call: the attention as it would be.
        """
        every = rule.every if isinstance(rule, TopK) else 1
        if every == 1:
            return kept_keys(rule, call)
        batch, _, queries, _ = call.q.shape
        size = (batch, 1, queries, call.k.shape[2])
        if 0 < call.layer - self._layer < every and self._chosen.shape == size:
            whole = allowed_keys(call.part())
            kept = whole & self._chosen.to(whole.device)
            return kept | ~kept.any(-1, keepdim=True), whole
        found = kept_keys(rule, call)
        chosen = torch.ones(size, dtype=torch.bool, device=call.q.device) if found is None else found[0][:, :1]
        self._layer, self._chosen = call.layer, chosen
        return found


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
    if isinstance(rule, TopP):
        counts = [1] * heads  # not looked at
    else:
        counts = _counts(rule, call)
        block = rule.block if isinstance(rule, TopK) else 1
        if min(counts) * block >= length:
            return None
    batch, _, q_length, _ = call.q.shape
    size = max(1, _AT_ONCE // (heads * q_length * length))
    parts = [call.part(slice(at, min(at + size, batch))) for at in range(0, batch, size)]
    allowed = [allowed_keys(part) for part in parts]
    fixed = [None if isinstance(rule, TopP) else _fixed(rule, call, part) for part in allowed]
    k = torch.tensor(counts, device=call.q.device)[:, None, None]
    kept = torch.cat([_kept(rule, k, *some) for some in zip(parts, allowed, fixed, strict=True)])
    whole = torch.cat(allowed)
    return None if torch.equal(kept, whole) else (kept | ~whole.any(-1, keepdim=True), whole)


def _counts(rule: TopK | RandomK, call: AttentionCall) -> list[int]:
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
        scores = part.scores(dtype).masked_fill(~free, -torch.inf)
        kept = _heaviest(scores, rule.p) if isinstance(rule, TopP) else _ranked(rule, k, scores, part.k.shape[1])
    kept = kept & free
    if fixed is not None:
        kept |= fixed & allowed
    return kept | (allowed & ~kept.any(-1, keepdim=True))


def _ranked(rule: TopK, k: Tensor, scores: Tensor, key_heads: int) -> Tensor:
    """The k largest scores, or blocks, of each head, or of the heads that share a choice."""
    heads, length = scores.shape[1], scores.shape[3]
    sets = {"head": heads, "group": key_heads, "layer": 1}[rule.shared]
    if sets < heads:
        several = scores.view(len(scores), sets, heads // sets, *scores.shape[2:])
        weights, hidden = several.softmax(-1).nan_to_num(0).mean(2), several.isneginf().all(2)
        # The logarithm of a weight that is too small for a number is no -inf: that is what is hidden.
        smallest = torch.finfo(weights.dtype).tiny
        scores, k = weights.clamp(min=smallest).log().masked_fill(hidden, -torch.inf), k[:1]
    kept = _largest(block_scores(scores, rule.block, rule.by), k)
    if rule.block > 1:
        kept = kept.repeat_interleave(rule.block, -1)[..., :length]
    return kept.repeat_interleave(heads // sets, 1)


def _heaviest(scores: Tensor, p: float) -> Tensor:
    """The fewest largest scores whose weights add up to p."""
    ordered, places = scores.sort(dim=-1, descending=True, stable=True)
    weights = ordered.softmax(-1).nan_to_num(0)
    before = weights.cumsum(-1) - weights  # of all keys that come first
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, places, before < p)


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


def block_scores(scores: Tensor, block: int, by: str = "weight") -> Tensor:
    """What blocks of consecutive keys are ranked by: ln Σ exp(z), the largest z, or the mean of z.

    Args:
        scores: (…, Lk), -inf where a key is hidden.
        block: keys in a block; the last may have fewer.
        by: weight, best or mean.

    Returns:
        (…, ⌈Lk / block⌉), -inf where all keys are hidden.

    Example:
        >>> block_scores(torch.tensor([0.0, 0.0, -torch.inf]), 2).exp().tolist()
        [2.0, 0.0]
    """
    if block == 1:
        return scores
    rest = -scores.shape[-1] % block
    padded = F.pad(scores, (0, rest), value=-torch.inf)
    blocks = padded.view(*scores.shape[:-1], -1, block)
    if by == "weight":
        return blocks.logsumexp(-1)
    if by == "best":
        return blocks.amax(-1)
    seen = ~blocks.isneginf()
    return (blocks.masked_fill(~seen, 0).sum(-1) / seen.sum(-1)).masked_fill(~seen.any(-1), -torch.inf)


def _priorities(rule: RandomK, call: AttentionCall) -> Tensor:
    size = (call.q.shape[1], call.q.shape[2], call.k.shape[2])
    generator = torch.Generator().manual_seed(rule.seed * 100_003 + 1009 * call.layer + call.occurrence)
    drawn = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(call.q.device, torch.float32 if call.q.device.type == "mps" else None)


def _fixed(rule: TopK | RandomK, call: AttentionCall, allowed: Tensor) -> Tensor | None:
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
    return square and not any(word in call.module.lower() for word in CROSS)


def _unknown(call: AttentionCall, what: str, why: str) -> InputError:
    return InputError(
        f"{what} cannot be kept in {call.module or 'the model itself'}: {why}. Give it a rule of its own: keep is "
        "also a dictionary from module names to rules."
    )
