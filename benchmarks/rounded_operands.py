"""Hunt certified rows that rounding changes: random and adversarial rows, in each format.

Wide rows are like those of models. Narrow ones, twenty times as many, come nearest to the bounds: with few
products to a score all roundings can have the worst sign at once.

python benchmarks/rounded_operands.py --certified 100000000
"""

import argparse
import itertools
import time
from dataclasses import dataclass

import torch

from semdiag.mathematics.mask_stability import kept_in_common, top_set
from semdiag.mathematics.rounding import (
    NumberFormat,
    number_format,
    rounded,
    rounded_scores,
    score_error,
    survives_rounding,
)

FORMATS = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2")
KINDS = ("normal", "apart", "near ties", "boundaries", "sharp", "powers", "large", "subnormal", "saturating")
SCALE = 0.25


@dataclass(frozen=True)
class Size:
    """Rows of a batch, and how large each is."""

    rows: int
    keys: int
    width: int
    kept: int


SIZES = (Size(2_500, 12, 16, 4), Size(50_000, 4, 2, 2))


def operands(
    which: str, kind: NumberFormat, size: Size, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, float32 numbers in float64."""
    q = torch.randn(size.rows, 1, size.width, generator=generator, dtype=torch.float64)
    k = torch.randn(size.rows, size.keys, size.width, generator=generator, dtype=torch.float64)
    if which == "apart":
        along = torch.randn(size.rows, size.keys, 1, generator=generator, dtype=torch.float64)
        along[:, : size.kept] = 1 + along[:, : size.kept].abs()
        k = along * q
    if which == "near ties":
        k = k[:, :1] * (1 + 2.0**-kind.digits * k)
    if which == "boundaries":
        q, k = (rounded(x, kind) * (1 + 2.0**-kind.digits) for x in (q, k))
    if which == "sharp":
        return sharp(kind, size, generator)
    if which == "powers":
        below = (torch.randint(3, x.shape, generator=generator) * 2.0 ** -(kind.digits + 1) for x in (q, k))
        q, k = (x.sign() * 2.0 ** x.abs().log2().round() * (1 - b) for x, b in zip((q, k), below, strict=True))
    first = {
        "large": min(kind.largest / 4, 2.0**100), "subnormal": 2.0**kind.exponent, "saturating": kind.largest
    }.get(which, 1.0)  # fmt: skip
    most = torch.finfo(torch.float32).max
    return (q * first).clamp(-most, most).float().double(), k.float().double()


def sharp(kind: NumberFormat, size: Size, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return operands just beside the middle between two numbers of the format: all move by half a last place.

    Products of kept keys fall, those of dropped ones rise; kept keys are larger by a few last places.
    """
    place = 2.0 ** (1 - kind.digits)  # of numbers from 1 to 2
    steps = 2 ** (kind.digits - 1)
    many = max(1, steps // 2 - 8)
    low = torch.randint(many, (size.rows, 1, size.width), generator=generator)
    q = 1 + place * (torch.randint(steps, low.shape, generator=generator) + 0.5 - 2.0**-8)  # falls
    ahead = torch.randint(8, (size.rows, size.keys, 1), generator=generator)
    rising = torch.ones(size.rows, size.keys, 1, dtype=torch.float64)
    rising[:, : size.kept], ahead[:, size.kept :] = -1, 0
    k = 1 + place * (low + ahead + 0.5 + 2.0**-8 * rising)
    signs = torch.randint(2, q.shape, generator=generator) * 2.0 - 1
    return (q * signs).float().double(), (k * signs).float().double()


def hunt(name: str, which: str, size: Size, generator: torch.Generator) -> tuple[int, int, int, float]:
    """Return how many rows are certified, changed or tied, and both; the most of its bound that a score moved."""
    kind = number_format(name)
    q, k = operands(which, kind, size, generator)
    scores, later = SCALE * (q @ k.mT).squeeze(-2), rounded_scores(q, k, SCALE, kind).squeeze(-2)
    before, error = top_set(scores, size.kept), score_error(q, k, SCALE, kind).squeeze(-2)
    sure = survives_rounding(scores, error, before)
    moved = (kept_in_common(later[None], before)[0] < size.kept) | (top_set(later, size.kept).separation == 0)
    share = torch.where(error.isfinite() & (error > 0), (later - scores).abs() / error, 0.0).max()
    return int(sure.sum()), int(moved.sum()), int((sure & moved).sum()), float(share)


def main() -> None:
    """Hunt until so many rows were certified; print what was found for each format and kind of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--certified", type=int, default=10**6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator, start = torch.Generator().manual_seed(options.seed), time.perf_counter()
    cases = list(itertools.product(FORMATS, KINDS))
    totals = {case: [0, 0, 0, 0, 0.0] for case in cases}
    while sum(entry[1] for entry in totals.values()) < options.certified:
        for case, size in itertools.product(cases, SIZES):
            *counts, share = hunt(*case, size, generator)
            *sums, most = totals[case]
            totals[case] = [*(a + b for a, b in zip(sums, (size.rows, *counts), strict=True)), max(most, share)]
    for (name, which), (rows, sure, moved, both, share) in totals.items():
        print(
            f"{name:9} {which:11} rows {rows:>11,}  certified {sure:>11,}  changed or tied {moved:>11,}  "
            f"both {both}  a score moved by {share:.3f} of its bound"
        )
    rows, sure, moved, both = (sum(entry[i] for entry in totals.values()) for i in range(4))
    print(f"Certified rows that changed: {both:,} of {sure:,}; {moved:,} of {rows:,} rows changed or tied.")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
