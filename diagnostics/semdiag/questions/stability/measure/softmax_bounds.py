"""Measured changes of softmax rows, beside the bounds by each form of ξ."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.attention_kinds import FIXED_MASKS, HEAVY_HITTERS
from semdiag.mathematics.paper_stability import paper_fixed_mask_stability, paper_heavy_hitter_stability
from semdiag.mathematics.same_set_pairs import same_set_stability, weight_change_bound
from semdiag.mathematics.softmax_secants import local_stability_of_weight
from semdiag.mathematics.softmax_stability import (
    fixed_mask_row_stability,
    fixed_mask_stability,
    heavy_hitter_row_stability,
    heavy_hitter_stability,
)


def with_bounds(secants: pd.DataFrame, attention: str) -> pd.DataFrame:
    """Add secants and the logarithms of every form of ξ to the table ``secants`` of one model."""
    with np.errstate(invalid="ignore", divide="ignore"):
        secant = secants["weight_change"] / secants["score_change"].where(secants["score_change"] > 0)
    known = np.isfinite(secants["dispersion"]) & secants["separation"].notna()
    usable = secants[known]
    delta, gap, kept = (
        torch.tensor(usable[name].to_numpy(np.float64)) for name in ("dispersion", "separation", "kept")
    )
    fixed = np.isposinf(secants["separation"]) | (attention in FIXED_MASKS)
    columns: dict[str, Any] = {"secant": secant, "fixed_set": fixed}
    for name, values in _constants(attention, delta, gap, kept).items():
        column = np.full(len(secants), np.nan)
        column[known.to_numpy()] = values.numpy()
        columns[name] = pd.Series(column, index=secants.index)
    columns["ln_pair"], columns["ln_row"] = _of_pairs(secants, columns["ln_sound"], columns["ln_row"])
    return secants.assign(**columns)


def _of_pairs(secants: pd.DataFrame, ln_sound: pd.Series, ln_row: pd.Series) -> tuple[pd.Series, pd.Series]:
    """Return both constants of each pair: from the change of scores if the set is the same, else of all rows."""
    same = secants["same_set"].to_numpy(bool) & np.isfinite(secants["dispersion"].to_numpy(np.float64))
    spread, odds, largest = (
        torch.tensor(secants[name].to_numpy(np.float64))
        for name in ("score_change_range", "log_odds", "score_change_max")
    )
    xi = same_set_stability(odds, spread).log_value.numpy()
    row = torch.where(largest > 0, torch.log(weight_change_bound(spread) / largest), 0.0).numpy()
    return ln_sound.where(~same, xi), ln_row.where(~same, row)


def _constants(attention: str, delta: Tensor, gap: Tensor, kept: Tensor) -> dict[str, Tensor]:
    if attention in FIXED_MASKS:
        bounds = {
            "ln_sound": fixed_mask_stability(delta, kept),
            "ln_paper": paper_fixed_mask_stability(delta, kept),
            "ln_row": fixed_mask_row_stability(delta, kept),
        }
    elif attention in HEAVY_HITTERS:
        bounds = {
            "ln_sound": heavy_hitter_stability(delta, gap, kept),
            "ln_paper": paper_heavy_hitter_stability(delta, gap, kept),
            "ln_row": heavy_hitter_row_stability(delta, gap, kept),
        }
    else:
        return dict.fromkeys(("ln_sound", "ln_paper", "ln_row"), torch.full_like(delta, torch.nan))
    return {name: bound.log_value for name, bound in bounds.items()}


def local_stability(queries: pd.DataFrame) -> "pd.Series[float]":
    """Return the local ξ_loc of each query, from its largest attention weight."""
    if "largest_weight" not in queries:
        return pd.Series(np.nan, index=queries.index)
    largest = torch.tensor(queries["largest_weight"].to_numpy(np.float64))
    return pd.Series(local_stability_of_weight(largest).numpy(), index=queries.index)
