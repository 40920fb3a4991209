"""Hunt certified rows that rounding changes: random and adversarial rows, in each format.

python benchmarks/rounded_operands.py --rows 100000000
"""

import argparse
import itertools
import time

import torch

from semdiag.mathematics.mask_stability import kept_in_common, top_set
from semdiag.mathematics.selections.number_formats import NumberFormat, number_format
from semdiag.mathematics.selections.rounded_operands import rounded, rounded_scores, score_error, survives_rounding

FORMATS = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2")
KINDS = ("normal", "apart", "near ties", "boundaries", "powers", "large", "subnormal", "saturating")
BATCH, KEYS, WIDTH, KEPT, SCALE = 20_000, 12, 16, 4, 0.25


def operands(which: str, kind: NumberFormat, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, float32 numbers in float64."""
    q = torch.randn(BATCH, 1, WIDTH, generator=generator, dtype=torch.float64)
    k = torch.randn(BATCH, KEYS, WIDTH, generator=generator, dtype=torch.float64)
    if which == "apart":
        along = torch.randn(BATCH, KEYS, 1, generator=generator, dtype=torch.float64)
        along[:, :KEPT] = 1 + along[:, :KEPT].abs()
        k = along * q
    if which == "near ties":
        k = k[:, :1] * (1 + 2.0**-kind.digits * k)
    if which == "boundaries":
        q, k = (rounded(x, kind) * (1 + 2.0**-kind.digits) for x in (q, k))
    if which == "powers":
        below = (torch.randint(3, x.shape, generator=generator) * 2.0 ** -(kind.digits + 1) for x in (q, k))
        q, k = (x.sign() * 2.0 ** x.abs().log2().round() * (1 - b) for x, b in zip((q, k), below, strict=True))
    first = {
        "large": min(kind.largest / 4, 2.0**100), "subnormal": 2.0**kind.exponent, "saturating": kind.largest
    }.get(which, 1.0)  # fmt: skip
    most = torch.finfo(torch.float32).max
    return (q * first).clamp(-most, most).float().double(), k.float().double()


def hunt(name: str, which: str, generator: torch.Generator) -> tuple[int, int, int]:
    """Return how many rows of a batch are certified, changed or tied, and both."""
    kind = number_format(name)
    q, k = operands(which, kind, generator)
    scores, later = SCALE * (q @ k.mT).squeeze(-2), rounded_scores(q, k, SCALE, kind).squeeze(-2)
    before = top_set(scores, KEPT)
    sure = survives_rounding(scores, score_error(q, k, SCALE, kind).squeeze(-2), before)
    moved = (kept_in_common(later, before) < KEPT) | (top_set(later, KEPT).separation == 0)
    return int(sure.sum()), int(moved.sum()), int((sure & moved).sum())


def main() -> None:
    """Hunt until so many rows were tried; print what was found for each format and kind of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(options.seed)
    cases = list(itertools.product(FORMATS, KINDS))
    found = dict.fromkeys(cases, (0, 0, 0))
    rounds, start = -(-options.rows // (BATCH * len(cases))), time.perf_counter()
    for _ in range(rounds):
        for case in cases:
            added = hunt(*case, generator)
            found[case] = tuple(a + b for a, b in zip(found[case], added, strict=True))
    print(f"{rounds * BATCH:,} rows each, {time.perf_counter() - start:.0f} s")
    for (name, which), (sure, moved, both) in found.items():
        print(f"{name:9} {which:11} certified {sure:>12,}  changed or tied {moved:>12,}  both {both}")
    totals = [sum(entry[i] for entry in found.values()) for i in range(3)]
    print(f"Certified rows that changed: {totals[2]:,} of {totals[0]:,}.")


if __name__ == "__main__":
    main()
