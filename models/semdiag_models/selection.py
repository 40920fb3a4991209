"""Which keys each query keeps: one function for each kind of attention, listed in ``SELECTORS``.

A function gets q and k (B, H, L, D), which tokens are valid (B, L) or None, and the layer, whose ``config`` has
the options; it returns positions (B, H, L, K), -1 where there is none, or None for all keys.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag_models import fast_attention

if TYPE_CHECKING:
    from semdiag_models.model import Attention

Selector = Callable[[Tensor, Tensor, Tensor | None, "Attention"], Tensor | None]
Pattern = Callable[[int, int], Tensor]


@torch.no_grad()
def select_by_score(q: Tensor, keys: Tensor, valid: Tensor | None, layer: "Attention", sign: int = 1) -> Tensor:
    """Select the k keys with the largest scores; with a sign of -1, the smallest."""
    batch, _, length, _ = q.shape
    hidden_tokens = layer.core.everywhere[0] if layer.core.cls_hidden else 0  # CLS, if no other token sees it
    allowed = valid
    if hidden_tokens:
        allowed = torch.ones(batch, length, dtype=torch.bool, device=q.device) if valid is None else valid.clone()
        allowed[:, :hidden_tokens] = False
    k = min(layer.config.k or 1, length - hidden_tokens)
    scale = sign * layer.scale
    if layer.core.fast:
        in_order = not fast_attention.uses_masked_matrices(layer, q)
        positions = fast_attention.largest_positions(q, keys, scale, k, allowed, in_order)
    else:
        scores = scale * (q @ keys.mT)
        if allowed is not None:
            scores = scores.masked_fill(~allowed[:, None, None, :], float("-inf"))
        largest = scores.topk(k, -1)
        positions = largest.indices.masked_fill(largest.values == float("-inf"), -1)
    if hidden_tokens:
        positions[:, :, :hidden_tokens] = -1  # they attend to all keys
    return positions


def band(length: int, k: int) -> Tensor:
    """Return the k consecutive keys with (k - 1) // 2 left of each query, shifted inward at the ends: (L, K)."""
    start = (torch.arange(length) - (k - 1) // 2).clamp(0, length - min(k, length))
    return start[:, None] + torch.arange(min(k, length))


def block(length: int, k: int) -> Tensor:
    """Return the keys of each query's own block of k; the last block may be short."""
    keys = (torch.arange(length) // k * k)[:, None] + torch.arange(k)
    return keys.masked_fill(keys >= length, -1)


def select_fixed(pattern: Pattern, q: Tensor, keys: Tensor, valid: Tensor | None, layer: "Attention") -> Tensor:
    """Select the keys of a pattern."""
    batch, heads, length, _ = q.shape
    core = layer.core
    positions = with_global_tokens(
        pattern, length, layer.config.k or 1, *core.everywhere, core.cls_hidden, q.device
    )
    selected = positions.expand(batch, heads, length, -1)
    if valid is None:
        return selected
    invalid = ~valid[:, None, None, :].expand(batch, heads, length, length)
    return selected.masked_fill(invalid.gather(3, selected.clamp(min=0)), -1)


@lru_cache(maxsize=32)
def with_global_tokens(
    pattern: Pattern, length: int, k: int, first: int, last: int, cls_hidden: bool, device: torch.device
) -> Tensor:
    """Return (L, k + first + last): a pattern's keys and the global tokens, whose own rows are empty."""
    inner = length - first - last
    neighbours = pattern(inner, k)
    neighbours = torch.where(neighbours < 0, neighbours, neighbours + first)
    first_tokens = torch.arange(0 if cls_hidden else first).expand(inner, -1)
    last_tokens = torch.arange(length - last, length).expand(inner, -1)
    rows = torch.cat([first_tokens, neighbours, last_tokens], 1)
    return F.pad(rows, (0, 0, first, last), value=-1).to(device)


@torch.no_grad()
def select_random(q: Tensor, keys: Tensor, valid: Tensor | None, layer: "Attention", anew: bool = False) -> Tensor:
    """Select k keys drawn for each block, head and query: once, or anew at every forward pass."""
    config = layer.config
    length = q.shape[2]
    k = min(config.k or 1, length)
    seed = layer.draw_seed if anew else config.selection_seed
    if anew and (seed is None or layer.training):
        priorities = torch.rand(config.heads, length, length, device=q.device)
    else:
        positions = config.length + config.extra_tokens
        orders = random_priorities(seed or 0, config.blocks, config.heads, positions, q.device)
        priorities = orders[layer.layer, :, :length, :length]
    if valid is None:
        return priorities.topk(k, -1).indices.expand(len(q), -1, -1, -1)
    parts = []
    for allowed in torch.split(valid, fast_attention.matrices_at_once(q.device, priorities.numel())):
        best = priorities.masked_fill(~allowed[:, None, None, :], -1).topk(k, -1)
        parts.append(best.indices.masked_fill(best.values < 0, -1))
    return torch.cat(parts)


@lru_cache(maxsize=4)
def random_priorities(seed: int, blocks: int, heads: int, length: int, device: torch.device) -> Tensor:
    """Draw a random order of the keys for each block, head and query, on the CPU whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    size = (heads, length, length)
    numbers = [torch.rand(size, generator=generator, dtype=torch.float64, device="cpu") for _ in range(blocks)]
    return torch.stack([each.argsort(dim=-1, stable=True).to(device, torch.int32) for each in numbers])


@torch.no_grad()
def select_buckets(q: Tensor, keys: Tensor, valid: Tensor | None, layer: "Attention") -> Tensor:
    """Select the keys in each query's bucket of sign hashes, for all rounds together."""
    config = layer.config
    length = q.shape[2]
    k = min(config.k or 1, length)
    width = config.head_width + (config.hashes == "asymmetric")
    shape = (config.blocks, config.heads, config.hash_rounds, config.hash_bits or 1, width)
    directions = hash_directions(config.selection_seed, shape, q.device, q.dtype)[layer.layer]
    if directions.shape[-1] > q.shape[-1]:
        q, keys = with_equal_lengths(q, keys, valid)
    codes = bucket_codes(torch.stack([q, keys]), directions)  # (2, B, H, R, L)
    count = torch.full((len(q),), length, device=q.device) if valid is None else valid.sum(1)
    if valid is not None:
        codes = codes.masked_fill(~valid[:, None, None, :], 2 ** directions.shape[2])
    order = codes.argsort(dim=-1, stable=True)
    rank = order[0].argsort(dim=-1)  # rank of each query
    count = count[:, None, None, None]
    start = torch.minimum(rank // k * k, count - k).clamp(min=0)
    place = start[..., None] + torch.arange(k, device=q.device)  # (B, H, R, L, k), in the order of the keys
    positions = order[1].gather(-1, place.flatten(-2).clamp(max=length - 1)).view(place.shape)
    positions = positions.masked_fill(place >= count[..., None], -1)
    if positions.shape[2] == 1:
        return positions[:, :, 0]
    return distinct(positions.transpose(2, 3).flatten(-2))


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


def with_equal_lengths(q: Tensor, keys: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Append one entry: 0 for queries; for keys what gives them all the length of the head's longest valid key."""
    squares = keys.square().sum(-1, keepdim=True)
    valid_squares = squares if valid is None else squares.masked_fill(~valid[:, None, :, None], 0)
    entries = (valid_squares.amax(2, keepdim=True) - squares).clamp(min=0).sqrt()
    return F.pad(q, (0, 1)), torch.cat([keys, entries], -1)


def distinct(positions: Tensor) -> Tensor:
    """Remove repetitions from each row."""
    none = torch.iinfo(positions.dtype).max
    ordered = positions.sort(-1).values
    repeated = F.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
    ordered = ordered.masked_fill(repeated | (ordered < 0), none).sort(-1).values
    return ordered.masked_fill(ordered == none, -1)[..., : positions.shape[2]]


@torch.no_grad()
def select_clusters(q: Tensor, keys: Tensor, valid: Tensor | None, layer: "Attention") -> Tensor:
    """Select the keys in each query's clusters; in training the centroids then follow queries and keys."""
    centroids = layer.centroids
    assert centroids is not None  # made with the layer
    batch, heads, length, _ = q.shape
    k = min(layer.config.k or 1, length)
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
    positions = members.gather(2, rows).view(batch, heads, length, most, k)
    positions = positions.masked_fill((member == 0)[..., None] | (positions == length), -1)
    positions = distinct(positions.flatten(-2))
    if layer.training:
        move_centroids(centroids, q, keys, valid, layer.config.centroid_decay)
    return positions[..., : max(1, int((positions >= 0).sum(-1).max()))]


def cosines_to(centroids: Tensor, x: Tensor) -> Tensor:
    """Return the cosines between vectors and centroids: (H, C, D), (…, H, L, D) -> (…, H, L, C)."""
    return F.normalize(x, dim=-1) @ F.normalize(centroids, dim=-1).transpose(1, 2)


def move_centroids(centroids: Tensor, q: Tensor, keys: Tensor, valid: Tensor | None, decay: float) -> None:
    """Make one step of k-means on unit vectors, as a moving average, in place."""
    vectors = F.normalize(torch.cat([q, keys], 2), dim=-1)  # (B, H, 2L, D)
    member = F.one_hot(cosines_to(centroids, vectors).argmax(-1), centroids.shape[1]).to(vectors.dtype)
    if valid is not None:
        member = member * valid.repeat(1, 2)[:, None, :, None]
    total = torch.einsum("bhlc,bhld->hcd", member, vectors)
    moved = F.normalize(decay * centroids + (1 - decay) * F.normalize(total, dim=-1), dim=-1)
    has_members = member.sum((0, 2)) > 0  # (H, C)
    centroids.copy_(torch.where(has_members[..., None], moved, centroids))


def first_centroids(seed: int, layer: int, shape: tuple[int, int, int]) -> Tensor:
    """Draw the initial centroids of a block: uniform on the unit sphere, on the CPU."""
    if torch.empty(()).is_meta:
        return torch.empty(shape)
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn((layer + 1, *shape), generator=generator, dtype=torch.float64, device="cpu")[layer]
    return F.normalize(vectors, dim=-1).to(torch.get_default_dtype())


class Indexer(nn.Module):
    """The small head of a layer that chooses its keys: score (i, j) is Σ_h w_ih · ReLU(q_ih · k_j / √width).

    Its w, q (of each of its heads) and k are linear in the layer's queries and keys, all heads together. Gradients
    stop there: it learns from the layer's attention and does not change it. Source: the indexer of DeepSeek-V3.2.
    Deviation: it reads queries and keys instead of hidden states.

    Args:
        queries: shape of a token's queries in the layer: heads, width of each.
        key_heads: number of key heads, a divisor of the number of heads.
        width: of its queries and keys.
        heads: number of its heads.
    """

    steps: Tensor

    def __init__(self, queries: tuple[int, int], key_heads: int, width: int, heads: int = 1) -> None:
        super().__init__()
        layer_heads, head_width = queries
        self.width = width
        self.query = nn.Linear(layer_heads * head_width, heads * width)
        self.key = nn.Linear(key_heads * head_width, width)
        self.weight = nn.Linear(layer_heads * head_width, heads)
        self.register_buffer("steps", torch.zeros(()))  # number of training steps so far
        self.divergence: Tensor | None = None  # of the last forward pass in training; see Encoder.take_divergence
        with torch.no_grad():  # the first scores: products of queries and keys, in a random projection
            projection = self.key.weight.view(width, key_heads, head_width)
            projection = projection.repeat_interleave(layer_heads // key_heads, 1)
            reads = torch.arange(layer_heads) % heads == torch.arange(heads)[:, None]  # each a part of the heads
            self.query.weight.copy_((projection * reads[:, None, :, None]).reshape(self.query.weight.shape))
            self.weight.weight.zero_()
            self.weight.bias.fill_(1.0)

    def forward(self, q: Tensor, keys: Tensor, valid: Tensor | None) -> Tensor:
        """Return the scores of all keys, -inf of invalid ones: (B, H, L, D), (B, G, L, D), (B, L) -> (B, L, L)."""
        queries, keys = (t.detach().transpose(1, 2).flatten(2) for t in (q, keys))
        projected = self.query(queries).unflatten(-1, (-1, self.width)).transpose(1, 2)  # (B, heads, L, width)
        products = (projected @ self.key(keys)[:, None].mT / math.sqrt(self.width)).relu()
        scores: Tensor = (self.weight(queries).mT[..., None] * products).sum(1)
        return scores if valid is None else scores.masked_fill(~valid[:, None, :], -math.inf)


def select_by_indexer(q: Tensor, keys: Tensor, valid: Tensor | None, layer: "Attention") -> Tensor | None:
    """Select the k keys with the indexer's largest scores, of equal ones the first, or all keys in its warm-up."""
    indexer = layer.indexer
    assert indexer is not None  # made with the encoder
    with torch.set_grad_enabled(layer.training and torch.is_grad_enabled()):
        scores: Tensor = indexer(q, keys, valid)
        if layer.training:
            indexer.divergence = divergence_from_attention(scores, q, keys, valid, layer.scale)
            indexer.steps += 1
            if indexer.steps <= layer.config.indexer_warm_up:
                return None
    values, order = scores.detach().sort(descending=True, stable=True)
    k = min(layer.config.k or 1, q.shape[2])
    positions = order[..., :k].masked_fill(values[..., :k] == -math.inf, -1)
    return positions[:, None].expand(-1, q.shape[1], -1, -1)


def divergence_from_attention(
    scores: Tensor, q: Tensor, keys: Tensor, valid: Tensor | None, scale: float
) -> Tensor:
    """Return KL(p ‖ softmax(scores)), nats, mean over queries; p: the mean of the heads' dense attention."""
    products = scale * (q.detach() @ keys.detach().mT)
    if valid is not None:
        products = products.masked_fill(~valid[:, None, None, :], -math.inf)
    attention = products.softmax(-1).mean(1)
    logarithms = scores.clamp(min=torch.finfo(scores.dtype).min).log_softmax(-1)
    rows = (attention.xlogy(attention) - attention * logarithms).sum(-1)
    return rows.mean() if valid is None else rows[valid].mean()


@torch.no_grad()
def select_blocks(q: Tensor, keys: Tensor, valid: Tensor | None, layer: "Attention") -> Tensor:
    """Select the k keys of the query's own block, and of the blocks with the largest scores of their mean keys."""
    batch, heads, length, width = q.shape
    k = layer.config.k or 1
    blocks = -(-length // k)
    number = torch.arange(length, device=q.device) // k  # of each token's block
    counted = q.new_ones(batch, length) if valid is None else valid.to(q.dtype)
    sizes = q.new_zeros(batch, blocks).index_add_(1, number, counted)
    sums = q.new_zeros(batch, heads, blocks, width).index_add_(2, number, keys * counted[:, None, :, None])
    means = sums / sizes.clamp(min=1)[:, None, :, None]
    scores = (layer.scale * (q @ means.mT)).masked_fill((sizes == 0)[:, None, None, :], -math.inf)
    scores = scores.masked_fill(number[:, None] == torch.arange(blocks, device=q.device), math.inf)
    chosen = scores.topk(min(layer.config.chosen_blocks, blocks), -1).indices
    positions = (chosen[..., None] * k + torch.arange(k, device=q.device)).flatten(-2)
    positions = positions.masked_fill(positions >= length, -1)
    if valid is None:
        return positions
    invalid = ~valid[:, None, None, :].expand(batch, heads, length, length)
    return positions.masked_fill(invalid.gather(3, positions.clamp(min=0)), -1)


SELECTORS: dict[str, Selector] = {
    "banded": partial(select_fixed, band),
    "block": partial(select_fixed, block),
    "topk": select_by_score,
    "bottomk": partial(select_by_score, sign=-1),
    "random": select_random,
    "redrawn": partial(select_random, anew=True),
    "lsh": select_buckets,
    "routing": select_clusters,
    "indexer": select_by_indexer,
    "moba": select_blocks,
}
