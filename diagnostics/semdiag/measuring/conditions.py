"""The conditions under which models are measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from semdiag.capturing.inputs.texts import AS_THEY_ARE, TextOptions
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.collector import LEAST_MAX_QUERIES, MAX_QUERIES
from semdiag.measuring.calls.query_draws import QueryDraws
from semdiag.measuring.schema import probes
from semdiag_models import InputError

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
HALF = "bfloat16", "float16"  # for external models only; their scores are computed in float32

_MOST = 10**9  # of samples, in a batch or in all


@dataclass(frozen=True)
class Conditions:
    """The conditions under which every model of a survey is measured."""

    inputs: Path | None = None  # token ids, or text (.txt); None means each checkpoint's own held-out samples
    samples: int = 500  # of the default inputs, of inputs of unknown length, and windows of a text
    first: int | None = None  # samples of given inputs, or of those that came with a model; None means all
    batch_size: int = 100
    device: str = "auto"
    dtype: str = "auto"  # or a key of DTYPES; see decided()
    seed: int = 0  # of fresh samples and of resampling
    min_keys: int = 1  # queries with fewer keys are left out
    queries: int | None = None  # drawn per sample and head of the longest sequence; None means all
    max_queries: int = MAX_QUERIES  # rows kept per model
    k: tuple[int, ...] = ()  # counterfactual heavy hitters, for models with full attention
    k_lowers: bool = False  # whether a k above the inputs' length is lowered to it, as for a default
    config: dict[str, Any] | None = None  # for checkpoints of the paper's code
    head: str = "auto"  # of Hugging Face models: as configured, or none
    texts: TextOptions = AS_THEY_ARE  # for external models: how texts become inputs
    encoders_only: bool = False  # whether external models are refused
    probe_samples: int | None = None  # samples for probes that run a model many times; None means all
    plans: tuple[Any, ...] = ()  # further measurements; each has the type of a registered probe's plan

    def __post_init__(self) -> None:
        QueryDraws(self.queries, self.seed)  # refuses too few
        for name in ("samples", "batch_size", "min_keys", "max_queries"):
            least = LEAST_MAX_QUERIES if name == "max_queries" else 1
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}. Got {getattr(self, name)}.")
            if getattr(self, name) > _MOST:
                raise InputError(f"{name} must be at most {_MOST}. Got {getattr(self, name)}.")
        if self.first is not None and self.first < 1:
            raise InputError(f"first must be at least 1. Got {self.first}.")
        if self.dtype not in {"auto", *DTYPES}:
            raise InputError(f"dtype must be auto, {', '.join(DTYPES)}. Got {self.dtype!r}.")
        for plan in self.plans:
            if type(plan) not in probes():
                raise TypeError(f"Plans must be {', '.join(kind.__name__ for kind in probes())}. Got {plan!r}.")
        kinds = [type(plan) for plan in self.plans]
        twice = [kind.__name__ for kind in kinds if kinds.count(kind) > 1]
        if twice:  # the later one's tables would replace the earlier one's
            raise TypeError(f"Conditions take one plan of a type. Got several of {twice[0]}.")

    def decided(self, models: Sequence[LoadedModel], device: torch.device) -> Self:
        """Replace ``auto`` by one dtype for all models."""
        if self.dtype in HALF and (own := [model.path for model in models if not model.external]):
            raise InputError(f"dtype {self.dtype} is for external models, but {own[0]} is an encoder of semdiag.")
        if self.dtype != "auto":
            return self
        single = device.type == "mps" or any(model.external for model in models)
        return replace(self, dtype="float32" if single else "float64")
