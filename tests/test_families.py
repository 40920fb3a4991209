"""Families of masks: their share of effects, found where it was planted, and what it does to intervals."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def families():
    spec = importlib.util.spec_from_file_location("families", ROOT / "experiments" / "families.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_planted_share_is_found(families, share):
    """Mean over 300 draws of 40 families of 5: its standard error is below 0.01."""
    rng, names = np.random.default_rng(0), [f"f{n}" for n in range(40) for _ in range(5)]
    found = []
    for _ in range(300):
        common = np.repeat(rng.normal(size=40), 5)
        found.append(
            families.family_share(np.sqrt(share) * common + np.sqrt(1 - share) * rng.normal(size=200), names)
        )
    assert np.mean(found) == pytest.approx(share, abs=0.03)


def test_effects_are_mean_standardised_ranks(families):
    values = np.array([[1.0, 5.0, 3.0], [2.0, np.nan, 1.0]])
    want = [(-1 + np.sqrt(0.5)) / 2, 1.0, (0 - np.sqrt(0.5)) / 2]
    assert families.effects(values) == pytest.approx(want)


def test_families_make_false_alarms_and_stretching_mends_them(families):
    """200 studies each: a standard error of 1.5 % at 5 %, and 15 % alarms are expected with such families."""
    program = families._simulation()
    study = program.Study(7, 15, 3, 1, 0.5, 0.3, 0.98)
    alone = program.stretch(study, 200, 200)
    together = program.stretch(
        program.replace(study, families=program.FAMILIES, outcome_family=0.9, value_family=0.95), 200, 200
    )
    assert alone[0] < 0.10
    assert together[0] > alone[0] + 0.05
    assert together[1] < alone[1]
    assert together[2] > 1.2


def test_stretching_by_one_changes_nothing_and_more_keeps_the_estimate_inside(families):
    assert families.stretched(0.2, -0.1, 0.4, 1) == pytest.approx((-0.1, 0.4))
    low, high = families.stretched(0.2, -0.1, 0.4, 1.5)
    assert -1 < low < -0.1 < 0.2 < 0.4 < high < 1


def test_pages_say_the_same_intervals():
    table = (ROOT / "experiments" / "speed.md").read_text(encoding="utf-8")
    intervals = re.findall(
        r"\| −0\.\d\d \((−0\.\d\d to 0\.\d\d)\) \|", table.split('id="families"')[1].split("##")[0]
    )
    assert len(intervals) == 3
    for page in ("README.md", "docs/findings.md"):
        text = (ROOT / page).read_text(encoding="utf-8").replace("\n     ", " ")
        assert [interval for interval in intervals if interval not in text] == []
