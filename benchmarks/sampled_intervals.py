"""How often the 95 % intervals of drawn queries (--queries) hold the truth; how near drawn masses are to exact.

    python benchmarks/sampled_intervals.py

Part 1: queries of sequences with two heads, a trend along the positions, neighbours that are alike, and what
sequences differ by; of each sequence and head a few queries are drawn, and it is counted how often an interval
holds the statistic of all queries of these sequences, and that of the law the sequences come from. Part 2: causal
attention of synthetic queries and keys, all queries against drawn ones: errors of the mean mass kept, in points.
"""

import argparse
import math

import numpy as np
import torch

from semdiag.mathematics.query_draws import PER_STRATUM, draw_queries
from semdiag.mathematics.row_statistics import row_statistics
from semdiag.mathematics.sampled_intervals import sampled_estimates

HEADS, PERCENTILES = 2, (5, 50, 95)
LAWS = {"normal": lambda z: z, "exponential of it": np.exp, "share in (0, 1)": lambda z: 1 / (1 + np.exp(-2 * z))}


def sequences(rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    """(sequences, heads, positions) standard normal numbers with a trend, neighbours alike, sequences apart."""
    own, trend = rng.normal(size=(count, 1, 1)), np.linspace(-1, 1, length) * math.sqrt(3)
    steps = rng.normal(size=(count, HEADS, length))
    smooth = np.apply_along_axis(np.convolve, 2, steps, np.ones(8) / math.sqrt(8), "same")
    return math.sqrt(0.2) * own + math.sqrt(0.2) * trend + math.sqrt(0.6) * smooth


def coverage(law: str, count: int, length: int, drawn: int, cases: int, seed: int = 0) -> dict[str, list[float]]:
    """Share of cases in which the intervals of mean and percentiles hold what they speak about; of those given."""
    rng, shape = np.random.default_rng(seed), LAWS[law]
    every = shape(sequences(rng, 20_000, 50)).ravel()
    truth = [every.mean(), *np.percentile(every, PERCENTILES)]
    held = {"these": np.zeros((2, 1 + len(PERCENTILES))), "such": np.zeros((2, 1 + len(PERCENTILES)))}
    for _ in range(cases):
        values = shape(sequences(rng, count, length))
        own = [values.mean(), *np.percentile(values, PERCENTILES)]
        places = np.stack([draw_queries(length, HEADS, drawn, length, rng) for _ in range(count)])
        found = np.take_along_axis(values, places, 2)
        sample = np.broadcast_to(np.arange(count)[:, None, None], found.shape).ravel()
        strata = np.arange(found.size) // PER_STRATUM
        estimates = sampled_estimates(found.ravel(), sample, strata, drawn / length, PERCENTILES)
        for about, target in (("these", own), ("such", truth)):
            for at, (estimate, value) in enumerate(zip(estimates, target, strict=True)):
                low, high = getattr(estimate, about)
                given = not math.isnan(low + high)
                held[about][:, at] += given, given and low <= value <= high
    return {about: [*good / np.maximum(given, 1)] for about, (given, good) in held.items()}


def mass_errors(length: int, drawn: int, seeds: int, k: int = 32) -> tuple[float, float, float]:
    """95 % of the errors of the mean mass kept, in points; half width of its interval; share that holds it."""
    draw = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(1, 4, length, 64, generator=draw) for _ in range(2))
    q *= torch.linspace(1, 3, 4)[:, None, None]  # heads from flat to peaked
    exact = row_statistics(q, keys, 64**-0.5, top=k, causal=True).mass_kept(k)
    truth, differences, widths, held = float(exact.double().mean()), [], [], 0
    for seed in range(seeds):
        places = draw_queries(length, 4, drawn, length, np.random.default_rng(seed))
        kept = exact[0].gather(1, torch.from_numpy(places)).double().numpy()
        strata = np.arange(kept.size) // PER_STRATUM
        mean = sampled_estimates(kept.ravel(), np.zeros_like(strata), strata, drawn / length, ())[0]
        differences.append(abs(mean.estimate - truth))
        widths.append((mean.these[1] - mean.these[0]) / 2)
        held += mean.these[0] <= truth <= mean.these[1]
    return 100 * float(np.quantile(differences, 0.95)), 100 * float(np.median(widths)), held / seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| law | sequences × drawn of positions | about | mean | p5 | p50 | p95 |\n|---|---|---|---|---|---|---|"
    )
    for law in LAWS:
        for count, length, drawn in ((1, 4096, 256), (8, 1024, 64), (20, 1024, 64), (50, 512, 32)):
            found = coverage(law, count, length, drawn, options.cases)
            for about in ("these", "such") if count > 1 else ("these",):
                cells = " | ".join(f"{share:.3f}" if share else "–" for share in found[about])
                print(f"| {law} | {count} × {drawn} of {length} | {about} | {cells} |", flush=True)
    print("\n| length | drawn per head | 95 % of errors below, points | half width, points | held |")
    print("|---|---|---|---|---|")
    for length in options.lengths:
        for drawn in (256, 512, 1024):
            print(
                f"| {length} | {drawn} | {' | '.join(f'{n:.2f}' for n in mass_errors(length, drawn, 400))} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
