"""Numbers that the paper publishes for its four tasks, to be shown beside measured ones."""

import pandas as pd
import torch

from semdiag.mathematics.bounds.corollary import paper_input_condition, paper_weight_condition
from semdiag.questions.bounds.answer.corollary import PAPER_PERCENTILES

PUBLISHED_K = 5
# Source: the table of dispersions, separations and loads in arXiv 2506.14095. Top-k with k = 5; percentiles
# 75, 90, 95, 100 of dispersions and loads, 25, 10, 5, 0 of separations.
_PUBLISHED = {
    "ListOps": {
        "full_dispersion": (8.61, 18.5, 29.4, 87.8),
        "dispersion": (3.51, 6.74, 9.67, 28.2),
        "separation": (0.016, 0.005, 0.002, 1e-9),
        "load": (1, 3, 15, 598),
    },
    "Parity": {
        "full_dispersion": (8.30, 10.1, 11.2, 19.4),
        "dispersion": (2.31, 3.13, 3.78, 9.16),
        "separation": (0.062, 0.022, 0.011, 1e-6),
        "load": (8, 13, 16, 33),
    },
    "Even pairs": {
        "full_dispersion": (2.03, 4.73, 9.44, 14.6),
        "dispersion": (1.03, 2.84, 5.50, 8.25),
        "separation": (0.009, 0.003, 0.002, 3e-8),
        "load": (6, 17, 26, 40),
    },
    "Missing duplicates": {
        "full_dispersion": (4.63, 9.25, 17.1, 23.9),
        "dispersion": (2.36, 4.25, 4.88, 10.5),
        "separation": (0.018, 0.006, 0.003, 1e-7),
        "load": (7, 15, 21, 40),
    },
}


def published_table() -> pd.DataFrame:
    """Return the paper's percentiles and the left sides of its own conditions for them.

    Returns:
        One row per task and percentile: task, percentile, full_dispersion (δ_s), dispersion (δ_h),
        separation (Δ_h), load, weight_left_side (eq. 304) and input_left_side (eq. 305, β = load / k).

    Example:
        >>> table = published_table()
        >>> print(f"{table.task[0]}, p{table.percentile[0]}: {table.weight_left_side[0]:.3f}")
        ListOps, p75: 0.970
    """
    parts = []
    for task, columns in _PUBLISHED.items():
        table = pd.DataFrame({"task": task, "percentile": PAPER_PERCENTILES, **columns})
        delta_s, delta, gap, load = (
            torch.tensor(table[name].to_numpy(float))
            for name in ("full_dispersion", "dispersion", "separation", "load")
        )
        weight = paper_weight_condition(delta_s, delta, gap)
        inputs = paper_input_condition(delta_s, delta, gap, load / PUBLISHED_K)
        sides = {"weight_left_side": weight.left_side.numpy(), "input_left_side": inputs.left_side.numpy()}
        parts.append(table.assign(**sides))
    return pd.concat(parts, ignore_index=True)
