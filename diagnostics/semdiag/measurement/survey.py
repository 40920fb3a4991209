"""Measuring several checkpoints under the same conditions."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from semdiag.capturing.inputs import read_inputs
from semdiag.capturing.loading import LoadedModel, load
from semdiag.measurement import constants, perturbation
from semdiag.measurement.k_sweep import SweepPlan, k_sweep
from semdiag.measurement.landscape import LandscapeOptions, landscape
from semdiag.measurement.lipschitz import LipschitzOptions, lipschitz
from semdiag.measurement.mask_stability import NoisePlan, mask_stability
from semdiag.measurement.measure import measure
from semdiag.measurement.measurements import Measurements
from semdiag_models import Encoder, InputError
from semdiag_models.device import find_device

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
    bounds: bool = False  # whether the constants of Theorem 2 are measured
    masks: NoisePlan | None = None  # noise under which masks are compared; None: they are not
    sweep: SweepPlan | None = None  # which k are asked of a model's scores; None: none
    probe_samples: int | None = None  # inputs of masks and sweep; None: all
    landscape: LandscapeOptions | None = None  # planes on which the loss is evaluated; None: it is not
    lipschitz: LipschitzOptions | None = None  # what the Lipschitz estimates draw; None: there are none

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "min_keys"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1. Got {getattr(self, name)}.")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be float32 or float64. Got {self.dtype!r}.")
        perturbation.check_levels(self.noise)


def survey(
    models: Sequence[Path | LoadedModel],
    conditions: Conditions,
    announce: Callable[[str, int], None] = lambda model, samples: None,
    after_batch: Callable[[int], None] = lambda samples: None,
) -> Measurements:
    """Load and measure one model after the other.

    Args:
        models: checkpoints, or models already loaded.
        conditions: inputs, precision, counterfactuals.
        announce: called with a model's path and its number of steps (samples, then points of planes) before it is
            measured.
        after_batch: called with the number of finished steps.

    Returns:
        Measurements of all models.

    Raises:
        InputError: if a model or the inputs cannot be used, or no query has enough keys.
    """
    device = find_device(conditions.device)
    if device.type == "mps" and conditions.dtype == "float64":  # which it does not know
        device = torch.device("cpu")
    given = None if conditions.inputs is None or _is_text(conditions.inputs) else read_inputs(conditions.inputs)
    # All are loaded before the first is measured: a wrong path should not cost minutes.
    loaded = [m if isinstance(m, LoadedModel) else load(m, conditions.config) for m in models]
    probe = _Probe.of(conditions)
    parts = []
    for model in loaded:
        tokens, labels, source = _inputs(model, given, conditions)
        announce(model.path, len(tokens) + probe.steps)
        part = measure(
            model,
            tokens,
            labels=labels,
            inputs=source,
            k=conditions.k if model.module.config.attention == "full" else (),
            batch_size=conditions.batch_size,
            device=device,
            dtype=DTYPES[conditions.dtype],
            after_batch=after_batch,
        )
        tables = _theory(model, tokens, labels, conditions, device)
        tables |= probe.tables(model, tokens, labels, device, after_batch)
        parts.append(replace(part, **tables))
    joined = Measurements.concat(parts)
    largest = int(joined.models["samples"].max())
    joined.provenance.update(seed=conditions.seed, samples=largest)
    if conditions.noise:
        joined.provenance.update(noise=list(conditions.noise), noise_samples=min(perturbation.SAMPLES, largest))
    if conditions.bounds:
        joined.provenance.update(bound_samples=min(constants.SAMPLES, largest))
    if conditions.masks is not None:
        joined.provenance.update(mask_noise=asdict(conditions.masks))
    if conditions.masks is not None or conditions.sweep is not None:
        joined.provenance.update(probe_samples=min(conditions.probe_samples or largest, largest))
    if conditions.lipschitz is not None:
        joined.provenance.update(lipschitz_samples=min(conditions.lipschitz.samples, largest))
    return _with_keys(joined, conditions.min_keys)


def _theory(
    model: LoadedModel, tokens: Tensor, labels: Tensor | None, conditions: Conditions, device: torch.device
) -> dict[str, Any]:
    """The optional tables, as far as the conditions ask for them."""
    encoder = model.module
    tables: dict[str, Any] = {}
    common: dict[str, Any] = {"model": model.path, "seed": conditions.seed, "device": device}
    if conditions.noise:
        tables["secants"] = perturbation.measure_secants(encoder, tokens, levels=conditions.noise, **common)
    if conditions.bounds:
        found = constants.measure_constants(encoder, tokens, labels, **common)
        tables["constants"], tables["parameters"] = found
    chosen = slice(conditions.probe_samples)
    inputs = model, tokens[chosen], None if labels is None else labels[chosen]
    how: dict[str, Any] = {
        "batch_size": conditions.batch_size,
        "device": device,
        "dtype": DTYPES[conditions.dtype],
    }
    if conditions.masks is not None:
        tables["masks"], tables["noise_effects"] = mask_stability(*inputs, conditions.masks, **how)
    if conditions.sweep is not None:
        tables["sweep"] = k_sweep(*inputs, conditions.sweep, **how)
    return tables


@dataclass(frozen=True)
class _Probe:
    """What moves the parameters: landscape and Lipschitz estimates."""

    conditions: Conditions
    snapshots: dict[str, Encoder]

    @classmethod
    def of(cls, conditions: Conditions) -> Self:
        """Load the snapshots before anything is measured."""
        paths = conditions.landscape.through if conditions.landscape is not None else ()
        found = {_snapshot_name(path, paths): load(path, conditions.config).module for path in paths}
        return cls(conditions, found)

    @property
    def steps(self) -> int:
        asked = (self.conditions.landscape, self.conditions.lipschitz)
        return sum(options.points for options in asked if options is not None)

    def tables(
        self,
        model: LoadedModel,
        tokens: Tensor,
        labels: Tensor | None,
        device: torch.device,
        after_point: Callable[[int], None],
    ) -> dict[str, Any]:
        conditions = self.conditions
        found: dict[str, Any] = {}
        if conditions.landscape is not None:
            found["landscape"] = landscape(
                model,
                tokens,
                labels,
                options=conditions.landscape,
                snapshots=self.snapshots,
                seed=conditions.seed,
                device=device,
                dtype=DTYPES[conditions.dtype],
                after_point=after_point,
            )
        if conditions.lipschitz is not None:
            found |= lipschitz(
                model,
                tokens,
                labels,
                options=conditions.lipschitz,
                seed=conditions.seed,
                device=device,
                after_point=after_point,
            )
        return found


def _snapshot_name(path: Path, paths: Sequence[Path]) -> str:
    """The file's name without suffix; its folder's as well where the snapshots come from several runs."""
    same = len({other.parent for other in paths}) == 1
    return path.stem if same else f"{path.parent.name}/{path.stem}"


def _inputs(model: LoadedModel, given: Tensor | None, conditions: Conditions) -> tuple[Tensor, Tensor | None, str]:
    if conditions.inputs is not None and _is_text(conditions.inputs):
        return model.text_inputs(conditions.inputs, conditions.samples, conditions.seed)
    if given is None:
        return model.default_inputs(conditions.samples, conditions.seed)
    return given, None, f"{conditions.inputs} (given)"


def _is_text(path: Path) -> bool:
    return path.suffix == ".txt"


def _with_keys(measurements: Measurements, least: int) -> Measurements:
    if least == 1:
        return measurements
    queries = measurements.queries[measurements.queries["keys"] >= least].reset_index(drop=True)
    missing = set(measurements.models["model"]) - set(queries["model"])
    if missing:
        raise InputError(f"No query of {min(missing)} has {least} keys. Use a smaller --min-keys.")
    place = ["model", "sample", "layer", "head", "query"]
    kept = {name: getattr(measurements, name).merge(queries[place], on=place) for name in ("secants", "masks")}
    provenance = {**measurements.provenance, "min_keys": least}
    return replace(measurements, queries=queries, **kept, provenance=provenance)
