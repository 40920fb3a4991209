"""What statistics cost, as a formula: time of the row statistics against length, heads, layers, samples and K.

    python benchmarks/cost_model.py

Measures causal calls of synthetic queries and keys (width 64, float32, one thread, CPU time, least of 3), fits

    seconds = layers × samples × heads × (a S + b R K + c S [K > 0] + d L K),  R rows looked at, S = R L / 2 scores

with coefficients ≥ 0 by least squares of relative errors, and prints them with every residual. Layers are calls.
"""

import argparse
import os
import time

import numpy as np
import torch
from scipy.optimize import nnls

from semdiag.mathematics.row_statistics import row_statistics

# samples, heads, L, K, R (drawn queries; 0: all)
POINTS = (
    (1, 12, 256, 32, 0), (4, 12, 256, 32, 0), (1, 12, 512, 32, 0), (1, 12, 1024, 32, 0), (1, 12, 2048, 32, 0),
    (1, 4, 1024, 32, 0), (1, 12, 1024, 8, 0), (1, 12, 1024, 0, 0), (1, 1, 4096, 32, 0), (1, 1, 8192, 32, 0),
    (1, 12, 2048, 8, 0), (1, 12, 8192, 32, 128), (1, 12, 32768, 32, 128), (1, 4, 131072, 32, 128),
)  # fmt: skip


def measured(samples: int, heads: int, length: int, top: int, drawn: int, repeats: int) -> float:
    """CPU seconds of the statistics of one call, least of several."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(samples, heads, length, 64, generator=draw) for _ in range(2))
    places = None
    if drawn:
        places = torch.randint(length, (samples, heads, drawn), generator=draw).sort(-1).values
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        row_statistics(q, k, 0.125, top=top, causal=True, places=places)
        times.append(time.process_time() - start)
    return min(times[1:])


def terms(samples: int, heads: int, length: int, top: int, drawn: int) -> list[float]:
    """What each coefficient is multiplied with: scores (causal: half), top scores of rows, loads of keys."""
    rows = drawn or length
    scores = rows * length / 2
    return [samples * heads * n for n in (scores, rows * top, scores * (top > 0), length * top)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, load {os.getloadavg()[0]:.1f}, least of {options.repeats}")
    seconds = np.array([measured(*point, options.repeats) for point in POINTS])
    design = np.array([terms(*point) for point in POINTS])
    found, _ = nnls(design / seconds[:, None], np.ones(len(POINTS)))
    names = ("a score", "a row and k ≤ K", "a score, if K > 0", "a key and k ≤ K")
    print("; ".join(f"{name} {1e9 * value:.3g} ns" for name, value in zip(names, found, strict=True)))
    print("| samples × heads | L | K | drawn | measured s | fitted s | residual |\n|---|---|---|---|---|---|---|")
    for (samples, heads, length, top, drawn), true, row in zip(POINTS, seconds, design, strict=True):
        fit = float(row @ found)
        place = f"{samples} × {heads} | {length} | {top} | {drawn or 'all'}"
        print(f"| {place} | {true:.3f} | {fit:.3f} | {fit / true - 1:+.0%} |")
    slope = np.polyfit(np.log([p[2] for p in POINTS[2:5]]), np.log(seconds[2:5]), 1)[0]
    print(f"exponent of L from 512 to 2048, all queries: {slope:.2f}")
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
