"""The tables of the section ``within``."""

from typing import Any

import pandas as pd

from semdiag.findings.counterfactuals import counterfactual_ks
from semdiag.findings.findings import Findings
from semdiag.measurement.percentiles import layer_table, percentiles


def within_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Percentiles of what every counterfactual k would leave."""
    return {"within": within_table(findings)}


def within_table(findings: Findings) -> pd.DataFrame:
    """Percentiles of what every counterfactual k would leave, per layer and head, and pooled, of every model.

    Args:
        findings: of any number of models.

    Returns:
        Columns model, quantity (dispersion, separation, mass or load), k, layer and head (``all`` where pooled),
        then those of :func:`~semdiag.measurement.percentiles.percentiles`.
    """
    table: list[dict[Any, Any]] = []
    for model in findings.measurements.models["model"]:
        own = findings.measurements.of(model)
        for k in counterfactual_ks(own.queries):
            for quantity in ("dispersion", "separation", "mass", "load"):
                rows, column = own.loads if quantity == "load" else own.queries, f"{quantity}_k{k}"
                if column in rows:
                    place = {"model": model, "quantity": quantity, "k": k}
                    table += [{**place, **row} for row in layer_table(rows, column).to_dict("records")]
                    table.append({**place, "layer": "all", "head": "all", **percentiles(rows[column])})
    return pd.DataFrame(table)
