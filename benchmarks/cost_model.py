"""What statistics cost, as formulas: time and memory of the row statistics against length, heads, samples and K.

    python benchmarks/cost_model.py

Measures causal calls of synthetic queries and keys (width 64, float32, one thread, CPU time, least of 3),
fits

    seconds = layers × samples × heads × (a S + b R K + c S [K > 0] + d L K),  R rows looked at, S = R L / 2 scores

with coefficients ≥ 0 by least squares of relative errors, and prints them with every residual. Layers are calls.
Memory (Linux) is what the resident set of a process of its own grows by above queries and keys, at its peak:

    bytes = samples × heads × (a L K + b R K + c L) + d min(samples × heads × R L × 4, 32 MB)
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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


_STRIPS = 32e6  # bytes of scores and what is made of them at a time; chosen by the residuals
Point = tuple[int, int, int, int, int]


def call(samples: int, heads: int, length: int, top: int, drawn: int) -> Callable[[], object]:
    """The statistics of one call on random queries and keys, to be run."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(samples, heads, length, 64, generator=draw) for _ in range(2))
    places = None
    if drawn:
        places = torch.randint(length, (samples, heads, drawn), generator=draw).sort(-1).values
    return lambda: row_statistics(q, k, 0.125, top=top, causal=True, places=places)


def measured(point: Point, repeats: int) -> float:
    """CPU seconds of the statistics of one call, least of several."""
    run = call(*point)
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times[1:])


def resident(entry: str) -> int:
    """A line of this process's memory in bytes: VmRSS, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(entry))


def peak(point: Point) -> int:
    """Bytes by which this process's memory grows in one call, at its peak; a small one has run before."""
    call(1, 1, 64, point[3], 0)()
    run = call(*point)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = resident("VmRSS")
    held = run()
    del held
    return resident("VmHWM") - before


def peaks() -> np.ndarray:
    """Of every point, each in a process of its own."""
    command = [sys.executable, __file__, "--peak"]
    done = [
        subprocess.run([*command, *map(str, point)], check=True, stdout=subprocess.PIPE, text=True)
        for point in POINTS
    ]
    return np.array([int(one.stdout) for one in done], dtype=float)


def memory_terms(samples: int, heads: int, length: int, top: int, drawn: int) -> list[float]:
    """What each coefficient of memory is multiplied with."""
    rows = drawn or length
    scores = min(4 * samples * heads * rows * length, _STRIPS)
    return [*(samples * heads * n for n in (length * top, rows * top, length)), scores]


def terms(samples: int, heads: int, length: int, top: int, drawn: int) -> list[float]:
    """What each coefficient is multiplied with: scores (causal: half), top scores of rows, loads of keys."""
    rows = drawn or length
    scores = rows * length / 2
    return [samples * heads * n for n in (scores, rows * top, scores * (top > 0), length * top)]


def fit(values: np.ndarray, design: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients ≥ 0 of least relative squares, and the fitted values."""
    coefficients, _ = nnls(design / values[:, None], np.ones(len(values)))
    return coefficients, design @ coefficients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak", type=int, nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        print(peak(tuple(options.peak)))
        return
    print(f"torch {torch.__version__}, one thread, load {os.getloadavg()[0]:.1f}, least of {options.repeats}")
    seconds = np.array([measured(point, options.repeats) for point in POINTS])
    times, fitted = fit(seconds, np.array([terms(*point) for point in POINTS]))
    costs = ("a score", "a row and k ≤ K", "a score, if K > 0", "a key and k ≤ K")
    print("; ".join(f"{name} {1e9 * value:.3g} ns" for name, value in zip(costs, times, strict=True)))
    memory = peaks()
    sizes, filled = fit(memory, np.array([memory_terms(*point) for point in POINTS]))
    holders = ("a key and k ≤ K", "a row and k ≤ K", "a key", "a byte of scores up to 32 MB")
    print("; ".join(f"{name} {value:.3g} bytes" for name, value in zip(holders, sizes, strict=True)))
    print("| samples × heads | L | K | drawn | s | fitted s | residual | MB | fitted MB | residual |")
    print(f"|{'---|' * 10}")
    for i, (samples, heads, length, top, drawn) in enumerate(POINTS):
        place = f"{samples} × {heads} | {length} | {top} | {drawn or 'all'}"
        time_cells = f"{seconds[i]:.3f} | {fitted[i]:.3f} | {fitted[i] / seconds[i] - 1:+.0%}"
        memory_cells = f"{memory[i] / 1e6:.0f} | {filled[i] / 1e6:.0f} | {filled[i] / memory[i] - 1:+.0%}"
        print(f"| {place} | {time_cells} | {memory_cells} |")
    slope = np.polyfit(np.log([p[2] for p in POINTS[2:5]]), np.log(seconds[2:5]), 1)[0]
    print(f"exponent of L from 512 to 2048, all queries: {slope:.2f}")
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
