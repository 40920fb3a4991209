"""Percentiles of the loss's secants against the radius, and of one model's over another's, with intervals."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import Pair
from semdiag.measuring.findings.resampling import interval_ends
from semdiag.measuring.measurements import Measurements

PERCENTILES = (50, 75, 95, 99)  # of the paper's Fig. 10
RESAMPLES = 500
Array = NDArray[np.float64]


def secant_percentiles(findings: Findings, seed: int = 0) -> pd.DataFrame:
    """Return percentiles of the secants in random planes of all tensors, by radius."""
    rows: list[dict[str, Any]] = []
    for model, radius, secants in _circles(findings.measurements):
        planes = _by_plane(secants)
        draws = _resampled([planes], seed)
        shared = {"model": model, "radius": radius, "distance": float(secants["distance"].median())}
        shared |= {"pairs": len(secants), "planes": len(planes)}
        for place, percentile in enumerate(PERCENTILES):
            estimate = float(np.percentile(planes, percentile))
            low, high = interval_ends(draws[0][:, place], len(planes))
            rows.append({**shared, "percentile": percentile, "estimate": estimate, "low": low, "high": high})
    columns = ["model", "radius", "distance", "pairs", "planes", "percentile", "estimate", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def secant_ratios(findings: Findings, pair: Pair, seed: int = 0) -> pd.DataFrame:
    """Return percentiles of a counterpart's secants over those of its full model, by radius."""
    planes = {(model, radius): _by_plane(secants) for model, radius, secants in _circles(findings.measurements)}
    rows: list[dict[str, Any]] = []
    for radius in sorted({radius for _, radius in planes}):
        sides = [planes.get((model, radius)) for model in (pair.other, pair.full)]
        above, below = sides
        if above is None or below is None or len(above) != len(below):
            continue
        other, full = _resampled([above, below], seed)
        for place, percentile in enumerate(PERCENTILES):
            once = np.percentile(above, percentile), np.percentile(below, percentile)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = other[:, place] / full[:, place]
                estimate = float(np.divide(*once))
            low, high = interval_ends(ratios, len(above))
            row = {"radius": radius, "percentile": percentile, "planes": len(above), "estimate": estimate}
            rows.append({**row, "low": low, "high": high})
    return pd.DataFrame(rows, columns=["radius", "percentile", "planes", "estimate", "low", "high"])


def _circles(measurements: Measurements) -> Iterator[tuple[str, float, pd.DataFrame]]:
    table = measurements.loss_secants
    table = table[(table["group"] == "all") & np.isfinite(table["slope"])]
    for (model, radius), secants in table.groupby(["model", "radius"], sort=False):
        yield str(model), float(str(radius)), secants


def _by_plane(secants: pd.DataFrame) -> Array:
    """Return the slopes, (planes, pairs); all planes are cut to the fewest pairs, since rounding loses some."""
    slopes = [rows["slope"].to_numpy(np.float64) for _, rows in secants.groupby("draw", sort=True)]
    least = min(len(values) for values in slopes)
    return np.stack([values[:least] for values in slopes])


def _resampled(models: list[Array], seed: int) -> list[Array]:
    """Return percentiles of each model under the same draws of planes, (resamples, percentiles) each."""
    rng = np.random.default_rng(seed)
    planes = len(models[0])
    draws = rng.integers(planes, size=(RESAMPLES, planes))
    return [np.percentile(values[draws].reshape(RESAMPLES, -1), PERCENTILES, axis=1).T for values in models]
