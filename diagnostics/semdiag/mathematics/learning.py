"""From a Lipschitz constant to learning: uniform stability of SGD (Hardt, Recht and Singer 2016).

The recipes that semdiag measures break the step-size assumptions, and smoothness is not measured.
The bounds show what the theory would say: as ratios, marked "assumptions not met".
"""

import math

from semdiag.mathematics.bounds.bound import Assumption, Bound
from semdiag.mathematics.logarithms import Real, float64


def convex_stability_bound(log_lipschitz: Real, samples: int, step_sum: float) -> Bound:
    """Bound the generalisation gap of SGD on convex, smooth losses: ε ≤ (2α²/n) Σ η_t.

    Source: Hardt, Recht, Singer 2016, Thm 3.8 (docs/theory.md#learning). Deviation: none.

    Args:
        log_lipschitz: ln α of the loss in the parameters.
        samples: n ≥ 1, size of the training set.
        step_sum: Σ_t η_t > 0 over all steps.

    Returns:
        ln ε, with the assumptions that our recipes break or leave unknown: convex, γ-smooth, steps ≤ 2/γ.

    Raises:
        ValueError: if ``samples`` < 1 or ``step_sum`` ≤ 0.

    Example:
        >>> convex_stability_bound(0.0, samples=100, step_sum=5.0).log_value.exp()
        tensor(0.1000, dtype=torch.float64)
    """
    if samples < 1 or step_sum <= 0:
        raise ValueError(
            f"Expected at least one sample and positive steps. Got samples={samples}, step_sum={step_sum}."
        )
    log_gap = math.log(2 * step_sum / samples) + 2 * float64(log_lipschitz)
    assumptions = _not_met("the loss is convex in the parameters", *_SHARED, "every step is at most 2/γ")
    return Bound(log_gap, assumptions, "Hardt et al. 2016, Thm 3.8")


def nonconvex_stability_bound(
    log_lipschitz: Real, samples: int, steps: int, step_constant: float, smoothness: float
) -> Bound:
    """Bound the generalisation gap of SGD on γ-smooth losses in [0, 1] with steps η_t ≤ c/t.

    ε ≤ (1 + 1/(γc))/(n − 1) · (2cα²)^{1/(γc+1)} · T^{γc/(γc+1)}.

    Source: Hardt, Recht, Singer 2016, Thm 3.12 (docs/theory.md#learning). Deviation: none.

    Args:
        log_lipschitz: ln α of the loss in the parameters.
        samples: n ≥ 2, size of the training set.
        steps: T ≥ 1, number of updates.
        step_constant: c > 0.
        smoothness: γ > 0.

    Returns:
        ln ε, with the assumptions that our recipes break.

    Raises:
        ValueError: if a quantity is outside its range.

    Example:
        >>> bound = nonconvex_stability_bound(0.0, samples=101, steps=100, step_constant=0.5, smoothness=2.0)
        >>> bound.log_value.exp(), bound.holds
        (tensor(0.2000, dtype=torch.float64), False)
    """
    if samples < 2 or steps < 1 or step_constant <= 0 or smoothness <= 0:
        raise ValueError(
            "Expected samples ≥ 2, steps ≥ 1, and positive step constant and smoothness. Got "
            f"samples={samples}, steps={steps}, step_constant={step_constant}, smoothness={smoothness}."
        )
    gc = smoothness * step_constant
    log_lead = math.log1p(1 / gc) - math.log(samples - 1)
    log_alpha = (math.log(2 * step_constant) + 2 * float64(log_lipschitz)) / (gc + 1)
    log_gap = log_lead + log_alpha + gc / (gc + 1) * math.log(steps)
    return Bound(log_gap, _not_met(*_NONCONVEX), "Hardt et al. 2016, Thm 3.12")


def gap_ratio(log_lipschitz: Real, log_other: Real, smoothness_times_step: float) -> Bound:
    """Return the ratio of two models' non-convex bounds, all else equal: (α/α')^{2/(γc+1)}.

    Source: docs/theory.md#learning, from Thm 3.12. Deviation: a quotient of bounds bounds nothing;
    it shows the direction and strength of the theory's prediction. γc = 0 gives the convex case's power 2.

    Args:
        log_lipschitz: ln α of one model.
        log_other: ln α' of the other.
        smoothness_times_step: γc ≥ 0, as stated by the user.

    Returns:
        ln of the ratio, with the assumptions that our recipes break.

    Raises:
        ValueError: if γc is negative.

    Example:
        >>> gap_ratio(3.0, 1.0, smoothness_times_step=1.0).log_value.item()
        2.0
    """
    if smoothness_times_step < 0:
        raise ValueError(f"γc must not be negative. Got {smoothness_times_step}.")
    log_ratio = 2 / (smoothness_times_step + 1) * (float64(log_lipschitz) - float64(log_other))
    return Bound(log_ratio, _not_met(*_NONCONVEX), "Hardt et al. 2016, Thm 3.12")


# γ is not measured, and α is measured at single parameters.
_SHARED = (
    "the loss of every sample is smooth with the stated γ",
    "α is a Lipschitz constant wherever the training goes",
)
_NONCONVEX = ("steps never grow and are at most c/t", *_SHARED, "the loss of every sample lies in [0, 1]")


def _not_met(*statements: str) -> tuple[Assumption, ...]:
    """Return the assumptions that the measured training runs are known to break."""
    return tuple(Assumption(statement, {}, holds=False) for statement in statements)
