"""Hunt for pairs of softmax rows that break a bound of docs/theory.md: random ones, then gradient ascent.

    python benchmarks/bound_hunts.py [--pairs 20000] [--steps 200]

Prints how many pairs were tried, how many broke each bound (none should) and how near the nearest came.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from semdiag.mathematics.mask_stability import heavy_hitter_pair_stability, same_set_stability, weight_change_bound
from semdiag.mathematics.softmax_stability import (
    log_odds_of_largest,
    score_change,
    score_range_change,
    weight_change,
)

KEYS = (2, 4, 6, 10, 40)
SLACK = 1 + 1e-9  # secants of rows that are 1e-4 apart or more, in float64
Pair = tuple[Tensor, Tensor]


def pairs_of_rows(generator: torch.Generator, pairs: int, keys: int) -> Pair:
    """Rows of all scales, of two levels or spread out, and others a step of any size away."""

    def size(low: float, high: float) -> Tensor:
        return 10 ** (low + (high - low) * torch.rand(pairs, 1, generator=generator, dtype=torch.float64))

    def entries() -> Tensor:
        spread = torch.randn(pairs, keys, generator=generator, dtype=torch.float64)
        levels = torch.rand(pairs, 1, generator=generator) < 0.5
        return torch.where(levels, spread.sign(), spread)

    z = size(-2, 1.3) * entries()
    return z, z + size(-3, 1.3) * entries()


def pairs_that_swap(generator: torch.Generator, pairs: int, keys: int) -> Pair:
    """Rows whose kept keys are the first or second half, in part: keys of any height leave, others come."""
    z, other = pairs_of_rows(generator, pairs, keys)
    k = keys // 2
    gap = 10 ** (4 * torch.rand(pairs, 1, generator=generator, dtype=torch.float64) - 3)
    swaps = torch.randint(1, k + 1, (pairs, 1), generator=generator)
    position = torch.arange(keys)
    kept, after = position < k, (position >= swaps) & (position < swaps + k)
    quiet = torch.rand(pairs, 1, generator=generator, dtype=torch.float64) < 0.5
    still = torch.where(quiet, z.abs(), other.abs())
    return torch.where(kept, gap + z.abs(), -z.abs() * 1e-2), torch.where(after, gap + still, -still * 1e-2)


def heavy_hitter(z: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return ‖p − p'‖₁ of top-k rows and ξ_h‖z − z'‖₁, infinite for pairs that keep the same set."""
    k = z.shape[-1] // 2
    sets = [torch.zeros_like(v, dtype=torch.bool).scatter(-1, v.topk(k).indices, True) for v in (z, other)]
    every = torch.ones_like(sets[0])
    bound = heavy_hitter_pair_stability(z, other, *sets, every, every)
    promised = bound.log_value.exp() * score_change(z, other, *sets)
    return weight_change(z, other, *sets), promised.where((sets[0] != sets[1]).any(-1), torch.inf)


def same_set(z: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ‖p − p'‖₁ of rows over all keys, its bound from the range, and ξ of the pair · ‖z − z'‖₁."""
    every = torch.ones_like(z, dtype=torch.bool)
    pair = z, other, every, every
    odds = (log_odds_of_largest(z, every) + log_odds_of_largest(other, every)) / 2
    spread = score_range_change(*pair)
    xi = same_set_stability(odds, spread).log_value.exp()
    return weight_change(*pair), weight_change_bound(spread), xi * score_change(*pair)


HUNTED: dict[str, tuple[Callable[..., Pair], Callable[..., tuple[Tensor, Tensor]]]] = {
    "heavy-hitter ξ": (pairs_that_swap, heavy_hitter),
    "same set, 2 tanh(range/4)": (pairs_of_rows, lambda *pair: same_set(*pair)[:2]),
    "same set, ξ of the pair": (pairs_of_rows, lambda *pair: same_set(*pair)[::2]),
}


def climbed(judge: Callable[..., tuple[Tensor, Tensor]], pair: Pair, steps: int) -> tuple[int, int, float]:
    """Ascend the ratio of measured to bound: pairs judged, pairs that broke the bound, the largest ratio."""
    ends = [end.clone().requires_grad_() for end in pair]
    optimiser = torch.optim.Adam(ends, lr=0.02)
    judged, broken, nearest = 0, 0, 0.0
    for _ in range(steps):
        measured, promised = judge(*ends)
        apart = (ends[0] - ends[1]).detach().abs().amax(-1) > 1e-4
        usable = apart & promised.isfinite() & (promised > 0) & (measured > 1e-9)
        ratio = (measured / promised)[usable]
        judged += int(usable.sum())
        broken += int((ratio > SLACK).sum())
        nearest = max(nearest, ratio.max().item() if ratio.numel() else 0.0)
        optimiser.zero_grad()
        (-ratio.log().sum()).backward()
        for end in ends:
            end.grad = end.grad.nan_to_num() if end.grad is not None else None
        optimiser.step()
    return judged, broken, nearest


def main() -> None:
    """Hunt each bound with rows of 2 to 40 keys."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20_000, help="random pairs for each number of keys")
    parser.add_argument("--steps", type=int, default=200, help="of gradient ascent, from 200 of the pairs")
    options = parser.parse_args()
    print(f"bound | pairs judged | exceeded | largest measured/bound with {', '.join(map(str, KEYS))} keys")
    for name, (drawn, judge) in HUNTED.items():
        judged, broken, near = 0, 0, []
        for keys in KEYS:
            generator = torch.Generator().manual_seed(keys)
            count, bad, ratio = climbed(judge, drawn(generator, options.pairs, keys), 1)
            more, worse, highest = climbed(judge, drawn(generator, 200, keys), options.steps)
            judged, broken = judged + count + more, broken + bad + worse
            near.append(f"{max(ratio, highest):.3f}")
        print(f"{name} | {judged:,} | {broken:,} | {', '.join(near)}", flush=True)


if __name__ == "__main__":
    main()
