"""The optional tables: what is measured besides the attention of a clean forward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.batches import Batch, first_samples, split
from semdiag.capturing.loading import LoadedModel, load
from semdiag.measurement.calls.scored_rows import NotAvailableError
from semdiag.measurement.conditions import DTYPES, Conditions
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.probes.bounds import constants
from semdiag.measurement.probes.bounds.projections import projection_norms
from semdiag.measurement.probes.k_sweep import k_sweep
from semdiag.measurement.probes.loss.landscape import landscape
from semdiag.measurement.probes.loss.lipschitz import lipschitz
from semdiag.measurement.probes.noise import secants as perturbation
from semdiag.measurement.probes.noise.masks import mask_stability
from semdiag.measurement.tables import typed
from semdiag_models import Encoder


def encoder_tables(
    model: LoadedModel, tokens: Tensor, labels: Tensor | None, conditions: Conditions, device: torch.device
) -> dict[str, Any]:
    """Measure what the conditions ask for besides the attention of one of semdiag's encoders.

    Args:
        model: with an encoder.
        tokens: (N, L) int64.
        labels: (N,) classes; None if unknown.
        conditions: that ask.
        device: where to run.

    Returns:
        Optional tables by name.
    """
    encoder = model.encoder
    tables: dict[str, Any] = {}
    common: dict[str, Any] = {"model": model.path, "seed": conditions.seed, "device": device}
    if conditions.noise:
        tables["secants"] = perturbation.measure_secants(encoder, tokens, levels=conditions.noise, **common)
    if conditions.bounds:
        found = constants.measure_constants(encoder, tokens, labels, secants=conditions.tensor_secants, **common)
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


def with_probes(
    part: Measurements, model: LoadedModel, batches: list[Batch], conditions: Conditions, device: torch.device
) -> Measurements:
    """Measure what the conditions ask for of a model whose attention alone is known.

    Args:
        part: what was measured of it so far.
        model: of somebody else's.
        batches: its inputs.
        conditions: that ask.
        device: where to run.

    Returns:
        The measurements with the optional tables; what cannot be measured is said in the remarks.
    """
    tables: dict[str, Any] = {}
    missing: dict[str, str] = {}
    if conditions.noise:
        try:
            tables["secants"] = perturbation.external_secants(
                model, batches, levels=conditions.noise, seed=conditions.seed, device=device
            )
        except NotAvailableError as reason:
            missing["secants"] = str(reason)
    chosen = first_samples(batches, conditions.probe_samples) if conditions.probe_samples else batches
    if conditions.masks is not None:
        pieces = [piece for batch in chosen for piece in _pieces(batch, conditions)]
        try:
            tables["masks"], tables["noise_effects"] = mask_stability(
                model, pieces, plan=conditions.masks, device=device, dtype=DTYPES[conditions.dtype]
            )
        except NotAvailableError as reason:
            missing["mask stability"] = str(reason)
    if conditions.sweep is not None:
        tables["sweep"] = k_sweep(
            model, chosen, plan=conditions.sweep, device=device, dtype=DTYPES[conditions.dtype]
        )
    if conditions.bounds:
        tables["projections"] = projection_norms(model, batches)
        missing["bounds"] = "its normalisations, MLPs and loss are not known, as those of semdiag's encoders are"
    if conditions.landscape is not None or conditions.lipschitz is not None:
        missing["loss surface and Lipschitz estimates"] = "its loss is not known"
    rows = [
        {"model": model.path, "module": "", "text": f"{name} not available, because {why}", "times": 1}
        for name, why in missing.items()
    ]
    remarks = pd.concat([part.remarks, typed("remarks", rows)], ignore_index=True) if rows else part.remarks
    return replace(part, remarks=remarks, **tables)


def _pieces(batch: Batch, conditions: Conditions) -> list[Batch]:
    """A batch in parts that with all their noisy copies are as large as one of the conditions' batches."""
    assert conditions.masks is not None
    copies = len(conditions.masks.levels) * conditions.masks.draws
    return (
        [batch] if isinstance(batch, tuple | list) else split(batch, max(1, conditions.batch_size // (1 + copies)))
    )


@dataclass(frozen=True)
class ParameterProbe:
    """What moves the parameters: landscape and Lipschitz estimates.

    Attributes:
        conditions: that ask for them.
        snapshots: encoders that planes go through, by name.
    """

    conditions: Conditions
    snapshots: dict[str, Encoder]

    @classmethod
    def of(cls, conditions: Conditions) -> Self:
        """Load the snapshots before anything is measured.

        Args:
            conditions: that ask for planes.

        Raises:
            InputError: if a snapshot cannot be loaded.
        """
        paths = conditions.landscape.through if conditions.landscape is not None else ()
        found = {_snapshot_name(path, paths): load(path, conditions.config).encoder for path in paths}
        return cls(conditions, found)

    @property
    def steps(self) -> int:
        """Points at which the loss of each model will be evaluated."""
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
        """Measure one model.

        Args:
            model: with an encoder.
            tokens: (N, L) int64.
            labels: (N,) classes; None if unknown.
            device: where to run.
            after_point: called with the number of finished points.

        Returns:
            Optional tables by name.
        """
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
