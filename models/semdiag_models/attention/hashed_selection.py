"""LSH attention: a query attends to the keys in its bucket of sign hashes."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def same_bucket(q: Tensor, keys: Tensor, directions: Tensor, valid: Tensor | None, k: int) -> Tensor:
    """Return positions of the keys in each query's bucket, all rounds together."""
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
