"""The probe ``bounds``: the constants of Theorem 2; of an external model Γ and Υ alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from semdiag.measuring.probe import Probe, Subject
from semdiag.questions.bounds.measure.constants import CONSTANTS, PARAMETERS, SAMPLES, measure_constants
from semdiag.questions.bounds.measure.projections import PROJECTIONS, projection_norms


@dataclass(frozen=True)
class BoundsPlan:
    """What is measured of the theory."""

    tensor_secants: bool = True  # whether to measure secants in each tensor and bounds at the point: takes time


def _measure(subject: Subject, plan: BoundsPlan, prepared: Any) -> Mapping[str, pd.DataFrame]:
    model = subject.model
    if model.external:
        subject.note(
            "bounds", "its normalisations, MLPs and loss are not known, as those of semdiag's encoders are"
        )
        return {"projections": projection_norms(model, subject.batches)}
    constants, parameters = measure_constants(
        model.encoder,
        subject.tokens,
        subject.labels,
        model=model.path,
        seed=subject.seed,
        secants=plan.tensor_secants,
        device=subject.device,
    )
    return {"constants": constants, "parameters": parameters}


def _provenance(plan: BoundsPlan, samples: int, few: int) -> dict[str, Any]:
    return {"bound_samples": min(SAMPLES, samples)}


BOUNDS = Probe(
    "bounds",
    BoundsPlan,
    (CONSTANTS, PARAMETERS, PROJECTIONS),
    _measure,
    provenance=_provenance,
    reported=lambda options: BoundsPlan(),
)
