"""The tables of the section ``stability``."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from semdiag.findings.findings import Findings
from semdiag.findings.stability import stability_findings
from semdiag.measurement.percentiles import percentiles
from semdiag.measurement.probes.noise.softmax_bounds import local_stability, with_bounds
from semdiag.presentation.tables import FACTS, verdict_table


def stability_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Percentiles by layer and head, and the verdicts."""
    return {
        "stability": stability_table(findings),
        "stability_verdicts": verdict_table(findings(stability_findings)),
    }


def stability_table(findings: Findings) -> pd.DataFrame:
    """Percentiles of measured changes and of both forms of ξ, per layer and head, and pooled.

    Args:
        findings: with the table secants.

    Returns:
        The model's facts, noise, layer, head (``all`` where pooled), quantity (local, secant, response,
        ln_sound, ln_paper, ln_row), then the columns of
        :func:`~semdiag.measurement.percentiles.percentiles`.
    """
    rows: list[dict[Any, Any]] = []
    for facts in findings.measurements.models[FACTS].to_dict("records"):
        own = findings.measurements.of(facts["model"])
        local = own.queries.assign(local=local_stability(own.queries))
        rows += [{**facts, "noise": None, **row} for row in _by_place(local, {"local": "local"})]
        named = {"secant": "secant", "response": "weight_change"}
        named |= {name: name for name in ("ln_sound", "ln_paper", "ln_row")}
        for noise, secants in with_bounds(own.secants, str(facts["attention"])).groupby("level"):
            rows += [{**facts, "noise": noise, **row} for row in _by_place(secants, named)]
    return pd.DataFrame(rows)


def _by_place(rows: pd.DataFrame, columns: dict[str, str]) -> Iterator[dict[str, Any]]:
    places: list[tuple[Any, Any, pd.DataFrame]] = [
        (layer, head, part) for (layer, head), part in rows.groupby(["layer", "head"], sort=True)
    ]
    for layer, head, part in [*places, ("all", "all", rows)]:
        for quantity, column in columns.items():
            yield {"layer": layer, "head": head, "quantity": quantity, **percentiles(part[column])}
