"""Measurements made up by hand."""

import numpy as np
import pandas as pd
import pytest

from semdiag.measurement.measurements import Measurements

_MODEL = {
    "sha256": "0" * 64,
    "source": "semdiag",
    "snapshot": "last",
    "task": "even-pairs",
    "attention": "full",
    "k": None,
    "seed": 1,
    "epoch": 3,
    "blocks": 1,
    "heads": 1,
    "width": 8,
    "length": 4,
    "parameters": 100,
    "samples": 2,
    "inputs": "made up",
    "accuracy": 0.5,
    "attention_found": 1,
    "attention_captured": 1,
    "residual": 1e-7,
}


@pytest.fixture
def made_up():
    """Call with (path, dispersions, facts) for each model: one layer, one head, four queries a sample."""

    def make(*models):
        rows, queries, loads = [], [], []
        for path, dispersions, facts in models:
            rows.append({"model": path, **_MODEL, **facts})
            values = np.asarray(dispersions, float)
            count = np.arange(len(values))
            place = {"model": path, "sample": count // 4, "layer": 0, "head": 0}
            table = {**place, "query": count % 4, "keys": 4, "kept": 4, "dispersion": values}
            queries.append(pd.DataFrame({**table, "separation": values / 10}))
            loads.append(pd.DataFrame({**place, "key": count % 4, "load": count}))
        types = {**dict.fromkeys(("k", "seed", "epoch"), "Int64"), "sha256": "str", "task": "str"}
        return Measurements(
            models=pd.DataFrame(rows).astype(types),
            queries=pd.concat(queries, ignore_index=True),
            loads=pd.concat(loads, ignore_index=True),
            history=pd.DataFrame({"model": [rows[0]["model"]], "epoch": [1], "train_loss": [0.1]}),
            non_finite=pd.DataFrame({name: [] for name in ("model", "sample", "layer", "head", "scores")}),
            provenance={"seed": 0, "device": "cpu"},
        )

    return make
