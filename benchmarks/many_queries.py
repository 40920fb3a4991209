"""Memory and errors of what is kept of very many queries: exact counts and extremes, a sample of rows.

    python benchmarks/many_queries.py [--millions 300]

Synthetic rows, a million at a time, of 4 layers with 2 heads; printed are the largest resident memory as it grows
and the errors in rank against the law that the numbers come from.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from scipy.stats import norm

from semdiag.measuring.percentiles import PERCENTILES
from semdiag.measuring.row_sample import KeptRows

PART, LAYERS, HEADS = 1_000_000, 4, 2


def resident() -> float:
    """Largest resident memory so far, MB; not getrusage's, which is inherited from the parent."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=300)
    parser.add_argument("--limit", type=int, default=20_000_000)
    options = parser.parse_args()
    rng, kept, extremes, total = (
        np.random.default_rng(0),
        KeptRows(options.limit, ("layer", "head", "query")),
        [],
        0.0,
    )
    print(f"before: {resident():.0f} MB\n| million rows | largest resident MB | CPU s |\n|---|---|---|")
    start = time.process_time()
    for number in range(options.millions):
        values = rng.normal(size=PART)
        extremes += [values.min(), values.max()]
        total += values.sum()
        layer, head = np.full(PART, number % LAYERS, np.int32), np.arange(PART, dtype=np.int32) % HEADS
        kept.add({"layer": layer, "head": head, "query": np.arange(PART, dtype=np.int32), "dispersion": values})
        if (number + 1) in (10, 20, 30, 40, 100, 200) or number + 1 == options.millions:
            print(f"| {number + 1} | {resident():.0f} | {time.process_time() - start:.0f} |", flush=True)
    pooled = next(row for row in kept.sketched() if row["layer"] == -1)
    wanted = min(extremes), max(extremes), options.millions * PART
    exact = (pooled["p0"], pooled["p100"], pooled["queries"]) == wanted
    error = max(abs(norm.cdf(pooled[f"p{p}"]) - p / 100) for p in PERCENTILES[1:-1])
    print(f"minimum, maximum and count exact: {exact}; mean off by {pooled['mean'] - total / wanted[2]:.1g}")
    print(f"largest error in rank {error:.3%}, stated {pooled['rank_error']:.3%}")
    print(f"rows kept: {sum(len(part['layer']) for part in kept.parts):,}")
    print(f"largest resident at the end: {resident():.0f} MB")


if __name__ == "__main__":
    main()
