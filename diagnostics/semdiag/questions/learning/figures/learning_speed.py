"""Runs behind the measured models, and the epoch at which each had learned its training data."""

from dataclasses import dataclass

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import RUN
from semdiag.presenting.drawing.panels import Panel, Series, panels_of
from semdiag.questions.convergence.answer.epochs import arrivals, epochs_to


@dataclass(frozen=True)
class Run:
    """The history of one training run."""

    series: Series  # the model it led to
    history: pd.DataFrame  # one row per epoch
    arrival: int | None  # first epoch with at least 95% training accuracy; None if there was none

    @property
    def epochs(self) -> int:
        """Return the number of epochs trained so far."""
        return int(self.history["epoch"].max())


def training_runs(findings: Findings) -> list[tuple[Panel, list[Run]]]:
    """Group the training histories, where there are any, by task, seed and size; snapshots of a run count once."""
    measurements = findings.measurements
    if "epoch" not in measurements.history:
        return []
    histories = {
        str(model): rows.sort_values("epoch")
        for model, rows in measurements.history.dropna(subset=["epoch"]).groupby("model", sort=False)
    }
    models = measurements.models[measurements.models["model"].isin(list(histories))]
    length = models["model"].map(lambda model: len(histories[model]))
    once = models.assign(_length=length).sort_values("_length", ascending=False, kind="stable")
    once = once.drop_duplicates([*RUN, "attention", "k", "global_tokens"]).sort_index()
    if once.empty:
        return []
    return [
        (panel, [Run(s, histories[s.model], epochs_to(histories[s.model])) for s in panel.series])
        for panel in panels_of(once, RUN)
    ]


def runs_by_setting(findings: Findings, models: pd.Series, *, seeds_apart: bool) -> list[tuple[str, pd.DataFrame]]:
    """Group the arrivals of runs by setting."""
    table = findings(arrivals)
    table = table[table["model"].isin(models)]
    if not seeds_apart:
        return [(str(group), runs) for group, runs in table.groupby("group", sort=False)]
    return [
        (f"{group}, seed {seed}", runs) for (group, seed), runs in table.groupby(["group", "seed"], sort=False)
    ]
