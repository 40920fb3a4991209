"""Kinds of attention: one function each from queries and keys to the keys that are kept, and one table of them.

A function gets q and k (B, H, L, D), which tokens are valid (B, L) or None, and the layer, whose ``config`` has
the options; it returns positions (B, H, L, K), -1 where there is none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from semdiag_models.encoder import Attention

_STRIP = 2**20  # scores held at a time: 4 MB in float32, about one core's share of the cache
_LARGER = 2**6  # factor on an accelerator, without a cache to fit and slow to launch operations: 256 MB in float32
_DENSE = 2**28  # largest number of entries of a sparse matrix that is written out, 1 GB
SHORT = 128  # number of tokens up to which training steps on a CPU use masked matrices


def _per_strip(device: torch.device, entries: int) -> int:
    """Return how many parts of so many scores to hold at a time on a device."""
    return max(1, _STRIP * (1 if device.type == "cpu" else _LARGER) // entries)


@torch.no_grad()
def top_k(q: Tensor, keys: Tensor, valid: Tensor | None, layer: "Attention", sign: int = 1) -> Tensor:
    """Select the k keys with the largest scores; with a sign of -1, the smallest."""
    batch, heads, length, _ = q.shape
    first = layer.core.everywhere[0] if layer.core.apart else 0  # tokens that are no key of the others
    if first:
        valid = torch.ones(batch, length, dtype=torch.bool, device=q.device) if valid is None else valid.clone()
        valid[:, :first] = False
    k, scale = min(layer.config.k or 1, length - first), sign * layer.scale
    rows, of_keys = (t.detach().reshape(batch * heads, length, -1) for t in (q, keys))  # also detaches tangents
    allowed = None if valid is None else valid.repeat_interleave(heads, 0)[:, None]
    per_strip = _per_strip(q.device, length**2)
    strip = rows.new_empty(min(per_strip, batch * heads), length, length)  # one memory for all strips
    selected = []
    for start in range(0, batch * heads, per_strip):
        s = slice(start, start + per_strip)
        scores = strip[: len(rows[s])]
        torch.baddbmm(scores, rows[s], of_keys[s].mT, beta=0, alpha=scale, out=scores)
        if allowed is not None:
            scores.masked_fill_(~allowed[s], float("-inf"))
        values, positions = largest(scores, k, ordered=not _short(layer, q) or torch.compiler.is_compiling())
        selected.append(positions if valid is None else positions.masked_fill(values == float("-inf"), -1))
    found = (selected[0] if len(selected) == 1 else torch.cat(selected)).view(batch, heads, length, k)
    if first:
        found[:, :, :first] = -1  # they attend to all keys
    return found


def _short(layer: nn.Module, q: Tensor) -> bool:
    """Return whether a step uses masked matrices."""
    return layer.training and q.shape[2] <= SHORT and q.device.type == "cpu"


def largest(scores: Tensor, k: int, ordered: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row, and their positions; in their order or not, which is quicker."""
    if not ordered:
        rows = scores.numpy()
        places = np.flatnonzero(rows >= np.partition(rows, -k, -1)[..., -k, None])
        if len(places) == k * scores[..., 0].numel():  # else some are equal
            positions = torch.from_numpy(places % scores.shape[-1]).view(*scores.shape[:-1], k)
            return scores.gather(-1, positions), positions
    if scores.device.type == "cuda":
        from semdiag_models.largest_of_rows import MOST, largest_of_rows  # which needs Triton

        if k <= MOST[0] and scores.shape[-1] <= MOST[1]:
            return largest_of_rows(scores, k)  # type: ignore[no-any-return]
    return scores.topk(k, -1)


def band(length: int, k: int) -> Tensor:
    """Return the k consecutive keys with (k - 1) // 2 left of each query, shifted inward at the ends: (L, K)."""
    start = (torch.arange(length) - (k - 1) // 2).clamp(0, length - min(k, length))
    return start[:, None] + torch.arange(min(k, length))


def block(length: int, k: int) -> Tensor:
    """Return the keys of each query's own block of k; the last block may be short."""
    keys = (torch.arange(length) // k * k)[:, None] + torch.arange(k)
    return keys.masked_fill(keys >= length, -1)


def local(
    pattern: Callable[[int, int], Tensor], q: Tensor, keys: Tensor, valid: Tensor | None, layer: "Attention"
) -> Tensor:
    """Select the keys of a pattern."""
    batch, heads, length, _ = q.shape
    positions = _around(pattern, length, layer.config.k or 1, *layer.core.everywhere, layer.core.apart, q.device)
    selected = positions.expand(batch, heads, length, -1)
    if valid is None:
        return selected
    out = ~valid[:, None, None, :].expand(batch, heads, length, length)
    return selected.masked_fill(out.gather(3, selected.clamp(min=0)), -1)


@lru_cache(maxsize=32)
def _around(pattern: Any, length: int, k: int, first: int, last: int, apart: bool, device: torch.device) -> Tensor:
    """Return (L, k + first + last): a pattern's keys and the global tokens, whose own rows are empty."""
    inner = length - first - last
    near = pattern(inner, k)
    near = torch.where(near < 0, near, near + first)
    front = torch.arange(0 if apart else first).expand(inner, -1)
    back = torch.arange(length - last, length).expand(inner, -1)
    return F.pad(torch.cat([front, near, back], 1), (0, 0, first, last), value=-1).to(device)


@torch.no_grad()
def random(q: Tensor, keys: Tensor, valid: Tensor | None, layer: "Attention", anew: bool = False) -> Tensor:
    """Select k keys drawn for each block, head and query: once, or anew at every forward pass."""
    c, length = layer.config, q.shape[2]
    seed, k = layer.draw_seed if anew else c.selection_seed, min(c.k or 1, length)
    if anew and (seed is None or layer.training):
        priorities = torch.rand(c.heads, length, length, device=q.device)
    else:
        orders = random_priorities(seed or 0, c.blocks, c.heads, c.length + c.extra_tokens, q.device)
        priorities = orders[layer.layer, :, :length, :length]
    if valid is None:
        return priorities.topk(k, -1).indices.expand(len(q), -1, -1, -1)
    parts = []
    for allowed in torch.split(valid, _per_strip(q.device, priorities.numel())):
        best = priorities.masked_fill(~allowed[:, None, None, :], -1).topk(k, -1)
        parts.append(best.indices.masked_fill(best.values < 0, -1))
    return torch.cat(parts)


@lru_cache(maxsize=4)
def random_priorities(seed: int, blocks: int, heads: int, length: int, device: torch.device) -> Tensor:
    """Draw a random order of the keys for each block, head and query, on the CPU whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    size = (heads, length, length)
    drawn = [torch.rand(size, generator=generator, dtype=torch.float64, device="cpu") for _ in range(blocks)]
    return torch.stack([each.argsort(dim=-1, stable=True).to(device, torch.int32) for each in drawn])


@torch.no_grad()
def lsh(q: Tensor, keys: Tensor, valid: Tensor | None, layer: "Attention") -> Tensor:
    """Select the keys in each query's bucket of sign hashes, for all rounds together."""
    c, k, length = layer.config, min(layer.config.k or 1, q.shape[2]), q.shape[2]
    shape = (c.blocks, c.heads, c.hash_rounds, c.hash_bits or 1, c.head_width + (c.hashes == "asymmetric"))
    directions = hash_directions(c.selection_seed, shape, q.device, q.dtype)[layer.layer]
    if directions.shape[-1] > q.shape[-1]:
        q, keys = _lengthened(q, keys, valid)
    codes = bucket_codes(torch.stack([q, keys]), directions)  # (2, B, H, R, L)
    count = torch.full((len(q),), length, device=q.device) if valid is None else valid.sum(1)
    if valid is not None:
        codes = codes.masked_fill(~valid[:, None, None, :], 2 ** directions.shape[2])
    order = codes.argsort(dim=-1, stable=True)
    rank = order[0].argsort(dim=-1)  # rank of each query
    count = count[:, None, None, None]
    start = torch.minimum(rank // k * k, count - k).clamp(min=0)
    place = start[..., None] + torch.arange(k, device=q.device)  # (B, H, R, L, k), in the order of the keys
    found = order[1].gather(-1, place.flatten(-2).clamp(max=length - 1)).view(place.shape)
    found = found.masked_fill(place >= count[..., None], -1)
    return found[:, :, 0] if found.shape[2] == 1 else distinct(found.transpose(2, 3).flatten(-2))


def bucket_codes(x: Tensor, directions: Tensor) -> Tensor:
    """Return sign hashes: bit n of a vector's code is 1 if its product with direction n is negative."""
    _, rounds, bits, _ = directions.shape
    negative = (x @ directions.flatten(1, 2).transpose(1, 2)) < 0  # (…, H, L, R·bits)
    powers = 2 ** torch.arange(bits, device=x.device)
    return (negative.view(*negative.shape[:-1], rounds, bits) * powers).sum(-1).transpose(-1, -2)


@lru_cache(maxsize=8)
def hash_directions(seed: int, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Draw a model's hash functions, on the CPU in float64 whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)


def _lengthened(q: Tensor, keys: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Append one entry: 0 for queries; for keys what gives them all the length of the head's longest valid key."""
    square = keys.square().sum(-1, keepdim=True)
    counted = square if valid is None else square.masked_fill(~valid[:, None, :, None], 0)
    rest = (counted.amax(2, keepdim=True) - square).clamp(min=0).sqrt()
    return F.pad(q, (0, 1)), torch.cat([keys, rest], -1)


def distinct(positions: Tensor) -> Tensor:
    """Remove repetitions from each row."""
    none = torch.iinfo(positions.dtype).max
    ordered = positions.sort(-1).values
    repeated = F.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
    ordered = ordered.masked_fill(repeated | (ordered < 0), none).sort(-1).values
    return ordered.masked_fill(ordered == none, -1)[..., : positions.shape[2]]


@torch.no_grad()
def routing(q: Tensor, keys: Tensor, valid: Tensor | None, layer: "Attention") -> Tensor:
    """Select the keys in each query's clusters; in training the centroids then follow queries and keys."""
    centroids, k = layer.centroids, min(layer.config.k or 1, q.shape[2])
    assert centroids is not None  # made with the layer
    batch, heads, length, _ = q.shape
    cosines = cosines_to(centroids, torch.stack([q, keys])).transpose(-1, -2)  # (2, B, H, C, L)
    if valid is not None:
        cosines = cosines.masked_fill(~valid[:, None, None, :], float("-inf"))
    nearest = cosines.topk(k, -1)
    queries, members = nearest.indices.masked_fill(nearest.values == float("-inf"), length)  # (B, H, C, k)
    inside = torch.zeros(*queries.shape[:3], length + 1, dtype=torch.int8, device=q.device)
    inside = inside.scatter_(-1, queries, 1)[..., :-1].transpose(2, 3)  # (B, H, L, C)
    most = max(1, int(inside.sum(-1).max()))
    member, cluster = inside.topk(most, -1)
    rows = cluster.flatten(-2)[..., None].expand(-1, -1, -1, k)
    found = members.gather(2, rows).view(batch, heads, length, most, k)
    found = found.masked_fill((member == 0)[..., None] | (found == length), -1)
    found = distinct(found.flatten(-2))
    if layer.training:
        follow(centroids, q, keys, valid, layer.config.centroid_decay)
    return found[..., : max(1, int((found >= 0).sum(-1).max()))]


def cosines_to(centroids: Tensor, x: Tensor) -> Tensor:
    """Return the cosines between vectors and centroids: (H, C, D), (…, H, L, D) -> (…, H, L, C)."""
    return F.normalize(x, dim=-1) @ F.normalize(centroids, dim=-1).transpose(1, 2)


def follow(centroids: Tensor, q: Tensor, keys: Tensor, valid: Tensor | None, decay: float) -> None:
    """Make one step of k-means on unit vectors, as a moving average, in place."""
    both = F.normalize(torch.cat([q, keys], 2), dim=-1)  # (B, H, 2L, D)
    member = F.one_hot(cosines_to(centroids, both).argmax(-1), centroids.shape[1]).to(both.dtype)
    if valid is not None:
        member = member * valid.repeat(1, 2)[:, None, :, None]
    total = torch.einsum("bhlc,bhld->hcd", member, both)
    moved = F.normalize(decay * centroids + (1 - decay) * F.normalize(total, dim=-1), dim=-1)
    some = member.sum((0, 2)) > 0  # (H, C)
    centroids.copy_(torch.where(some[..., None], moved, centroids))


def first_centroids(seed: int, layer: int, shape: tuple[int, int, int]) -> Tensor:
    """Draw the initial centroids of a block: uniform on the unit sphere, on the CPU."""
    if torch.empty(()).is_meta:
        return torch.empty(shape)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn((layer + 1, *shape), generator=generator, dtype=torch.float64, device="cpu")[layer]
    return F.normalize(drawn, dim=-1).to(torch.get_default_dtype())


@dataclass(frozen=True)
class AttentionKind:
    """What a kind of attention keeps of a query's keys."""

    meaning: str  # meaning in words, for users
    keeps: Literal["all", "fixed", "redrawn", "largest", "smallest", "hashed", "clustered"]
    select: Callable[[Tensor, Tensor, Tensor | None, "Attention"], Tensor] | None = None  # to the kept keys
    options: tuple[str, ...] = ("k",)  # fields of ModelConfig that only kinds that name them take

    @property
    def dense(self) -> bool:
        """Whether a query attends to every allowed key."""
        return self.keeps == "all"

    @property
    def input_dependent(self) -> bool:
        """Whether the kept keys depend on queries and keys, and so on the input."""
        return self.keeps in ("largest", "smallest", "hashed", "clustered")


ATTENTIONS = {
    "full": AttentionKind("every query attends to every key", "all", None, ()),
    "banded": AttentionKind("k neighbouring keys around the query, shifted inward at the ends (input-agnostic)",
        "fixed", partial(local, band), ("k", "global_tokens", "cls_as_key")),
    "block": AttentionKind("the k keys of the query's own block (input-agnostic)",
        "fixed", partial(local, block), ("k", "global_tokens", "cls_as_key")),
    "topk": AttentionKind("the k keys with the largest scores (input-dependent: the heavy hitters)",
        "largest", top_k, ("k", "score_gradient", "cls_as_key")),
    "bottomk": AttentionKind("the k keys with the smallest scores (input-dependent: a control)",
        "smallest", partial(top_k, sign=-1), ("k", "cls_as_key")),
    "random": AttentionKind("k keys drawn once for each block, head and query (input-agnostic: a control)",
        "fixed", random, ("k", "selection_seed")),
    "redrawn": AttentionKind("k keys drawn anew for each block, head and query at every forward pass, in "
        "evaluation, too", "redrawn", partial(random, anew=True)),
    "lsh": AttentionKind("the k keys of the query's bucket of sign hashes, in each round (input-dependent)",
        "hashed", lsh, ("k", "selection_seed", "hash_rounds", "hash_bits", "hashes")),
    "routing": AttentionKind("the k keys nearest to each centroid that has the query among its k nearest "
        "(input-dependent)", "clustered", routing, ("k", "selection_seed", "clusters", "centroid_decay")),
}  # fmt: skip
LOCAL = tuple(name for name, kind in ATTENTIONS.items() if "global_tokens" in kind.options)
DRAWN = tuple(name for name, kind in ATTENTIONS.items() if "selection_seed" in kind.options)


_GAPS = np.random.Generator(np.random.Philox(key=0))
_FIRST: Any = _GAPS.bit_generator.state  # of a new generator; setting it takes a tenth of making one


def dropped_positions(n: int, p: float) -> Tensor:
    """Return the indices, among n, at which independent coins with probability p drop."""
    # numpy draws the gaps between them in a third of torch's time; torch's generator seeds it
    _FIRST["state"]["key"][0] = int(torch.randint(2**62, ()))
    draw = _GAPS
    draw.bit_generator.state = _FIRST
    positions = draw.geometric(p, int(n * p + 8 * math.sqrt(n * p) + 20)).cumsum()
    while positions[-1] < n:  # eight standard deviations away, but exactness requires it
        positions = np.append(positions, positions[-1] + draw.geometric(p, len(positions)).cumsum())
    return torch.from_numpy(positions[: positions.searchsorted(n, "right")] - 1)


def dropout(x: Tensor, p: float, training: bool, rest: Tensor | None = None) -> Tensor:
    """Zero each element with probability p and divide the others by 1 - p, while training; add the rest."""
    if training and p and x.device.type == "cpu":
        return _Dropout.apply(x, p, dropped_positions(x.numel(), p), rest)  # type: ignore[no-any-return]
    dropped = F.dropout(x, p) if training and p else x
    return dropped if rest is None else rest + dropped


class _Dropout(torch.autograd.Function):
    """x / (1 - p) with zeros at the flat positions ``drops``: the few that are dropped, not a coin for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, drops: Tensor, rest: Tensor | None) -> Tensor:
        ctx.p, ctx.drops, ctx.added = p, drops, rest is not None
        kept = x.contiguous() * (1 / (1 - p))
        kept.view(-1).index_fill_(0, drops, 0)
        return kept if rest is None else kept.add_(rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        added = grad if ctx.added else None
        return _Dropout.forward(ctx, grad, ctx.p, ctx.drops, None), None, None, added


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, p: float) -> Tensor:
    """Return softmax(scale · q kᵀ) v, with dropout on the softmax weights."""
    if p == 0 or q.device.type != "cpu":
        mask = None if valid is None else valid[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, scale=scale)
    bias = None
    if valid is not None:
        bias = q.new_zeros(valid.shape).masked_fill_(~valid, -math.inf).repeat_interleave(q.shape[1], 0)[:, None]
    return _Strips.apply(q, k, v, bias, scale, False, p)  # type: ignore[no-any-return]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor, p: float) -> Tensor:
    """Return attention over the selected keys by masked matrices, for short inputs on a CPU."""
    return _Strips.apply(q, k, v, _bias(selected, k).flatten(0, 1), scale, True, p)  # type: ignore[no-any-return]


def _bias(selected: Tensor, k: Tensor) -> Tensor:
    """Return 0 for the selected keys and -inf for the others: (B, H, L, K) -> (B, H, L, L)."""
    bias = k.new_full((*selected.shape[:3], k.shape[2] + 1), -math.inf)
    return bias.scatter_(3, selected.masked_fill(selected < 0, k.shape[2]), 0)[..., :-1]


class _Strips(torch.autograd.Function):
    """Attention in strips of samples and heads; weights of a single strip are kept, of several computed again."""

    # bias: 0, or -inf for keys that do not count, (B·H, 1 or L, L); empty: whether a query may have no key at all

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, empty: bool, p: float
    ) -> Tensor:
        heads, factor = q.shape[1], 1 / (1 - p)
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))  # (B·H, L, D)
        strips = range(0, len(q), max(1, _STRIP // (q.shape[1] * k.shape[1])))
        saved: list[Tensor | None] = []  # the dropped positions of each strip
        mixed = q.new_empty(q.shape)
        for start in strips:
            s = slice(start, start + strips.step)
            weights = _weights(q[s], k[s], scale, None if bias is None else bias[s], empty)
            saved.append(dropped_positions(weights.numel(), p) if p else None)
            torch.baddbmm(mixed[s], _without(weights, saved[-1]), v[s], beta=0, alpha=factor, out=mixed[s])
        ctx.save_for_backward(q, k, v, bias, weights if len(strips) == 1 else None, *saved)
        ctx.plan = scale, factor, heads, strips, empty
        return mixed.view(-1, heads, *q.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, whole, *saved = ctx.saved_tensors
        scale, factor, heads, strips, empty = ctx.plan
        grad = grad.reshape(q.shape)
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        for start, drops in zip(strips, saved, strict=True):
            s = slice(start, start + strips.step)
            again = None if bias is None else bias[s]
            weights = _weights(q[s], k[s], scale, again, empty) if whole is None else whole
            torch.baddbmm(dv[s], _without(weights, drops).mT, grad[s], beta=0, alpha=factor, out=dv[s])
            d_weights = torch.baddbmm(weights, grad[s], v[s].mT, beta=0, alpha=factor)
            if drops is not None:
                d_weights.view(-1).index_fill_(0, drops, 0)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype, grad_input=d_weights)
            torch.baddbmm(dq[s], d_scores, k[s], beta=0, alpha=scale, out=dq[s])
            torch.baddbmm(dk[s], d_scores.mT, q[s], beta=0, alpha=scale, out=dk[s])
        dq, dk, dv = (t.view(-1, heads, *t.shape[1:]) for t in (dq, dk, dv))
        return dq, dk, dv, None, None, None, None


def _without(weights: Tensor, drops: Tensor | None) -> Tensor:
    """Return weights with zeros at flat positions."""
    return weights if drops is None else weights.view(-1).index_fill(0, drops, 0).view_as(weights)


def _weights(q: Tensor, k: Tensor, scale: float, bias: Tensor | None, empty: bool) -> Tensor:
    scores = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=scale)
    if bias is not None:
        scores.add_(bias)
    weights = torch.softmax(scores, -1, out=scores)
    return weights.nan_to_num_(0.0) if empty else weights


def selected_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor, dropout: float) -> Tensor:
    """Return the softmax of scale · q kᵀ over the selected keys, times v, with dropout on the weights."""
    batch, heads, length, width = q.shape
    offset = torch.arange(batch * heads, device=q.device).mul_(length).view(batch, heads, 1, 1)
    index = (selected.clamp(min=0) + offset).view(-1, selected.shape[-1])  # (B·H·L, K) rows of the flat keys
    rows = tuple(t.reshape(-1, width).contiguous() for t in (q, k, v))
    mixed = _Selected.apply(*rows, index, (selected < 0).view(index.shape), length, scale, dropout)
    return mixed.view(batch, heads, length, width)  # type: ignore[no-any-return]


def plain_selected_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor) -> Tensor:
    """Return :func:`selected_attention` without dropout, in elementary operations."""
    missing, width = selected < 0, q.shape[-1]
    rows = selected.clamp(min=0).flatten(-2)[..., None].expand(*selected.shape[:2], -1, width)  # (B, H, L·K, D)
    keys, values = (t.gather(2, rows).view(*selected.shape, width) for t in (k, v))  # (B, H, L, K, D)
    scores = (scale * q[..., None, :] * keys).sum(-1).masked_fill(missing, torch.finfo(q.dtype).min)
    return (scores.softmax(-1).masked_fill(missing, 0)[..., None] * values).sum(-2)


class _Selected(torch.autograd.Function):
    """softmax_j(scale · q[i] · k[index[i, j]]), dropped, times v[index[i, j]]; rows (B·H·L, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, out: Tensor, length: int, scale: float, p: float
    ) -> Tensor:
        scores = _row_dots(q, k, index).mul_(scale).masked_fill_(out, torch.finfo(q.dtype).min)
        weights = scores.softmax(-1).masked_fill_(out, 0)
        kept = dropout(torch.ones_like(weights), p, training=True) if p else None
        ctx.save_for_backward(q, k, v, index, weights, kept)
        ctx.scale, ctx.length = scale, length
        return _gather_sum(weights if kept is None else weights * kept, v, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, index, weights, kept = ctx.saved_tensors
        grad = grad.contiguous()
        key_sums, d_weights = _key_sums(index, ctx.length), _row_dots(grad, v, index)
        d_weights, dropped = (t if kept is None else t * kept for t in (d_weights, weights))
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype).mul_(ctx.scale)
        d_k, d_v = key_sums(d_scores, q), key_sums(dropped, grad)
        return _gather_sum(d_scores, k, index), d_k, d_v, None, None, None, None, None


def _row_dots(rows: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Return rows[i] · table[index[i, j]] for all i, j: (N, D), (M, D), (N, K) -> (N, K)."""
    n, k = index.shape
    starts = torch.arange(0, n * k, k, device=index.device)
    bags = torch.arange(n, device=index.device).repeat_interleave(k)
    dots = torch.ops.aten._embedding_bag_per_sample_weights_backward
    return dots(rows, table, index.reshape(-1), starts, bags, 0).view(n, k)  # type: ignore[no-any-return]


def _gather_sum(weights: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Return Σ_j weights[i, j] table[index[i, j]]: (N, K), (M, D), (N, K) -> (N, D); (N, K, D) is never stored."""
    return F.embedding_bag(index, table, per_sample_weights=weights.contiguous(), mode="sum")


def _key_sums(index: Tensor, length: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of weights and rows Σ over index[i, j] = m of weights[i, j] rows[i] for all m."""
    n, k = index.shape

    def by_products(weights: Tensor, rows: Tensor) -> Tensor:
        matrix = weights.new_zeros(n, length).scatter_add_(1, index % length, weights)  # one is not 0: no race
        return (matrix.view(-1, length, length).mT @ rows.view(-1, length, rows.shape[1])).view(n, -1)

    if index.device.type != "cpu" and n * length <= _DENSE:  # sorting takes longer
        return by_products
    order, counts = index.view(-1).argsort(stable=True), torch.bincount(index.view(-1), minlength=n)
    starts, of_row = counts.cumsum(0) - counts, order // k
    return lambda weights, rows: F.embedding_bag(
        of_row, rows, starts, per_sample_weights=weights.reshape(-1)[order], mode="sum"
    )


def straight_through_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, selected: Tensor, p: float
) -> Tensor:
    """Mix values with the weights of the selected keys, but differentiate scores with the weights of all keys."""
    scores = scale * (q @ k.mT)
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, None, :], torch.finfo(q.dtype).min)
    of_all = scores.softmax(-1)
    with torch.no_grad():
        of_selected = (scores + _bias(selected, k)).softmax(-1).nan_to_num_(0.0)
    weights = of_selected + (of_all - of_all.detach())  # the difference is 0, exactly
    return dropout(weights, p, training=p > 0) @ v


class AttentionCore(nn.Module):
    """Softmax attention over selected keys. The single hook point: its inputs determine the attention."""

    def __init__(self, p: float, everywhere: tuple[int, int] = (0, 0), straight_through: bool = False) -> None:
        super().__init__()
        self.p, self.everywhere, self.straight_through = p, everywhere, straight_through
        self.apart = False  # whether only the first query attends to the first token

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, selected: Tensor | None
    ) -> Tensor:
        """Mix the values."""
        p = self.p if self.training else 0.0
        if selected is None:
            return dense_attention(q, k, v, scale, valid, p)
        if self.straight_through and self.training:
            return straight_through_attention(q, k, v, scale, valid, selected, p)
        if _short(self, q):
            mixed = masked_attention(q, k, v, scale, selected, p)
        else:
            mixed = self.attend_selected(q, k, v, scale, selected, p)
        first, last = self.everywhere
        if first + last == 0:
            return mixed
        end = q.shape[2] - last
        rows = torch.cat([q[:, :, :first], q[:, :, end:]], 2)
        dense = dense_attention(rows, k, v, scale, valid, p)
        return torch.cat([dense[:, :, :first], mixed[:, :, first:end], dense[:, :, first:]], 2)

    def attend_selected(self, q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor, p: float) -> Tensor:
        """Mix the values of the selected keys: (B, H, L, D), … -> (B, H, L, D)."""
        return selected_attention(q, k, v, scale, selected, p)
