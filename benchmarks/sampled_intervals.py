"""How often the 95% intervals of drawn queries (--queries) hold the truth; how near drawn masses are to exact.

    python benchmarks/sampled_intervals.py [--unequal]

Part 1: queries of sequences with two heads, a trend along the positions, neighbours that are alike, and what
sequences differ by; of each sequence and head a few queries are drawn, and it is counted how often an interval
holds the statistic of all queries of these sequences, and that of the law the sequences come from; then the same
of sequences whose lengths are drawn (--unequal: that alone). Part 2: causal attention of synthetic queries and
keys, all queries against drawn ones: errors of the mean mass kept, in points.
"""

import argparse
import math
from collections.abc import Callable

import numpy as np
import torch

from semdiag.mathematics.row_statistics import row_statistics
from semdiag.mathematics.sampled_intervals import PER_STRATUM, draw_queries, sampled_estimates

HEADS, PERCENTILES = 2, (5, 50, 95)
LAWS = {"normal": lambda z: z, "exponential of it": np.exp, "share in (0, 1)": lambda z: 1 / (1 + np.exp(-2 * z))}


def sequences(rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    """(sequences, heads, positions) standard normal numbers with a trend, neighbours alike, sequences apart."""
    own, trend = rng.normal(size=(count, 1, 1)), np.linspace(-1, 1, length) * math.sqrt(3)
    steps = rng.normal(size=(count, HEADS, length))
    smooth = np.apply_along_axis(np.convolve, 2, steps, np.ones(8) / math.sqrt(8), "same")
    return math.sqrt(0.2) * own + math.sqrt(0.2) * trend + math.sqrt(0.6) * smooth


def drawn_lengths(rng: np.random.Generator, count: int, shortest: int, length: int) -> list[np.ndarray]:
    """Sequences of any length between two, all lengths alike, (heads, positions) each."""
    if shortest == length:
        return list(sequences(rng, count, length))
    return [sequences(rng, 1, int(n))[0] for n in rng.integers(shortest, length + 1, count)]


def law_of(shape: Callable, rng: np.random.Generator, shortest: int, length: int) -> list[float]:
    """Mean and percentiles of all queries of 20,000 sequences; of equal ones the length changes nothing."""
    lengths = [50] if shortest == length else range(shortest, length + 1)
    every = [shape(sequences(rng, 20_000 // len(lengths), n)).ravel() for n in lengths]
    values = np.concatenate(every)
    return [values.mean(), *np.percentile(values, PERCENTILES)]


def coverage(
    law: str, count: int, lengths: tuple[int, int], drawn: int, cases: int, seed: int = 0
) -> dict[str, list[float]]:
    """Share of cases in which the intervals of mean and percentiles hold what they speak about; of those given."""
    rng, shape = np.random.default_rng(seed), LAWS[law]
    truth = law_of(shape, rng, *lengths)
    held = {"these": np.zeros((2, 1 + len(PERCENTILES))), "such": np.zeros((2, 1 + len(PERCENTILES)))}
    for _ in range(cases):
        values = [shape(one) for one in drawn_lengths(rng, count, *lengths)]
        whole = np.concatenate([one.ravel() for one in values])
        own = [whole.mean(), *np.percentile(whole, PERCENTILES)]
        found, sample, strata = [], [], []
        for at, one in enumerate(values):
            places = draw_queries(one.shape[1], HEADS, drawn, lengths[1], rng)
            there = places >= 0
            found.append(np.take_along_axis(one, places, 1)[there])
            sample.append(np.full(len(found[-1]), at))
            head, column = there.nonzero()
            strata.append((at * HEADS + head) * drawn + column // PER_STRATUM)
        columns = (np.concatenate(column) for column in (found, sample, strata))
        estimates = sampled_estimates(*columns, drawn / lengths[1], PERCENTILES)
        for about, target in (("these", own), ("such", truth)):
            for at, (estimate, value) in enumerate(zip(estimates, target, strict=True)):
                low, high = getattr(estimate, about)
                given = not math.isnan(low + high)
                held[about][:, at] += given, given and low <= value <= high
    return {about: [*good / np.maximum(given, 1)] for about, (given, good) in held.items()}


def mass_errors(length: int, drawn: int, seeds: int, k: int = 32) -> tuple[float, float, float]:
    """95% of the errors of the mean mass kept, in points; half width of its interval; share that holds it."""
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
    parser.add_argument("--unequal", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| law | sequences × drawn of positions | about | mean | p5 | p50 | p95 |\n|---|---|---|---|---|---|---|"
    )
    equal = [(1, (4096, 4096), 256), (8, (1024, 1024), 64), (20, (1024, 1024), 64), (50, (512, 512), 32)]
    unequal = [(count, (20, 200), 32) for count in (8, 12, 20, 50)]
    for law in LAWS:
        for count, lengths, drawn in unequal if options.unequal else equal + unequal:
            rates = coverage(law, count, lengths, drawn, options.cases)
            length = "–".join(map(str, dict.fromkeys(lengths)))
            for about in ("these", "such") if count > 1 else ("these",):
                cells = " | ".join(f"{share:.3f}" if share else "–" for share in rates[about])
                print(f"| {law} | {count} × {drawn} of {length} | {about} | {cells} |", flush=True)
    if options.unequal:
        return
    print("\n| length | drawn per head | 95% of errors below, points | half width, points | held |")
    print("|---|---|---|---|---|")
    for length in options.lengths:
        for drawn in (256, 512, 1024):
            print(
                f"| {length} | {drawn} | {' | '.join(f'{n:.2f}' for n in mass_errors(length, drawn, 400))} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
