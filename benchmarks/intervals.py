"""How often 95% intervals of few sequences hold the truth: plain percentiles of the bootstrap, and semdiag's.

    python benchmarks/intervals.py

prints the rates that docs/trust.md states under "Percentiles and intervals": means and medians of n
independent sequences, normal, exponential and lognormal, 4,000 cases of 500 resamples each; and rank correlations
over the rows of sequences, 1,000 cases. A second table, stated in docs/commands/k-sweep.md, has the interval of a
mean change over n texts: Student's, and semdiag's, which corrects it for skewness (Hall). Of 1,500 cases each it
gives the share inside, and the share at or below the upper end, which decides the verdict. A third has intervals
over the chunks of one text. About five minutes on one core.
"""

import math

import numpy as np
import pandas as pd
import scipy
import scipy.signal

from semdiag.measuring.findings.resampling import rank_correlation_interval, sum_ratio_interval, tail_levels
from semdiag.measuring.words import FEWEST

CASES, RESAMPLES, PART = 4000, 500, 100
UNITS = (FEWEST, 8, 20, 50)
LAWS = {
    "normal": (lambda rng, shape: rng.normal(size=shape), {"mean": 0.0, "median": 0.0}),
    "exponential": (lambda rng, shape: rng.exponential(size=shape), {"mean": 1.0, "median": np.log(2)}),
    "lognormal": (lambda rng, shape: np.exp(rng.normal(size=shape)), {"mean": np.exp(0.5), "median": 1.0}),
}

CHANGES = {  # the change of loss of a text, and its mean
    "normal": (lambda rng, n: rng.normal(1, 1, n), 1.0),
    "lognormal, σ = 1": (lambda rng, n: rng.lognormal(0, 1, n), math.exp(0.5)),
    "lognormal, σ = 1.5": (lambda rng, n: rng.lognormal(0, 1.5, n), math.exp(1.125)),
    "Pareto, exponent 2.5": (lambda rng, n: 1 + rng.pareto(2.5, n), 2.5 / 1.5),
    "all in 5% of the texts": (lambda rng, n: (rng.random(n) < 0.05).astype(float), 0.05),
}


def change_coverage(law: str, units: int, cases: int = 1500, seed: int = 0) -> list[float]:
    """Share of cases inside Student's and semdiag's interval, and at or below the upper end of each."""
    rng = np.random.default_rng(seed)
    draw, truth = CHANGES[law]
    reach, held = float(scipy.stats.t.ppf(0.975, units - 1)) / math.sqrt(units), np.zeros(4)
    for _ in range(cases):
        values = draw(rng, units)
        interval, error = sum_ratio_interval(values, np.ones(units)), reach * float(values.std(ddof=1))
        ends = [(values.mean() - error, values.mean() + error), (interval.low, interval.high)]
        held += [*(low <= truth <= high for low, high in ends), *(truth <= high for _, high in ends)]
    return list(held / cases)


def coverage(law: str, statistic: str, units: int, seed: int = 0) -> dict[str, float]:
    """Share of the cases in which the interval holds the truth, by way of reading it off the resamples."""
    rng = np.random.default_rng(seed)
    draw, truths = LAWS[law]
    truth, held = truths[statistic], {"percentile": 0, "semdiag": 0}
    for _ in range(CASES // PART):
        values = draw(rng, (PART, units))
        drawn = rng.integers(units, size=(PART, RESAMPLES, units))
        estimates = getattr(np, statistic)(np.take_along_axis(values[:, None], drawn, 2), axis=2)
        for name, levels in (("percentile", (2.5, 97.5)), ("semdiag", tail_levels(units))):
            low, high = np.percentile(estimates, levels, axis=1)
            held[name] += int(((low <= truth) & (truth <= high)).sum())
    return {name: count / CASES for name, count in held.items()}


def rank_coverage(units: int, rows: int = 12, correlation: float = 0.3, cases: int = 1000, seed: int = 0) -> float:
    """Likewise of rank correlations: rows of a sequence have half of their variance in common, all are normal."""
    rng = np.random.default_rng(seed)
    truth, held = 6 / math.pi * math.asin(correlation / 2), 0
    mix = np.linalg.cholesky([[1.0, correlation], [correlation, 1.0]])
    for case in range(cases):
        common, of_row = rng.normal(size=(units, 1, 2)), rng.normal(size=(units, rows, 2))
        x, y = (((common + of_row) / math.sqrt(2)) @ mix.T).reshape(-1, 2).T
        table = pd.DataFrame({"sample": np.repeat(np.arange(units), rows), "x": x, "y": y})
        interval = rank_correlation_interval(table, "x", "y", seed=case)
        held += interval.low <= truth <= interval.high
    return held / cases


def chunk_coverage(chunks: int, correlation: float = 0.5, spread: float = 1.0, cases: int = 1500) -> list[float]:
    """Share of intervals over the chunks of one text that hold its own mean, and the mean of other texts.

    Changes of chunks are normal with standard deviation 1, neighbours correlated; the means of texts have the
    standard deviation ``spread``.
    """
    rng = np.random.default_rng(0)
    held = np.zeros(2)
    for _ in range(cases):
        own = spread * rng.normal()
        noise = scipy.signal.lfilter(
            [math.sqrt(1 - correlation**2)], [1, -correlation], rng.normal(size=chunks + 100)
        )
        found = sum_ratio_interval(own + noise[100:], np.ones(chunks))
        held += [found.low <= own <= found.high, found.low <= 0 <= found.high]
    return list(held / cases)


def main() -> None:
    """Print the table."""
    print(f"| law | of | {' | '.join(f'n = {units}' for units in UNITS)} |\n{'|---' * (len(UNITS) + 2)}|")
    for law in LAWS:
        for statistic in ("mean", "median"):
            cells = []
            for units in UNITS:
                rates = coverage(law, statistic, units)
                cells.append(f"{rates['percentile']:.3f} → {rates['semdiag']:.3f}")
            print(f"| {law} | {statistic} | {' | '.join(cells)} |", flush=True)
    print(f"| normal | rank correlation | {' | '.join(f'{rank_coverage(units):.3f}' for units in UNITS)} |")
    print("\n| law of a text's change | n | inside: Student | semdiag | below the upper end: Student | semdiag |")
    print("|---" * 6 + "|")
    for law in CHANGES:
        for units in (8, 24, 30, 100):
            cells = " | ".join(f"{share:.3f}" for share in change_coverage(law, units))
            print(f"| {law} | {units} | {cells} |", flush=True)
    print(
        "\n| chunks of one text, neighbours correlated by ½ | texts differ by | own mean held | that of others |"
    )
    print("|---" * 4 + "|")
    for chunks in (16, 64, 300):
        for spread in (0.1, 0.3, 1.0):
            own, others = chunk_coverage(chunks, spread=spread)
            print(f"| {chunks} | {spread} of a chunk's deviation | {own:.3f} | {others:.3f} |", flush=True)


if __name__ == "__main__":
    main()
