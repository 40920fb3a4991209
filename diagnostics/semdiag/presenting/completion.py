"""Shell completion. It must not import torch, so names are repeated here; a test compares the registries."""

import os
from collections.abc import Callable
from pathlib import Path

TASKS = ("parity", "even-pairs", "missing-duplicate", "stack-manipulation", "cycle-navigation",
         "modular-arithmetic", "solve-equation", "listops", "text")  # fmt: skip
ATTENTIONS = ("full", "banded", "block", "topk", "bottomk", "random", "redrawn", "lsh", "routing")
LISTS = ("tasks", "attentions", "metrics")
STATISTICS = ("mean", "p0", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "p100")
# Starts of rules of semdiag check.
RULES = (
    *(f"{metric}.{statistic}" for metric in ("dispersion", "separation", "load") for statistic in STATISTICS),
    "accuracy", "residual",
)  # fmt: skip
_MOST = 200  # number of runs offered


def names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Complete one of several names."""
    return lambda incomplete: [name for name in known if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Complete a model: run folders among the checkpoints, and any path that starts with the word."""
    folder = Path(os.environ.get("SEMDIAG_CHECKPOINTS", "checkpoints"))
    runs = sorted(file.parent for file in folder.rglob("last.pt"))[:_MOST]
    matching = [str(run) for run in runs if run.name.startswith(incomplete) or str(run).startswith(incomplete)]
    parent, start = os.path.split(incomplete)
    try:
        there = sorted(Path(parent or ".").iterdir())
    except OSError:
        return matching
    beside = [path for path in there if path.name.startswith(start) and (start or path.name[0] != ".")]
    paths = [os.path.join(parent, path.name) + os.sep * path.is_dir() for path in beside]
    return [*matching, *(path for path in paths if path.rstrip(os.sep) not in matching)]
