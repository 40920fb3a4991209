"""The committed study follows from its committed histories, and these are those of the same runs elsewhere."""

import tomllib
from pathlib import Path

import pandas as pd
import pytest
from predictors import Study, held_out_tasks, predictor_table

from semdiag.measuring.measurements import Measurements
from semdiag.measuring.reach import cannot_represent
from semdiag.questions.convergence.answer import arrivals, over_seeds, speed_ups
from semdiag.questions.registry import tables as declared_tables
from semdiag_models import TASKS, configure

ROOT = Path(__file__).parents[1]
DATA = ROOT / "reports" / "study" / "data"
SUMMARY = pd.read_json(ROOT / "reports" / "study" / "summary.json", typ="series")


def table(name: str) -> pd.DataFrame:
    return pd.read_csv(DATA / f"{name}.csv")


@pytest.fixture(scope="module")
def study() -> Study:
    """The study's runs as its tables tell them."""
    nothing = pd.DataFrame({"model": []})
    measurements = Measurements(
        nothing, nothing, nothing, table("history"), nothing, SUMMARY["provenance"],
        runs=declared_tables()["runs"].of_rows(table("runs").to_dict("records")),
    )  # fmt: skip
    return Study(measurements, table("candidates"))


def same(found: pd.DataFrame, written: pd.DataFrame) -> None:
    """What CSV keeps of both."""
    text = [t[[*found]].to_csv(index=False, float_format="%.9g") for t in (found, written)]
    assert text[0] == text[1]


def reach_table() -> str:
    """Markdown: which tasks each mask of the study, and its fair controls, cannot represent."""
    lines = []
    for label, chosen in MASKS.items():
        configs = {name: configure(TASKS[name], chosen)[0] for name in TASKS if name != "listops"}
        names = [name for name, config in configs.items() if cannot_represent(TASKS[name], config)]
        lines.append(f"| {label} | {', '.join(names) or 'nothing is known'} |")
    return "\n".join(lines)


MASKS = {
    "banded-5": {"attention": "banded", "k": 5},
    "block-5": {"attention": "block", "k": 5},
    "banded-5, one global token": {"attention": "banded", "k": 5, "global_tokens": 1},
    "block-5, one global token": {"attention": "block", "k": 5, "global_tokens": 1},
    "full, top-5, bottom-5, random-5": {"attention": "random", "k": 5},
}


def test_what_is_written_is_what_was_found() -> None:
    study, findings = (
        (ROOT / page).read_text(encoding="utf-8") for page in ("experiments/study.md", "experiments/length-40.md")
    )
    assert reach_table() in study
    runs = table("runs")
    assert f"In {len(runs)} earlier runs of three tasks" in findings
    assert runs["task"].nunique() == 3
    bottom = runs[runs["attention"] == "bottomk-5"]
    assert len(bottom) > 0
    assert bottom["arrival"].isna().all()  # "never arrives"
    predictors = table("predictors")
    known = predictors["candidate"].nunique()
    assert (known, "Thirteen candidates" in findings) == (13, True)
    assert predictors.query("outcome == 'loss_area'")["p_corrected"].min() > 0.05


def test_the_runs_are_those_of_the_experiment() -> None:
    grid = tomllib.loads((ROOT / "experiments" / "study.toml").read_text(encoding="utf-8"))["grid"]
    runs = table("runs")
    kinds = {entry if isinstance(entry, str) else entry["attention"] for entry in grid["attention"]}
    assert set(runs["kind"]) == kinds
    assert set(runs["seed"]) <= set(grid["seed"])
    epochs = {entry["task"]: entry["epochs"] for entry in grid["task"]}
    assert set(runs["task"]) == set(epochs)
    for run in runs.to_dict("records"):
        assert run["planned"] == epochs[run["task"]]


def test_speed_ups_follow_from_the_histories(study: Study) -> None:
    found = arrivals(study)
    same(found, table("runs"))
    pairs = speed_ups(found)
    same(pairs, table("speed_ups"))
    same(over_seeds(found, pairs), table("over_seeds"))


@pytest.mark.slow
def test_correlations_follow_from_histories_and_candidates(study: Study) -> None:
    same(predictor_table(study), table("predictors"))
    same(held_out_tasks(study), table("held_out_tasks"))
