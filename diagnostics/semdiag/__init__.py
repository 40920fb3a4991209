"""Why does an attention mechanism learn fast or slowly? Diagnostics of trained transformers.

>>> import semdiag
>>> model = semdiag.load("checkpoints/even-pairs-topk-5-seed-153476998")  # doctest: +SKIP
>>> tokens, labels, _ = model.default_inputs(samples=500, seed=0)  # doctest: +SKIP
>>> semdiag.measure(model, tokens).queries["dispersion"].median()  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semdiag.capturing.attention_calls import AttentionCall, watch_attention
    from semdiag.capturing.loading import LoadedModel, load
    from semdiag.mathematics.row_statistics import RowStatistics, row_statistics
    from semdiag.measurement.calls.capture import Calls, capture
    from semdiag.measurement.calls.monitor import Monitor
    from semdiag.measurement.measure import measure
    from semdiag.measurement.measurements import Measurements
    from semdiag.measurement.probes.k_sweep import SweepPlan, k_sweep
    from semdiag.measurement.probes.loss.landscape import LandscapePlan, landscape
    from semdiag.measurement.probes.loss.lipschitz import LipschitzPlan, lipschitz
    from semdiag.measurement.probes.noise.masks import NoisePlan, mask_stability
    from semdiag_models import InputError

# Imported on first use: `semdiag --help` must not wait for torch and pandas.
_HOME = {
    "AttentionCall": "semdiag.capturing.attention_calls",
    "watch_attention": "semdiag.capturing.attention_calls",
    "LoadedModel": "semdiag.capturing.loading",
    "load": "semdiag.capturing.loading",
    "RowStatistics": "semdiag.mathematics.row_statistics",
    "row_statistics": "semdiag.mathematics.row_statistics",
    "Calls": "semdiag.measurement.calls.capture",
    "capture": "semdiag.measurement.calls.capture",
    "SweepPlan": "semdiag.measurement.probes.k_sweep",
    "k_sweep": "semdiag.measurement.probes.k_sweep",
    "NoisePlan": "semdiag.measurement.probes.noise.masks",
    "mask_stability": "semdiag.measurement.probes.noise.masks",
    "LandscapePlan": "semdiag.measurement.probes.loss.landscape",
    "landscape": "semdiag.measurement.probes.loss.landscape",
    "LipschitzPlan": "semdiag.measurement.probes.loss.lipschitz",
    "lipschitz": "semdiag.measurement.probes.loss.lipschitz",
    "measure": "semdiag.measurement.measure",
    "Measurements": "semdiag.measurement.measurements",
    "Monitor": "semdiag.measurement.calls.monitor",
    "InputError": "semdiag_models",
}

__all__ = [
    # models and their attention
    "AttentionCall", "LoadedModel", "load", "watch_attention",
    # mathematics
    "RowStatistics", "row_statistics",
    # measurement
    "Calls", "Measurements", "Monitor", "capture", "measure",
    # probes
    "LandscapePlan", "LipschitzPlan", "NoisePlan", "SweepPlan", "k_sweep", "landscape", "lipschitz",
    "mask_stability",
    # errors
    "InputError",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'semdiag' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
