"""Percentiles of every model: pooled, by layer, and by layer and head."""

import numpy as np
import pandas as pd
import pytest

from semdiag.measuring.findings.estimates import (
    all_by_name,
    layer_percentiles,
    percentile_table,
    pooled_percentiles,
)
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL


@pytest.fixture
def findings(made_up):
    """Two models; in the first, the second half of the queries belongs to another layer."""
    measured = made_up(("b", [1, 2, 3, 4, 10, 20, 30, 40], {}), ("a", [5, 5, 5, np.inf], {}))
    layers = np.repeat([0, 1, 0], 4)
    return Findings(measured.replace(queries=measured.queries.assign(layer=layers)))


def test_a_row_about_all_layers_and_heads_stands_below_those_of_each(findings):
    table = percentile_table(findings, "dispersion")
    assert table[["model", "layer", "head"]].values.tolist() == [
        ["b", 0, 0], ["b", 1, 0], ["b", ALL, ALL], ["a", 0, 0], ["a", ALL, ALL],
    ]  # fmt: skip
    assert table["p50"].tolist() == [2.5, 25.0, 7.0, 5.0, 5.0]
    assert table["undefined"].tolist() == [0, 0, 0, 1, 1]


def test_readers_see_the_word_where_a_row_is_about_all(findings):
    table = percentile_table(findings, "dispersion")
    named = all_by_name(table)
    assert named["layer"].tolist() == [0, 1, "all", 0, "all"]
    assert named["head"].tolist() == [0, 0, "all", 0, "all"]
    pd.testing.assert_frame_equal(named.drop(columns=["layer", "head"]), table.drop(columns=["layer", "head"]))


def test_pooled_and_by_layer_are_those_rows(findings):
    table = percentile_table(findings, "dispersion").set_index(["model", "layer"])
    for model, pooled in pooled_percentiles(findings, "dispersion").items():
        assert pooled == {name: table.loc[(model, ALL), name] for name in pooled}
    by_layer = layer_percentiles(findings, "dispersion")
    assert by_layer["b"]["layer"].tolist() == [0, 1]
    assert by_layer["b"]["p95"].tolist() == table.loc["b"].loc[[0, 1], "p95"].tolist()


def test_loads_are_counted_over_keys(findings):
    assert pooled_percentiles(findings, "load")["b"]["queries"] == 8
