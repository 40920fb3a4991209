"""The look at loss surfaces: its tables follow from the committed cells, and its words from the tables."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "reports" / "landscape"
PAGE = (ROOT / "experiments" / "landscape.md").read_text(encoding="utf-8")
_SPEC = importlib.util.spec_from_file_location("look_at_surfaces", ROOT / "experiments" / "landscape.py")
assert _SPEC is not None
assert _SPEC.loader is not None
look = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(look)


@pytest.mark.slow
def test_levels_are_means_of_ln_loss_over_the_cells_of_a_disc():
    cells = pd.read_csv(RECORDS / "cells.csv")
    for row in pd.read_csv(RECORDS / "planes.csv").to_dict("records"):
        for attention in ("full", "top-5"):
            values = [
                np.log(c["loss"])
                for c in cells.to_dict("records")
                if (c["attention"], c["stage"], c["plane"]) == (attention, row["stage"], row["plane"])
                and c["place"] == "grid" and 0 < c["x"] ** 2 + c["y"] ** 2 <= (row["radius"] + 1e-9) ** 2
            ]  # fmt: skip
            assert np.mean(values) == pytest.approx(row[attention], rel=1e-4)  # six digits were written
        assert row["difference"] == pytest.approx(
            row["top-5"] - row["full"], abs=2e-4
        )  # each rounded by up to 5e-5


def test_the_page_says_what_the_summary_says():
    summary = pd.read_csv(RECORDS / "summary.csv").set_index(["outcome", "where", "radius"])
    ends = summary.loc["ln loss, top-5 less full"].loc["end"]
    said = re.search(r"within 0\.5 is lower around top-5 by ([\d.]+) \(([\d.]+) to ([\d.]+)\)", PAGE)
    assert said is not None
    assert [float(x) for x in said.groups()] == [
        round(-ends.loc[0.5, name], 2) for name in ("mean", "high", "low")
    ]
    clear = {radius: row["low"] > 0 or row["high"] < 0 for radius, row in ends.iterrows()}
    assert clear == {0.25: False, 0.5: True, 1.0: False}


def test_one_pair_a_task_is_matched_and_has_no_interval():
    pairs, left_out = look.ratios(pd.read_csv(RECORDS / "sharpness.csv"))
    assert pairs.groupby("task")["seed"].nunique().to_dict() == {"even-pairs": 1, "stack-manipulation": 1}
    assert len(left_out) == 4
    at = pairs.set_index(["task", "radius"])["ln_ratio"]
    assert [round(at["even-pairs", 0.02], 1), round(at["stack-manipulation", 0.02], 1)] == [-3.2, 1.5]
    assert np.isnan(look.interval(at.loc["even-pairs"].iloc[:1])["low"])
