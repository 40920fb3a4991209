"""How often an end point is accepted, and how often a 95% interval would then hold it.

    python benchmarks/end_points.py

prints the table of docs/theory.md#empirical: maxima of 24 and 40 blocks of five draws, 400 cases each; "vague" is
the rule of version 0.2 (the profile-likelihood interval reaches no further than 10 ranges above the maxima),
"endless" the present one. The test of the fit, which refuses about one right law in twenty, is left out. Ten
minutes on one core.
"""

import math

import numpy as np
from scipy.stats import weibull_max

from semdiag.mathematics.extreme_values import REPLICATES, _endless_gaps, _gap, _profile, fit_reverse_weibull

CASES, DRAWS, VAGUE, LIKELY = 400, 5, 10.0, 0.5 * 3.841
LAWS = {
    "normal": (math.inf, lambda rng, shape: rng.normal(size=shape)),
    "exponential": (math.inf, lambda rng, shape: rng.exponential(size=shape)),
    "uniform": (1.0, lambda rng, shape: rng.uniform(size=shape)),
    "Beta(1, ½)": (1.0, lambda rng, shape: rng.beta(1, 0.5, size=shape)),
    "Beta(2, 2)": (1.0, lambda rng, shape: rng.beta(2, 2, size=shape)),
    "Beta(2, 5)": (1.0, lambda rng, shape: rng.beta(2, 5, size=shape)),
    "Beta(5, 20)": (1.0, lambda rng, shape: rng.beta(5, 20, size=shape)),
}


def case(values: np.ndarray, nearest: float, end: float) -> tuple[bool, bool, bool]:
    """Whether the older and the present rule accept, and whether the interval holds the end point."""
    fit = fit_reverse_weibull(values)
    best = -float(weibull_max.logpdf(values, fit.shape, loc=fit.end, scale=fit.scale).sum())
    profiles = [_profile(values, g) for g in np.linspace(math.log(1e-4), math.log(50.0), 80)]
    likely = [fit.end, *(other.end for cost, other in profiles if cost <= best + LIKELY)]
    sharp = max(likely) - values.max() <= VAGUE * np.ptp(values)
    return sharp, _gap(values, fit) < nearest, min(likely) <= end <= max(likely)


def main() -> None:
    """Print the table."""
    print("| law | blocks | vague: accepted | held, given that | endless: accepted | held, given that |")
    print("|---|---|---|---|---|---|")
    for name, (end, draw) in LAWS.items():
        for blocks in (24, 40):
            rng = np.random.default_rng(blocks)
            nearest = float(np.sort(_endless_gaps(blocks, DRAWS, REPLICATES))[1])
            samples = (draw(rng, (blocks, DRAWS)).max(1) for _ in range(CASES))
            table = np.array([case(values, nearest, end) for values in samples])
            cells = []
            for rule in (0, 1):
                accepted = table[:, rule]
                held = f"{table[accepted, 2].mean():.2f}" if accepted.sum() >= 5 else "–"
                cells += [f"{accepted.mean():.3f}", held]
            print(f"| {name} | {blocks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
