"""Under which conditions models are measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from semdiag.measurement.probes.registry import PROBES
from semdiag_models import InputError

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Conditions:
    """Under which every model of a survey is measured.

    Raises:
        InputError: if a value is illegal.
        TypeError: if a plan is of no probe, or two are of the same.
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
    encoders_only: bool = False  # whether models of which the attention alone is known are refused
    probe_samples: int | None = None  # inputs of the probes that run a model many times; None: all
    plans: tuple[Any, ...] = ()  # what is measured besides: of the types in the registry of probes

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "min_keys"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1. Got {getattr(self, name)}.")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be float32 or float64. Got {self.dtype!r}.")
        for plan in self.plans:
            if type(plan) not in PROBES:
                raise TypeError(f"Plans are {', '.join(kind.__name__ for kind in PROBES)}. Got {plan!r}.")
        kinds = [type(plan) for plan in self.plans]
        twice = [kind.__name__ for kind in kinds if kinds.count(kind) > 1]
        if twice:  # the tables of the later would replace those of the earlier
            raise TypeError(f"Conditions take one plan of a type. Got several of {twice[0]}.")
