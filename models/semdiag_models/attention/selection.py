"""Select the keys that a query attends to, for each kind of attention."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag_models import products
from semdiag_models.attention.clustered_selection import same_clusters
from semdiag_models.attention.hashed_selection import same_bucket
from semdiag_models.attention.kinds import ATTENTIONS

_STRIP = 2**20  # scores held at a time
_LARGER = 2**6  # on an accelerator, which has no cache to fit and launches every operation: 256 MB in float32


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
    alone = products.takes(rows[0], of_keys[0])
    per_strip = 1 if alone else max(1, _strip(q.device) // length**2)
    strip = rows.new_empty(0 if alone else min(per_strip, batch * heads), length, length)  # memory for all
    for start in range(0, batch * heads, per_strip):
        s = slice(start, start + per_strip)
        if alone:
            scores = products.linear(rows[start] * scale, of_keys[start])[None]
        else:
            scores = strip[: len(rows[s])]
            torch.baddbmm(scores, rows[s], of_keys[s].mT, beta=0, alpha=scale, out=scores)
        if allowed is not None:
            scores.masked_fill_(~allowed[s], float("-inf"))
        values, positions = scores.topk(k, -1)
        selected[s] = positions if valid is None else positions.masked_fill(values == float("-inf"), -1)
    return selected.view(batch, heads, length, k)


def _strip(device: torch.device) -> int:
    """Scores to hold at a time on a device."""
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
