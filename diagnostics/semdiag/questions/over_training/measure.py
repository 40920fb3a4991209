"""The metrics against epochs: every snapshot in a run's folder, measured on the same inputs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from semdiag.capturing.loading import LoadedModel, load
from semdiag.measuring.conditions import Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.percentiles import percentiles
from semdiag.measuring.runs.tables import ALONG
from semdiag.measuring.survey import survey
from semdiag.measuring.table import ALL
from semdiag.questions.bounds.measure.probe import BoundsPlan
from semdiag.questions.stability.measure.probe import SecantsPlan
from semdiag.questions.stability.measure.softmax_bounds import local_stability, with_bounds

SAMPLES = 50
_QUERY_KEY = (".q.weight", ".q.bias", ".k.weight", ".k.bias")


def snapshots_of(model: LoadedModel) -> list[Path]:
    """Return the snapshots in a run's folder by epoch: the named epochs, then the last.

    Args:
        model: a run, loaded from its folder or its ``last.pt``.

    Returns:
        ``epoch-N.pt`` by N, then ``last.pt``; the file itself if it is not a run's.
    """
    path = Path(model.path)
    folder = path if path.is_dir() else path.parent
    last = folder / "last.pt"
    if not last.exists() or model.snapshot != "last":
        return [path]
    epochs = {file: file.stem.removeprefix("epoch-") for file in folder.glob("epoch-*.pt")}
    numbered = sorted(
        (int(epoch), file) for file, epoch in epochs.items() if epoch.isdecimal() and len(epoch) < 19
    )
    return [file for epoch, file in numbered if epoch != model.epoch] + [last]


def load_snapshots(model: LoadedModel) -> list[LoadedModel]:
    """Load the snapshots of a run; the last is the model itself.

    Raises:
        InputError: if one cannot be read.
    """
    return [*map(load, snapshots_of(model)[:-1]), model]


def measure_along(
    model: LoadedModel,
    conditions: Conditions,
    after_snapshot: Callable[[int], None] = lambda count: None,
    snapshots: Sequence[LoadedModel] | None = None,
) -> pd.DataFrame:
    """Measure every snapshot of a run on the same few inputs.

    Source: docs/theory.md, sections on ξ, Γ and secants. Deviation: none.

    Args:
        model: a run.
        conditions: inputs, device, precision; at most 50 samples are used.
        after_snapshot: called with 1 after each snapshot.
        snapshots: of the run; None: they are loaded.

    Returns:
        One row per snapshot, layer (−1: all layers; of Γ the largest) and number; heads are pooled. Quantity
        and statistic: dispersion and separation (p5, p50, p95; nats), xi_local and xi_sound (p50, p95),
        response (mean of ‖p − p'‖₁ under 1% input noise), gamma (max), query_key_gradient (share: squared
        norm of the loss's gradient in W_q, W_k and their biases over that in all parameters, or over that
        in the layer's own).

    Raises:
        InputError: if a snapshot cannot be read.
    """
    few = replace(
        conditions,
        samples=min(SAMPLES, conditions.samples),
        plans=(SecantsPlan(), BoundsPlan(tensor_secants=False)),
    )
    rows: list[dict[str, Any]] = []
    for snapshot in load_snapshots(model) if snapshots is None else snapshots:
        measured = survey([snapshot], few)
        common = {"model": model.path, "epoch": snapshot.epoch}
        rows += [{**common, **row} for row in _numbers(measured, snapshot.encoder.config.attention)]
        after_snapshot(1)
    return ALONG.of_rows(rows)


def _numbers(measured: Measurements, attention: str) -> list[dict[str, Any]]:
    secants = with_bounds(measured.secants, attention)
    queries = measured.queries.assign(xi_local=local_stability(measured.queries))
    with np.errstate(over="ignore"):
        secants = secants.assign(xi_sound=np.exp(secants["ln_sound"]))
    rows = []
    for layer in [ALL, *sorted(int(n) for n in queries["layer"].unique())]:
        clean, noisy = (t if layer < 0 else t[t["layer"] == layer] for t in (queries, secants))
        described = {
            **{("dispersion", p): value for p, value in _cuts(clean["dispersion"], "p5", "p50", "p95")},
            **{("separation", p): value for p, value in _cuts(clean["separation"], "p5", "p50", "p95")},
            **{("xi_local", p): value for p, value in _cuts(clean["xi_local"], "p50", "p95")},
            **{("xi_sound", p): value for p, value in _cuts(noisy["xi_sound"], "p50", "p95")},
            ("response", "mean"): float(noisy["weight_change"].mean()),
            ("gamma", "max"): _gamma(measured.constants, layer),
            ("query_key_gradient", "share"): query_key_share(measured.parameters, layer),
        }
        rows += [{"layer": layer, "quantity": q, "statistic": s, "value": v} for (q, s), v in described.items()]
    return rows


def _cuts(values: "pd.Series[float]", *names: str) -> list[tuple[str, float]]:
    table = percentiles(values)
    return [(name, float(table[name])) for name in names]


def _gamma(constants: pd.DataFrame, layer: int) -> float:
    rows = constants[(constants["quantity"] == "gamma") & (constants["form"] == "measured")]
    rows = rows if layer < 0 else rows[rows["layer"] == layer]
    return float(np.exp(rows["ln_value"].max())) if len(rows) else float("nan")


def query_key_share(parameters: pd.DataFrame, layer: int = ALL) -> float:
    """Return the share of queries' and keys' weights and biases in the squared norm of the loss's gradient.

    Source: docs/theory.md#empirical. Deviation: not in the paper.

    Args:
        parameters: the table ``parameters`` of one model.
        layer: of which one; ALL: of the whole network.

    Returns:
        In [0, 1]; NaN where the gradient is zero or unknown.
    """
    rows = parameters if layer < 0 else parameters[parameters["layer"] == layer]
    squared = np.exp(2 * rows["ln_gradient"].to_numpy())  # −inf, a gradient of zero, gives 0
    chosen = rows["tensor"].str.endswith(_QUERY_KEY).to_numpy()
    return float(squared[chosen].sum() / squared.sum()) if squared.sum() else float("nan")
