"""What does the attention of a transformer do, and what would sparse attention cost it?

What to call first, with any ``torch.nn.Module`` as ``model`` and ``batch`` as what it is called with::

    with semdiag.capture(model) as calls:      # watch your own forward passes
        model(**batch)
    calls.dispersion(), calls.entropy()        # tables, a row per query and head

    found = semdiag.measure(model, batch)      # the same of many batches, for figures and reports
    semdiag.report(found, "reports/mine")      # a page with figures
    semdiag.k_sweep(model, batch, rerun=True)  # what masks that keep k keys would change in the outputs
    with semdiag.sparsify(model, keep=semdiag.TopK(16)):
        model(**batch)                         # the model with such masks, in training too
    with semdiag.Monitor(model, every=200, path="attention.csv"):
        ...                                    # your training loop, followed

Checkpoints and folders of the Hugging Face format are read by ``semdiag.load``; more stands in docs/python.md.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semdiag.capturing.attention_calls import AttentionCall, watch_attention
    from semdiag.capturing.loading import LoadedModel, load, read_budget
    from semdiag.capturing.rules import RandomK, SameAs, SkipTiles, TopK, TopP, Window
    from semdiag.capturing.sparsify import sparsify
    from semdiag.mathematics.row_statistics import RowStatistics, row_statistics
    from semdiag.measuring.calls.capture import Calls, capture
    from semdiag.measuring.calls.monitor import Monitor
    from semdiag.measuring.calls.monitor_alarms import Alarm, AlarmError
    from semdiag.measuring.calls.tile_weights import tiles
    from semdiag.measuring.findings.findings import Findings
    from semdiag.measuring.measure import measure
    from semdiag.measuring.measurements import Measurements
    from semdiag.questions.in_python import (
        compare,
        k_sweep,
        landscape,
        lipschitz,
        mask_precision,
        mask_stability,
    )
    from semdiag.questions.k_sweep import KSweepPlan
    from semdiag.questions.landscape import LandscapePlan
    from semdiag.questions.lipschitz import LipschitzPlan
    from semdiag.questions.look.page import look
    from semdiag.questions.mask_precision import PrecisionPlan
    from semdiag.questions.mask_stability import NoisePlan
    from semdiag.reporting.report import plot, report, summary
    from semdiag.selections.check import check_selection
    from semdiag_files import InputError

# Imported on first use: `semdiag --help` must not wait for torch and pandas.
_HOME = {
    "AttentionCall": "semdiag.capturing.attention_calls",
    "watch_attention": "semdiag.capturing.attention_calls",
    "sparsify": "semdiag.capturing.sparsify",
    "TopK": "semdiag.capturing.rules",
    "TopP": "semdiag.capturing.rules",
    "Window": "semdiag.capturing.rules",
    "RandomK": "semdiag.capturing.rules",
    "SameAs": "semdiag.capturing.rules",
    "SkipTiles": "semdiag.capturing.rules",
    "read_budget": "semdiag.capturing.loading",
    "LoadedModel": "semdiag.capturing.loading",
    "load": "semdiag.capturing.loading",
    "RowStatistics": "semdiag.mathematics.row_statistics",
    "row_statistics": "semdiag.mathematics.row_statistics",
    "Calls": "semdiag.measuring.calls.capture",
    "tiles": "semdiag.measuring.calls.tile_weights",
    "capture": "semdiag.measuring.calls.capture",
    "compare": "semdiag.questions.in_python",
    "KSweepPlan": "semdiag.questions.k_sweep",
    "k_sweep": "semdiag.questions.in_python",
    "PrecisionPlan": "semdiag.questions.mask_precision",
    "NoisePlan": "semdiag.questions.mask_stability",
    "mask_precision": "semdiag.questions.in_python",
    "mask_stability": "semdiag.questions.in_python",
    "LandscapePlan": "semdiag.questions.landscape",
    "landscape": "semdiag.questions.in_python",
    "LipschitzPlan": "semdiag.questions.lipschitz",
    "lipschitz": "semdiag.questions.in_python",
    "look": "semdiag.questions.look.page",
    "check_selection": "semdiag.selections.check",
    "measure": "semdiag.measuring.measure",
    "Measurements": "semdiag.measuring.measurements",
    "Monitor": "semdiag.measuring.calls.monitor",
    "Alarm": "semdiag.measuring.calls.monitor_alarms",
    "AlarmError": "semdiag.measuring.calls.monitor_alarms",
    "Findings": "semdiag.measuring.findings.findings",
    "plot": "semdiag.reporting.report",
    "report": "semdiag.reporting.report",
    "summary": "semdiag.reporting.report",
    "InputError": "semdiag_files",
}

__all__ = [
    # models and their attention
    "AttentionCall", "LoadedModel", "load", "watch_attention",
    # real masks
    "RandomK", "SameAs", "SkipTiles", "TopK", "TopP", "Window", "read_budget", "sparsify",
    # mathematics
    "RowStatistics", "row_statistics",
    # measurement
    "Alarm", "AlarmError", "Calls", "Measurements", "Monitor", "capture", "measure", "tiles",
    # probes
    "LandscapePlan", "LipschitzPlan", "NoisePlan", "KSweepPlan", "compare", "k_sweep", "landscape", "lipschitz",
    "mask_precision", "mask_stability", "PrecisionPlan",
    # one text
    "look",
    # selections
    "check_selection",
    # findings
    "Findings", "plot", "report", "summary",
    # errors
    "InputError",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("semdiag")
    if name == "mathematics":
        return import_module("semdiag.mathematics")
    if name not in _HOME:
        raise AttributeError(f"module 'semdiag' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
