"""Under which conditions models are measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from semdiag.measurement.probes.k_sweep import SweepPlan
from semdiag.measurement.probes.loss.landscape import LandscapePlan
from semdiag.measurement.probes.loss.lipschitz import LipschitzPlan
from semdiag.measurement.probes.noise.masks import NoisePlan
from semdiag.measurement.probes.noise.secants import check_levels
from semdiag_models import InputError

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Conditions:
    """Under which every model of a survey is measured.

    Raises:
        InputError: if a value is illegal.
    """

    inputs: Path | None = None  # token ids, or text (.txt); None: each checkpoint's own held-out samples
    samples: int = 500  # of the default inputs, and windows of a text
    batch_size: int = 100
    device: str = "auto"
    dtype: str = "float32"
    seed: int = 0  # of fresh samples and of resampling
    min_keys: int = 1  # queries with fewer keys are left out
    k: tuple[int, ...] = ()  # counterfactual heavy hitters, on full models
    config: dict[str, Any] | None = None  # of checkpoints of the paper's code
    noise: tuple[float, ...] = ()  # relative input noise of secants; none: they are not measured
    bounds: bool = False  # whether the constants of Theorem 2 are measured, where every part is known
    tensor_secants: bool = True  # whether bounds stand beside secants of the loss in each tensor, which take time
    encoders_only: bool = False  # whether models of which the attention alone is known are refused
    masks: NoisePlan | None = None  # noise under which masks are compared; None: they are not
    sweep: SweepPlan | None = None  # which k are asked of a model's scores; None: none
    probe_samples: int | None = None  # inputs of masks and sweep; None: all
    landscape: LandscapePlan | None = None  # planes on which the loss is evaluated; None: it is not
    lipschitz: LipschitzPlan | None = None  # what the Lipschitz estimates draw; None: there are none

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "min_keys"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1. Got {getattr(self, name)}.")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be float32 or float64. Got {self.dtype!r}.")
        check_levels(self.noise)
