"""Measure how far apart a run's scores were before it was trained."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd

from semdiag.capturing.loading import load
from semdiag.measuring.measure import measure
from semdiag.measuring.percentiles import percentiles
from semdiag.measuring.subject import Subject
from semdiag.measuring.table import Table, columns_of
from semdiag.questions.dispersion import InitialisationPlan

INITIALISATION = Table(
    "initialisation",
    "One row per run whose folder holds its initialisation: the median dispersion there (nats).",
    columns_of("model str; samples int64; dispersion float64"),
)
_FILE = "epoch-0.pt"


def measure_initialisation(subject: Subject, plan: InitialisationPlan) -> Mapping[str, pd.DataFrame]:
    """Return the median over queries of all layers and heads, on the first samples of the run's measurement."""
    path = Path(subject.model.path)
    file = (path if path.is_dir() else path.parent) / _FILE
    if subject.model.external or subject.model.snapshot != "last" or not file.is_file():
        return {"initialisation": INITIALISATION.empty()}
    tokens = subject.tokens[: plan.samples]
    measurements = measure(
        replace(load(file), path=subject.model.path), tokens,
        batch_size=subject.batch_size, device=subject.device, dtype=subject.dtype,
    )  # fmt: skip
    median = float(percentiles(measurements.queries["dispersion"])["p50"])
    row = {"model": subject.model.path, "samples": len(tokens), "dispersion": median}
    return {"initialisation": INITIALISATION.of_rows([row])}
