"""The committed study follows from its committed histories, and these are those of the same runs elsewhere."""

import tomllib
from pathlib import Path

import pandas as pd
import pytest

from semdiag.findings.convergence import arrivals, over_seeds, speed_ups
from semdiag.findings.findings import Findings
from semdiag.findings.prediction import held_out_tasks, predictor_table
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.runs.predictors import CANDIDATES, STAGES
from semdiag.measurement.schema import OPTIONAL

ROOT = Path(__file__).parents[1]
DATA = ROOT / "reports" / "study" / "data"
SUMMARY = pd.read_json(ROOT / "reports" / "study" / "summary.json", typ="series")


def table(name: str) -> pd.DataFrame:
    return pd.read_csv(DATA / f"{name}.csv")


@pytest.fixture(scope="module")
def study() -> Findings:
    """The study's runs as its tables tell them."""
    nothing = pd.DataFrame({"model": []})
    measurements = Measurements(
        nothing, nothing, nothing, table("history"), nothing, SUMMARY["provenance"],
        runs=OPTIONAL["runs"].of_rows(table("runs").to_dict("records")),
        predictors=OPTIONAL["predictors"].of_rows(table("candidates").to_dict("records")),
    )  # fmt: skip
    return Findings(measurements)


def same(found: pd.DataFrame, written: pd.DataFrame) -> None:
    """What CSV keeps of both."""
    text = [t[[*found]].to_csv(index=False, float_format="%.9g") for t in (found, written)]
    assert text[0] == text[1]


def arrival_table(runs: pd.DataFrame) -> str:
    """Markdown: one row per task, one column per attention, the epochs of every seed."""
    kinds = [*dict.fromkeys(runs["attention"])]
    lines = [["task, target", *kinds], ["---"] * (1 + len(kinds))]
    for (task, target), own in runs.groupby(["task", "target"], sort=False):
        cells = [
            ", ".join(
                f"> {run['epochs']}" if pd.isna(run["arrival"]) else f"{run['arrival']:.0f}"
                for run in own[own["attention"] == kind].to_dict("records")
            )
            for kind in kinds
        ]
        lines.append([f"{task}, {100 * target:g} %", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def predictor_markdown(found: pd.DataFrame) -> str:
    """Markdown: one row per candidate, one column per stage: τ, its interval, the corrected p-value."""
    lines = [["ratio to full attention's", *STAGES], ["---"] * 4]
    for candidate, words in CANDIDATES.items():
        own = found[found["candidate"] == candidate].set_index("stage")
        cells = []
        for stage in STAGES:
            row = own.loc[stage]
            interval = "" if pd.isna(row["low"]) else f" ({row['low']:.2f} to {row['high']:.2f})"
            cells.append(f"{row['tau']:+.2f}{interval}, {row['p_corrected']:.2f}")
        lines.append([words, *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def test_what_is_written_is_what_was_found() -> None:
    text = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    assert arrival_table(table("runs")) in text
    assert predictor_markdown(table("predictors")) in text


def test_the_runs_are_those_of_the_experiment() -> None:
    grid = tomllib.loads((ROOT / "experiments" / "study.toml").read_text(encoding="utf-8"))["grid"]
    runs = table("runs")
    kinds = {entry if isinstance(entry, str) else entry["attention"] for entry in grid["attention"]}
    assert set(runs["kind"]) == kinds
    assert set(runs["seed"]) <= set(grid["seed"])
    epochs = {entry["task"]: entry["epochs"] for entry in grid["task"]}
    assert {task.split("-50-")[0] for task in runs["task"]} == set(epochs)
    for run in runs.to_dict("records"):
        assert run["planned"] == epochs[run["task"].split("-50-")[0]]


def test_speed_ups_follow_from_the_histories(study: Findings) -> None:
    found = arrivals(study)
    same(found, table("runs"))
    pairs = speed_ups(found)
    same(pairs, table("speed_ups"))
    same(over_seeds(found, pairs), table("over_seeds"))


@pytest.mark.slow
def test_correlations_follow_from_speed_ups_and_candidates(study: Findings) -> None:
    same(predictor_table(study), table("predictors"))
    same(held_out_tasks(study), table("held_out_tasks"))


def test_epochs_are_those_of_the_reference_checkpoints() -> None:
    """Trained in another folder, with another end and other snapshots: the same numbers to the last digit."""
    compared = 0
    columns = ["epoch", "train_loss", "train_accuracy", "holdout_loss", "holdout_accuracy"]
    for (task, attention, seed), rows in table("history").groupby(["task", "attention", "seed"]):
        file = ROOT / "checkpoints" / f"{task}-{attention}-seed-{seed}" / "history.csv"
        if file.exists():
            compared += 1
            reference = pd.read_csv(file).head(len(rows))
            pd.testing.assert_frame_equal(rows[columns].reset_index(drop=True), reference[columns])
    assert compared >= 4
