"""Routing attention: a query attends to the keys in its clusters."""

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag_models.attention.hashed_selection import distinct


@torch.no_grad()
def same_clusters(q: Tensor, keys: Tensor, centroids: Tensor, valid: Tensor | None, k: int) -> Tensor:
    """Return positions of the keys in each query's clusters."""
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
