"""The exploratory scripts beside the registered analysis, on records and on planted numbers."""

import json
import math
import re
import shlex
from pathlib import Path

import dose_figure as drawing
import k_ablation as ablation
import length_40
import length_40_figure
import lipschitz_pairs as pairs
import numpy as np
import pandas as pd
import pytest
import speed_by_mask as speeds

from semdiag_models.sweep import read_sweep

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def test_committed_records_tell_no_folder_of_a_machine():
    tables = list(EXPERIMENTS.glob("*/runs.parquet"))
    records = [json.loads(record) for table in tables for record in pd.read_parquet(table)["record"]]
    assert len(records) >= 1684
    commands = {record["provenance"]["command"] for record in records}
    assert not [
        word for command in commands for word in shlex.split(command) if "=/" in word or word.startswith("/")
    ]


def test_losses_are_matched_at_the_snapshot_nearest_to_half_of_ln_classes():
    losses = [1.6, 1.1, 0.85, 0.79, 0.4]
    history = pd.DataFrame({"epoch": range(1, 6), "train_loss": losses})
    assert pairs.matched_epoch(history, [1, 2, 3, 4, 5], classes=5) == 4  # ln(5) / 2 = 0.805
    assert pairs.matched_epoch(history, [1, 2, 3, 5], classes=5) == 3
    assert pairs.matched_epoch(history, [1, 2, 3, 4, 5], classes=2) == 5


def test_ratios_over_tasks_have_tasks_as_their_unit():
    """Three tasks of ratios e^-1, e^-2, e^-3 in the mean of ten seeds each: as if there were three numbers."""
    rows = [
        {"stage": "end", "task": task, "seed": seed, "radius": 0.5, "percentile": 50}
        | {
            "estimate": math.exp(task + wobble),
            "low": math.exp(task + wobble) / 2,
            "high": math.exp(task + wobble) * 2,
        }
        for task in (-1, -2, -3)
        for seed, wobble in enumerate(np.linspace(-0.5, 0.5, 10))
    ]
    (found,) = pairs.summary(pd.DataFrame(rows)).to_dict("records")
    half = 4.302653 / math.sqrt(
        3
    )  # the 97.5% point of Student's t with 2 degrees of freedom; standard deviation 1
    assert found["ratio"] == pytest.approx(math.exp(-2))
    assert found["low"] == pytest.approx(math.exp(-2 - half))
    assert found["high"] == pytest.approx(math.exp(-2 + half))
    assert (found["tasks"], found["pairs"], found["steeper"]) == (3, 30, 0)
    assert found["flatter"] == sum(row["high"] < 1 for row in rows)


def test_only_at_the_matched_stage_are_losses_far_apart_left_out():
    stages, losses = ["matched loss", "matched loss", "matched loss", "end"], [0.3, 0.24, 0.5, 0.9]
    table = pd.DataFrame({"stage": stages, "loss_topk": losses, "loss_full": 0.3})
    assert pairs.unmatched(table).tolist() == [False, False, True, False]  # 1 / 1.25 is within


def test_every_pair_of_the_lipschitz_sweep_has_both_kinds():
    runs = read_sweep(EXPERIMENTS / "lipschitz.toml")
    kinds = pd.DataFrame({"pair": (r.training.task, r.training.seed), "kind": r.model.attention} for r in runs)
    assert kinds.groupby("pair")["kind"].apply(sorted).tolist() == [["full", "topk"]] * 15


@pytest.mark.slow
def test_the_ablation_of_k_reads_the_committed_records():
    runs = [run for run in read_sweep(EXPERIMENTS / "speed.toml") if run.training.task == "parity"]
    runs = [run for run in runs if run.model.attention == "topk" and run.model.inverse_temperature == 1]
    learned = ablation.learning(runs, EXPERIMENTS / "speed")
    assert sorted(learned["k"].unique()) == [1, 2, 3, 5]
    assert learned.groupby("k").size().eq(3).all()
    assert learned["accuracy"].between(0, 1).all()
    assert learned["loss"].between(0, 1.5).all()


def test_the_ablation_of_k_keeps_what_was_measured_on_weights_that_are_gone(tmp_path):
    file = tmp_path / "k_ablation.csv"
    none = ablation.selections([])
    assert ablation.with_earlier(none, file).empty
    row = {"run": "a", "sha256": "0f", "queries": 40, "separation": 0.2, "unchanged": 0.9}
    pd.DataFrame([row | {"k": 5}, row | {"run": "b"}, {"run": "never measured"}]).to_csv(file, index=False)
    assert ablation.with_earlier(none, file)["run"].tolist() == ["a", "b"]
    found = ablation.with_earlier(pd.DataFrame([row | {"separation": 0.3}]), file).set_index("run")
    assert found["separation"].to_dict() == {"a": 0.3, "b": 0.2}


def test_a_missing_record_is_named(tmp_path):
    run = read_sweep(EXPERIMENTS / "speed.toml")[0]
    with pytest.raises(SystemExit, match=f"no record of {run.name}"):
        ablation.learning([run], tmp_path)


def test_dose_responses_are_ratios_to_factor_1_over_seeds():
    areas = {0.5: (0.1, 0.3), 1.0: (0.4, 0.6), 2.0: (0.9, 1.1)}
    facts = {"attention": "full", "arm": "for good", "task": "parity"}
    rows = [
        {**facts, "factor": f, "seed": s, "loss_area": a} for f, own in areas.items() for s, a in enumerate(own)
    ]
    found = drawing.responses(pd.DataFrame(rows)).set_index("factor")["response"]
    assert found.to_dict() == pytest.approx({0.5: -0.3, 1.0: 0.0, 2.0: 0.5})


def test_a_masks_speed_is_that_of_its_own_tasks_and_seeds():
    rows = [
        {"attention": attention, "task": task, "seed": seed, "loss_area": area + 10 * seed}
        for attention, areas in {"full": (0.0, 0.0), "topk-5": (-1.0, 3.0), "random-5": (2.0, math.nan)}.items()
        for task, area in zip(("parity", "even-pairs"), areas, strict=True)
        for seed in (1, 2)
        if not math.isnan(area)
    ]
    table = speeds.ratios(pd.DataFrame(rows))
    assert table.groupby(["attention", "task"])["ratio"].mean().to_dict() == {
        ("random-5", "parity"): 2.0, ("topk-5", "even-pairs"): 3.0, ("topk-5", "parity"): -1.0,
    }  # fmt: skip
    whole = speeds.over_tasks(table).loc["topk-5"]
    assert whole["mean"] == pytest.approx(1.0)
    assert whole["high"] - whole["mean"] == pytest.approx(
        12.7062 * 2, rel=1e-5
    )  # Student's t with 1 degree, error 2
    line = next(line for line in speeds.markdown(table).splitlines() if "topk-5" in line)
    assert line.startswith("| topk-5 | 0.37 (2/2) | 20.09 (0/2) | 2.72 (")
    assert whole["topk-5"] == whole["mean"]
    assert speeds.over_tasks(table).loc["random-5", "topk-5"] == -1.0  # over parity alone, its one task


def test_correlations_are_those_of_the_registered_cells_and_stand_in_the_document():
    """The rows of all masks are by_task.csv, which read_speed writes from the same cells."""
    data = EXPERIMENTS.parent / "reports" / "speed"
    found = speeds.correlations(pd.read_csv(data / "cells.csv"))
    whole = found[found["masks"] == "all"].pivot(index="task", columns="candidate", values="rho")
    registered = pd.read_csv(data / "by_task.csv").set_index("task")
    pd.testing.assert_frame_equal(
        whole.loc[registered.index, registered.columns], registered, rtol=1e-5, check_names=False
    )
    text = (EXPERIMENTS / "study.md").read_text(encoding="utf-8")
    names = {symbol: name for name, symbol in speeds.CANDIDATES.items()}
    words = " ".join(text.split()).replace(" (+", ", +").replace(" (−", ", −")
    table = speeds.correlations_in_words(found, [*registered.index]).splitlines()
    assert "\n".join(row for row in table if "top-k" not in row and "others" not in row) in text
    for candidate, masks, sign in (("δ", "top-k", -1), ("ξ", "top-k", 1), ("λ", "others", 1), ("λ", "all", -1)):
        (row,) = (row for row in table if row.startswith(f"| {candidate} | {masks} |"))
        assert re.search(r"\| ([^|]*) \|$", row).group(1).replace(" (", ", ").rstrip(")") in words
        rho = found[(found["candidate"] == names[candidate]) & (found["masks"] == masks)]["rho"]
        assert (len(rho), (sign * rho > 0).all()) == (7, True)
    rows = speeds.markdown(speeds.ratios(pd.read_csv(data / "outcomes.csv"))).splitlines()
    shown = [row.rpartition(" |")[0].rpartition(" |")[0] + " |" for row in rows]  # without the last column
    section = text.split("## Who learns faster")[1].split("\n- ")[0]
    said = [line for line in section.splitlines() if line.startswith("| ")]
    assert len(said) == 8
    means = np.exp(speeds.over_tasks(speeds.ratios(pd.read_csv(data / "outcomes.csv")))["mean"])
    local = means[means.index.str.contains("global")]
    assert len(local) == 3
    assert f"{local.min():.2f} to {local.max():.2f}" in text
    assert set(said) <= set(shown)


def test_correlations_within_kinds_are_of_their_masks_alone():
    """Planted: ρ = 1 among top-k masks, −1 among the others; a mask of which λ is unknown is left out of all."""
    masks = [
        ("topk", 1, 1.0),
        ("topk", 2, 2.0),
        ("topk", 3, 3.0),
        ("full", 1, 6.0),
        ("random", 2, 5.0),
        ("band", 3, 4.0),
    ]
    rows = [
        {"group": "parity", "attention": f"{kind}-{n}", "kind": kind, "stage": "initialisation"}
        | {
            "candidate": name,
            "loss_area": area,
            "ln_value": math.nan if (kind, name) == ("lsh", "xi_sound") else n,
        }
        for kind, n, area in [*masks, ("lsh", 9, 0.0)]
        for name in speeds.CANDIDATES
    ]
    found = speeds.correlations(pd.DataFrame(rows)).set_index(["candidate", "masks"])["rho"]
    assert found["lambda_sound"].to_dict() == pytest.approx({"all": 0.0, "top-k": 1.0, "others": -1.0})


def test_a_run_arrives_at_the_first_epoch_with_the_accuracy_or_never():
    history = pd.DataFrame(
        {"epoch": [1, 2, 3, 4], "train_accuracy": [0.5, 0.96, 0.8, 0.97], "holdout_accuracy": [0.5, 0.7, 0.9, 0.6]}
    )
    row = length_40.arrivals(length_40.Run("parity", "full", 1, Path(), history), history)
    assert (row["epochs_to_0.85"], row["epochs_to_0.95"]) == (2, 2)
    assert math.isnan(row["epochs_to_0.999"])
    assert (row["epochs"], row["holdout_accuracy"], row["best_holdout_accuracy"]) == (4, 0.6, 0.9)


def test_every_run_of_length_40_has_its_partner_and_references_are_not_trained_twice():
    swept = list(length_40.swept(read_sweep(EXPERIMENTS / "length-40.toml"), EXPERIMENTS / "none", Path("runs")))
    cells = [(r.task, r.seed, r.attention) for r in [*length_40.references(), *swept]]
    assert len(set(cells)) == len(cells)
    attentions = {cell[:2]: {attention for *other, attention in cells if (*other,) == cell[:2]} for cell in cells}
    assert all(kinds in ({"full", "topk-5"}, set(length_40.ATTENTIONS)) for kinds in attentions.values())
    fixed = [cell for cell, kinds in attentions.items() if len(kinds) == 4]
    assert sorted(task for task, _ in fixed) == ["even-pairs"] * 3 + ["missing-duplicate"] * 3
    assert {task for task, _, _ in cells} == {
        "even-pairs", "missing-duplicate", "stack-manipulation", "cycle-navigation", "modular-arithmetic",
        "solve-equation", "parity",
    }  # fmt: skip


def test_cells_are_held_against_the_papers_of_the_same_quantity_and_percentile():
    quantities = {"full_dispersion": 8.0, "dispersion": 2.0, "separation": 0.5, "load": 10.0}
    rows = [
        {"form": form, "parameter": parameter, "percentile": float(p), "value": p + scale} | quantities
        for form, scale in (("sound", 1000), ("paper", 0))
        for parameter in ("W", "X")
        for p in (75, 90, 95, 100)
    ]
    found = length_40.against_paper("parity", pd.DataFrame(rows)).set_index(["quantity", "percentile"])
    assert found.loc[("condition in X", 90), "ours"] == 90
    assert found.loc[("δ full", 75), "ratio"] == pytest.approx(8.0 / 8.30)
    assert found.loc[("load top-5", 100), "ratio"] == pytest.approx(10 / 33)
    assert found.loc[("Δ top-5", 25), "ratio"] == pytest.approx(0.5 / 0.062)  # its small values count
    assert length_40.against_paper("cycle-navigation", pd.DataFrame(rows))["ratio"].isna().all()


# shared/theory.md, section 4: left sides of the paper's conditions at p75, p90, p95, p100.
PUBLISHED = {
    "ListOps": ([0.970, 0.688, 0.564, 0.565], [0.898, 0.674, 0.586, 0.612]),
    "Parity": ([0.704, 0.759, 0.803, 1.220], [0.723, 0.808, 0.862, 1.286]),
    "Even pairs": ([3.174, 1.976, 1.315, 1.799], [3.025, 2.102, 1.424, 1.897]),
    "Missing duplicates": ([1.531, 1.088, 0.666, 1.143], [1.529, 1.152, 0.718, 1.204]),
}


def test_the_papers_numbers_give_the_papers_conditions():
    table = length_40.published_table()
    for task, (weight, inputs) in PUBLISHED.items():
        own = table[table["task"] == task]
        assert own["percentile"].tolist() == [75, 90, 95, 100]
        assert own["weight_left_side"].round(3).tolist() == weight
        assert own["input_left_side"].round(3).tolist() == inputs


@pytest.mark.slow
def test_the_dots_of_length_40_are_the_arrivals_of_the_table():
    table = pd.read_csv(EXPERIMENTS.parent / "reports" / "length-40" / "runs.csv")
    places = ["task", "attention", "seed"]
    drawn = length_40_figure.arrivals().set_index(places)
    expected = table.set_index(places)["epochs_to_0.95"]
    assert drawn["epochs"].where(drawn["arrived"]).reindex(expected.index).equals(expected)
    assert set(drawn.index.get_level_values("task")) - set(table["task"]) == {"listops"}
    points = sum(len(line.get_xdata()) for line in length_40_figure.figure(drawn.reset_index()).axes[0].lines)
    assert points == len(drawn)


def test_the_references_at_length_40_have_the_numbers_of_the_reference_report():
    """Both are of `semdiag bounds` on the same samples in float64: equal to more than the three digits shown."""
    reports = EXPERIMENTS.parent / "reports"
    ours = pd.read_csv(reports / "length-40" / "percentiles.csv").set_index(["quantity", "percentile"])
    conditions = pd.read_csv(reports / "reference" / "data" / "corollary.csv")
    paper = conditions[(conditions["form"] == "paper") & conditions["pair"].str.contains("topk-5")]
    assert len(paper) == 24
    for row in paper.to_dict("records"):
        task, seed = re.fullmatch(r"(\S+), topk-5, seed (\d+)", row["pair"]).groups()
        own = ours[(ours["task"] == task) & (ours["seed"] == int(seed))]["ours"]
        assert own[f"condition in {row['parameter']}", row["percentile"]] == pytest.approx(row["value"], rel=1e-6)
        assert own["δ full", row["percentile"]] == pytest.approx(row["full_dispersion"], rel=1e-6)
        assert own["δ top-5", row["percentile"]] == pytest.approx(row["dispersion"], rel=1e-6)


def test_the_tables_of_length_40_in_the_docs_are_those_of_the_data():
    data = EXPERIMENTS.parent / "reports" / "length-40"
    page = (EXPERIMENTS / "length-40.md").read_text(encoding="utf-8")
    assert length_40.runs_in_words(pd.read_csv(data / "runs.csv")) in page
    percentiles = pd.read_csv(data / "percentiles.csv")
    judged = percentiles[~percentiles["percentile"].isin([0, 100])]
    known = judged["ratio"].dropna()
    two, half = known.between(1 / 2, 2).sum(), known.between(1 / 1.5, 1.5).sum()
    words = " ".join(page.split())
    assert f"Of the {len(known)} cells at p75 to p95 that the paper shows, {two} are within a factor of 2" in words
    assert f"and {half} within 1.5" in words
    met = judged[judged["quantity"].str.startswith("condition")].set_index("task")["ours"] < 1
    assert f"below 1 in {met.sum()} of the {len(met)} cells" in words
    learned = ["stack-manipulation", "missing-duplicate", "even-pairs"]
    for task, own in [("the four tasks that are memorised", met.drop(learned)), *((t, met[t]) for t in learned)]:
        assert f"| {task} | {own.sum()} of {len(own)} |" in page
