"""How often a mask is called within the tolerance though its mean change is not.

``python benchmarks/false_verdicts.py``, about 2 minutes. Changes of n samples are drawn from laws whose mean is
1.5 times the tolerance. "Before" is the rule of release 0.5.0: the upper end of the mean's interval, and at least
8 samples; "now" is that of the verdict.
"""

import math

import numpy as np
import pandas as pd

from semdiag.measuring.findings.resampling import sum_ratio_interval
from semdiag.questions.k_sweep.answer.rerun import harm
from semdiag.questions.k_sweep.measure.rerun import HARM, MOST_HARMED

TOLERANCE, MEAN, DRAWS = 0.01, 0.015, 1000
SIZES = 8, 20, 100, 500


def rare(share: float):
    """The whole change in a share of the samples."""
    return lambda rng, n: MEAN / share * (rng.random(n) < share)


def lognormal(sigma: float):
    """Positive, with a heavy tail."""
    return lambda rng, n: MEAN * rng.lognormal(-(sigma**2) / 2, sigma, n)


LAWS = {
    "normal, as wide as its mean": lambda rng, n: rng.normal(MEAN, MEAN, n),
    "lognormal, σ = 1": lognormal(1),
    "lognormal, σ = 1.5": lognormal(1.5),
    "all in 5% of the samples": rare(0.05),
    "all in 1%": rare(0.01),
    "all in 0.1%": rare(0.001),
}


def main() -> None:
    """Print the table in Markdown."""
    print("| law of the change | " + " | ".join(f"n = {n}: before, now" for n in SIZES) + " |")
    print("|---" * (len(SIZES) + 1) + "|")
    for name, draw in LAWS.items():
        cells = []
        for n in SIZES:
            rng, before, now = np.random.default_rng(0), 0, 0
            for _ in range(DRAWS):
                changes = draw(rng, n)
                interval = sum_ratio_interval(changes, np.ones(n))
                within = interval.high <= TOLERANCE
                before += within and n >= 8
                alike = interval.low == interval.high or math.isnan(interval.high)
                held = (within and not alike) or (alike and changes.max() == changes.min() <= TOLERANCE)
                rare = harm(pd.Series(changes), pd.Series(np.ones(n)), HARM * TOLERANCE)
                now += held and rare["harmed_high"] <= MOST_HARMED
            cells.append(f"{before / DRAWS:.1%}, {now / DRAWS:.1%}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
