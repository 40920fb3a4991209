"""Kinds of attention, and how each selects the keys that a query attends to: scores, hashes, clusters, bands."""

import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag_models.attention.dense_attention import dropout as drop


@torch.no_grad()
def same_bucket(q: Tensor, keys: Tensor, directions: Tensor, valid: Tensor | None, k: int) -> Tensor:
    """Return the positions of the keys in each query's bucket, for all rounds together."""
    if directions.shape[-1] > q.shape[-1]:
        q, keys = _lengthened(q, keys, valid)
    codes = bucket_codes(torch.stack([q, keys]), directions)  # (2, B, H, R, L)
    length = q.shape[2]
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
    if found.shape[2] == 1:
        return found[:, :, 0]
    return distinct(found.transpose(2, 3).flatten(-2))


def bucket_codes(x: Tensor, directions: Tensor) -> Tensor:
    """Return sign hashes: bit n of a vector's code is 1 if its product with direction n is negative."""
    _, rounds, bits, _ = directions.shape
    negative = (x @ directions.flatten(1, 2).transpose(1, 2)) < 0  # (…, H, L, R·bits)
    powers = 2 ** torch.arange(bits, device=x.device)
    codes: Tensor = (negative.view(*negative.shape[:-1], rounds, bits) * powers).sum(-1)
    return codes.transpose(-1, -2)


@lru_cache(maxsize=8)
def hash_directions(
    seed: int,
    shape: tuple[int, int, int, int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Draw a model's hash functions, on the CPU in float64 whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(device, dtype)


def distinct(positions: Tensor) -> Tensor:
    """Remove repetitions from each row."""
    none = torch.iinfo(positions.dtype).max
    ordered = positions.sort(-1).values
    repeated = F.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
    ordered = ordered.masked_fill(repeated | (ordered < 0), none).sort(-1).values
    return ordered.masked_fill(ordered == none, -1)[..., : positions.shape[2]]


def _lengthened(q: Tensor, keys: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Append one entry: 0 for queries; for keys what gives them all the length of the head's longest valid key."""
    square = keys.square().sum(-1, keepdim=True)
    counted = square if valid is None else square.masked_fill(~valid[:, None, :, None], 0)
    rest = (counted.amax(2, keepdim=True) - square).clamp(min=0).sqrt()
    return F.pad(q, (0, 1)), torch.cat([keys, rest], -1)


@dataclass(frozen=True)
class AttentionKind:
    """What a kind of attention keeps of a query's keys."""

    meaning: str  # meaning in words, for users
    keeps: Literal["all", "fixed", "redrawn", "largest", "smallest", "hashed", "clustered"]
    local: bool = False  # whether the fixed set lies around the query; only these kinds take global tokens
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
LOCAL = tuple(name for name, kind in ATTENTIONS.items() if kind.local)  # kinds with global tokens
DRAWN = tuple(name for name, kind in ATTENTIONS.items() if kind.drawn)  # kinds with a selection_seed

# Number of multiplications from which oneDNN's faster products outweigh its slower calls.
_WORTHWHILE = 2**21
_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # None if torch was built without oneDNN


def made_by_intel(file: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor is Intel's."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            said = lines.read(4096)
    except OSError:
        said = platform.processor()
    return "GenuineIntel" in said


def _pays() -> bool:
    """Return whether oneDNN's products are faster than torch's own on this processor."""
    if _LINEAR is None:
        return False
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return True
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not made_by_intel()


_PAYS = _pays()


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether :func:`linear` works and pays: for large matrices in float32 on a processor."""
    return (
        _PAYS
        and x.shape[-2] * weight.shape[-2] * x.shape[-1] >= _WORTHWHILE
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and not torch.compiler.is_compiling()  # a compiler has its own products
    )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute onto + x Wᵀ + b, without autograd."""
    if x.ndim == 3:
        out = x.new_empty(*x.shape[:2], weight.shape[1]) if out is None else out
        nothing = [None] * len(x)
        added = (nothing if t is None else t for t in (bias, onto))
        for y, *parts in zip(out, x, weight, *added, strict=True):
            y.copy_(linear(*parts))
        return out
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):
        weight = weight.contiguous()  # else oneDNN takes a thousand times as long
    if onto is None:
        product: Tensor = _LINEAR.default(x, weight, bias, "none", [], "")
    else:
        product = _LINEAR.binary(x, onto, weight, bias, "add")
    return product


@torch.no_grad()
def same_clusters(q: Tensor, keys: Tensor, centroids: Tensor, valid: Tensor | None, k: int) -> Tensor:
    """Return the positions of the keys in each query's clusters."""
    batch, heads, length, _ = q.shape
    cosines = cosines_to(centroids, torch.stack([q, keys])).transpose(-1, -2)  # (2, B, H, C, L)
    if valid is not None:
        cosines = cosines.masked_fill(~valid[:, None, None, :], float("-inf"))
    nearest = cosines.topk(k, -1)
    queries, own = nearest.indices.masked_fill(nearest.values == float("-inf"), length)  # (B, H, C, k)
    inside = torch.zeros(*queries.shape[:3], length + 1, dtype=torch.int8, device=q.device)
    inside = inside.scatter_(-1, queries, 1)[..., :-1].transpose(2, 3)  # (B, H, L, C)
    most = max(1, int(inside.sum(-1).max()))
    member, cluster = inside.topk(most, -1)
    rows = cluster.flatten(-2)[..., None].expand(-1, -1, -1, k)
    found = own.gather(2, rows).view(batch, heads, length, most, k)
    found = found.masked_fill((member == 0)[..., None] | (found == length), -1)
    found = distinct(found.flatten(-2))
    return found[..., : max(1, int((found >= 0).sum(-1).max()))]


def cosines_to(centroids: Tensor, x: Tensor) -> Tensor:
    """Return the cosines between vectors and centroids: (H, C, D), (…, H, L, D) -> (…, H, L, C)."""
    return F.normalize(x, dim=-1) @ F.normalize(centroids, dim=-1).transpose(1, 2)


@torch.no_grad()
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


_STRIP = 2**20  # scores held at a time
_LARGER = 2**6  # factor on an accelerator, without a cache to fit and slow to launch operations: 256 MB in float32


def select_keys(
    attention: str,
    k: int | None,
    q: Tensor,
    keys: Tensor,
    scale: float,
    valid: Tensor | None,
    everywhere: tuple[int, int] = (0, 0),
    priorities: Tensor | None = None,
    directions: Tensor | None = None,
    centroids: Tensor | None = None,
    apart: bool = False,
) -> Tensor | None:
    """Return the positions of the keys that each query attends to."""
    if k is None:
        return None
    batch, heads, length, _ = q.shape
    keeps = ATTENTIONS[attention].keeps
    if ATTENTIONS[attention].follows_scores:
        signed, first = scale if keeps == "largest" else -scale, everywhere[0]
        if not apart:
            return _heavy_hitters(q, keys, signed, valid, min(k, length))
        others = torch.ones(batch, length, dtype=torch.bool, device=q.device) if valid is None else valid.clone()
        others[:, :first] = False
        found = _heavy_hitters(q, keys, signed, others, min(k, length - first))
        found[:, :, :first] = -1
        return found
    if directions is not None:
        return same_bucket(q, keys, directions, valid, min(k, length))
    if centroids is not None:
        return same_clusters(q, keys, centroids, valid, min(k, length))
    if keeps == "redrawn" and priorities is None:  # from the global generator, the same keys for all samples
        priorities = torch.rand(heads, length, length, device=q.device)
    if priorities is not None:
        return _most_wanted(priorities, valid, batch, min(k, length))
    selected = _local(attention, length, k, *everywhere, apart, q.device).expand(batch, heads, length, -1)
    if valid is None:
        return selected
    allowed = valid[:, None, None, :].expand(batch, heads, length, length).gather(3, selected.clamp(min=0))
    return selected.masked_fill(~allowed, -1)


@torch.no_grad()
def _heavy_hitters(q: Tensor, keys: Tensor, scale: float, valid: Tensor | None, k: int) -> Tensor:
    batch, heads, length, _ = q.shape
    rows, of_keys = (t.detach().reshape(batch * heads, length, -1) for t in (q, keys))  # also detaches tangents
    allowed = None if valid is None else valid.repeat_interleave(heads, 0)[:, None]
    selected = torch.empty(batch * heads, length, k, dtype=torch.int64, device=q.device)
    alone = takes(rows[0], of_keys[0])
    per_strip = 1 if alone else max(1, _strip(q.device) // length**2)
    # one memory for all strips
    strip = rows.new_empty(0 if alone else min(per_strip, batch * heads), length, length)
    for start in range(0, batch * heads, per_strip):
        s = slice(start, start + per_strip)
        if alone:
            scores = linear(rows[start] * scale, of_keys[start])[None]
        else:
            scores = strip[: len(rows[s])]
            torch.baddbmm(scores, rows[s], of_keys[s].mT, beta=0, alpha=scale, out=scores)
        if allowed is not None:
            scores.masked_fill_(~allowed[s], float("-inf"))
        values, positions = scores.topk(k, -1)
        selected[s] = positions if valid is None else positions.masked_fill(values == float("-inf"), -1)
    return selected.view(batch, heads, length, k)


def _strip(device: torch.device) -> int:
    """Return the number of scores to hold at a time on a device."""
    return _STRIP if device.type == "cpu" else _STRIP * _LARGER


@torch.no_grad()
def _most_wanted(priorities: Tensor, valid: Tensor | None, batch: int, k: int) -> Tensor:
    if valid is None:
        return priorities.topk(k, -1).indices.expand(batch, -1, -1, -1)
    parts = []
    for allowed in torch.split(valid, max(1, _strip(valid.device) // priorities.numel())):
        best = priorities.masked_fill(~allowed[:, None, None, :], -1).topk(k, -1)
        parts.append(best.indices.masked_fill(best.values < 0, -1))
    return torch.cat(parts)


@lru_cache(maxsize=4)
def random_priorities(seed: int, blocks: int, heads: int, length: int, device: torch.device) -> Tensor:
    """Draw a random order of the keys for each block, head and query, for random attention."""
    generator = torch.Generator().manual_seed(seed)
    size = (heads, length, length)
    drawn = [torch.rand(size, generator=generator, dtype=torch.float64, device="cpu") for _ in range(blocks)]
    return torch.stack([block.argsort(dim=-1, stable=True).to(device, torch.int32) for block in drawn])


@lru_cache(maxsize=32)
def _local(
    attention: str, length: int, k: int, first: int, last: int, apart: bool, device: torch.device
) -> Tensor:
    """Return (L, k + first + last): own band or block, and global tokens, whose own rows are empty."""
    inner = length - first - last
    own = _banded(inner, min(k, inner)) if attention == "banded" else _block_local(inner, k)
    if first + last == 0:
        return own.to(device)
    own = torch.where(own < 0, own, own + first)
    front = torch.arange(0 if apart else first).expand(inner, -1)
    back = torch.arange(length - last, length).expand(inner, -1)
    return F.pad(torch.cat([front, own, back], 1), (0, 0, first, last), value=-1).to(device)


@lru_cache(maxsize=32)
def _banded(length: int, k: int) -> Tensor:
    """Return (L, k): k consecutive keys, (k - 1) // 2 of them left of the query, shifted inward at the ends."""
    start = (torch.arange(length) - (k - 1) // 2).clamp(0, length - k)
    return start[:, None] + torch.arange(k)


@lru_cache(maxsize=32)
def _block_local(length: int, k: int) -> Tensor:
    """Return (L, k): the keys of the query's own block of k; the last block may be short (-1)."""
    keys = (torch.arange(length) // k * k)[:, None] + torch.arange(k)
    return keys.masked_fill(keys >= length, -1)


def straight_through_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, selected: Tensor, dropout: float
) -> Tensor:
    """Mix values with the weights of the selected keys, but differentiate scores with the weights of all keys."""
    length, least = k.shape[2], torch.finfo(q.dtype).min
    scores = scale * (q @ k.mT)
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, None, :], least)
    of_all = scores.softmax(-1)
    with torch.no_grad():
        places = selected.masked_fill(selected < 0, length)
        kept = scores.new_zeros(*scores.shape[:-1], length + 1, dtype=torch.bool).scatter_(-1, places, True)
        left_out = ~kept[..., :length]
        of_selected = scores.masked_fill(left_out, least).softmax(-1).masked_fill_(left_out, 0)
    weights = of_selected + (of_all - of_all.detach())  # the difference is 0, exactly
    return drop(weights, dropout, training=dropout > 0) @ v
