"""How often a mask is called within the tolerance though its mean change is not.

``python benchmarks/false_verdicts.py``, about 2 minutes. Changes of n samples are drawn from laws whose mean is
1.5 times the tolerance. "Before" is the rule of release 0.5.0: the upper end of the mean's interval, and at least
8 samples; "now" is that of the verdict.
"""

import math

import numpy as np

from semdiag.measuring.findings.resampling import sum_ratio_interval
from semdiag.questions.k_sweep.changes import change_interval, share_below
from semdiag.questions.k_sweep.rerun import HARM, MOST_HARMED

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
                before += sum_ratio_interval(changes, np.ones(n)).high <= TOLERANCE and n >= 8
                high = change_interval(changes, np.ones(n), TOLERANCE).high
                held = changes.max() <= TOLERANCE if math.isnan(high) else high <= TOLERANCE
                harmed = share_below("harmed", changes > HARM * TOLERANCE)
                now += held and harmed["harmed_high"] <= MOST_HARMED
            cells.append(f"{before / DRAWS:.1%}, {now / DRAWS:.1%}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
