"""LSH attention: a query attends to the keys in its bucket of sign hashes."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def same_bucket(q: Tensor, keys: Tensor, directions: Tensor, valid: Tensor | None, k: int) -> Tensor:
    """Return positions of the keys in each query's bucket, all rounds together.

    In every round, queries and keys are each sorted by their hashes (equal ones by position) and cut into buckets
    of k; the queries of a bucket attend to the keys of the bucket with the same number. A short last bucket takes
    the last k keys. So every query keeps exactly k keys per round, or all if there are fewer.

    Source: Kitaev et al., Reformer (2020): sort, cut into chunks, union over rounds; queries and keys sorted
    separately as in Daras et al., SMYRF (2020). Deviations: no attention to neighbouring buckets; a key found in
    several rounds counts once; a query may attend to itself; the hash functions are drawn once.

    Args:
        q: queries (B, H, L, D).
        keys: keys (B, H, L, D).
        directions: (H, R, bits, D), or (H, R, bits, D + 1) for asymmetric hashes; see :func:`hash_directions`.
        valid: (B, L) bool, keys that may be attended to; None means all. The others are sorted last.
        k: keys of a bucket, at most L.

    Returns:
        (B, H, L, min(R·k, L)) int64, distinct in a row, -1 for none.
    """
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
    """Return sign hashes: bit n of a vector's code is 1 if its product with direction n is negative.

    Two vectors at angle θ agree in a bit with probability 1 − θ/π over normal directions.

    Source: Charikar, Similarity estimation techniques from rounding algorithms (2002). Deviation: none.

    Args:
        x: (…, H, L, D).
        directions: (H, R, bits, D).

    Returns:
        (…, H, R, L) int64 in 0 … 2^bits - 1.

    Example:
        >>> x = torch.tensor([[[3.0, 1.0], [-1.0, 1.0], [-1.0, -2.0]]])
        >>> bucket_codes(x, torch.eye(2)[None, None]).tolist()
        [[[0, 1, 3]]]
    """
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
    """Draw a model's hash functions, on the CPU in float64 whatever the device.

    Args:
        seed: of the draw.
        shape: blocks, heads, rounds, bits, entries of a vector.
        device: where the result is wanted.
        dtype: of the result.

    Returns:
        Standard normal directions of that shape.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(device, dtype)


def distinct(positions: Tensor) -> Tensor:
    """Remove repetitions from each row.

    Args:
        positions: (B, H, L, K) int64 key positions below L, -1 for none.

    Returns:
        (B, H, L, min(K, L)): rising, then -1.

    Example:
        >>> distinct(torch.tensor([[[[2, -1, 0, 2]] * 4]]))[0, 0, 0].tolist()
        [0, 2, -1, -1]
    """
    none = torch.iinfo(positions.dtype).max
    ordered = positions.sort(-1).values
    repeated = F.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
    ordered = ordered.masked_fill(repeated | (ordered < 0), none).sort(-1).values
    return ordered.masked_fill(ordered == none, -1)[..., : positions.shape[2]]


def _lengthened(q: Tensor, keys: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Append one entry: 0 for queries; for keys what gives them all the length of the head's longest valid key.

    The angle between query and key then decreases as their product increases.

    Source: Neyshabur and Srebro, On symmetric and asymmetric LSHs (2015). Deviation: none.
    """
    square = keys.square().sum(-1, keepdim=True)
    counted = square if valid is None else square.masked_fill(~valid[:, None, :, None], 0)
    rest = (counted.amax(2, keepdim=True) - square).clamp(min=0).sqrt()
    return F.pad(q, (0, 1)), torch.cat([keys, rest], -1)
