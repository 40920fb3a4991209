"""The scorecard of the paper's claims says what the records and the other pages say."""

import re
from pathlib import Path

import language
import numpy as np
import pandas as pd
import pytest
import robustness

from semdiag_models.sweeps.grid import read_sweep
from semdiag_models.sweeps.records import read_history

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| claim")
]
VERDICTS = "**holds**", "**holds where**", "**cannot tell**", "**does not hold here**"


def row(start):
    (found,) = (cells for cells in ROWS if cells[0].startswith(start))
    return found


def test_every_claim_has_a_verdict_of_the_four_and_a_place():
    assert len(ROWS) >= 15
    for cells in ROWS:
        assert len(cells) == 4, cells
        assert cells[2].startswith(VERDICTS), cells[2]
        assert "](" in cells[3], cells[3]


def epochs_to_95(task, attention):
    """Of the runs of the paper's size that are no shipped references."""
    found = []
    for run in read_sweep(ROOT / "experiments" / "length-40.toml"):
        if (run.training.task, run.model.attention_label) != (task, attention):
            continue
        history = read_history(ROOT / "experiments" / "length-40", run)
        if history is not None:
            reached = [e for e, a in zip(history["epoch"], history["train_accuracy"], strict=True) if a >= 0.95]
            found.append(min(reached))
    return found


@pytest.mark.parametrize("task", ["even-pairs", "missing-duplicate", "stack-manipulation"])
def test_epochs_are_those_of_the_records(task):
    said = row("Top-k attention converges")[1]
    pattern = rf"([\d, ]+) against ([\d, ]+) on {task}"
    top, full = ([int(n) for n in group.split(",")] for group in re.search(pattern, said).groups())
    for attention, numbers in (("topk-5", top), ("full", full)):
        known = epochs_to_95(task, attention)
        assert known, f"there are no records of {task}, {attention}"
        assert set(known) <= set(numbers)


def test_ratios_of_dispersion_are_those_of_the_findings():
    findings = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    table = re.findall(r"\| [\d.]+, [\d.]+ \| ([\d.]+) \| [\d.]+, [\d.]+ \| ([\d.]+) \|", findings)
    before, after = (sorted(float(pair[at]) for pair in table) for at in (0, 1))
    said = row("Top-k has the smaller dispersion")[1]
    assert f"{after[0]} to {after[-1]:.2f} of full attention's in 3 of 3" in said
    assert f"{before[0]} to {before[-1]} before training" in said


PHRASES = {
    ("The smaller the dispersion", "docs/study.md"): "−0.47 to 0.37; −0.26 (−0.56 to 0.05)",
    ("Masks are separated", "docs/findings.md"): "85%; 29%; 92%; 51%",
    ("The conditions of Corollary 1", "docs/findings.md"): "24 of 24; 10 of 18; 1 of 18; 0 of 18; 35 of",
    ("The bounds are true", "docs/findings.md"): "5 of 101,000 pairs of rows",
    ("Fixed sparse masks", "docs/findings.md"): "10 of 12 pairs",
    ("Fixed sparse masks", "docs/study.md"): "1.65 to 1.73",
    ("Approximate selections", "docs/study.md"): "1.32 (0.94 to 1.87); 0.98 (0.61 to 1.58); 0.79 (0.40 to 1.55)",
    ("Empirical Lipschitz", "docs/findings.md"): "0 of 10 pairs",
}


@pytest.mark.parametrize(("start", "page"), PHRASES)
def test_numbers_are_those_of_the_page_that_has_their_command(start, page):
    said, source = row(start)[1], (ROOT / page).read_text(encoding="utf-8")
    for phrase in PHRASES[start, page].split("; "):
        assert phrase in said
        assert phrase.replace("0 of 10 pairs", "in none of 10 pairs") in source or phrase in source


def test_what_explains_the_speed_is_what_the_frozen_study_found():
    source = (ROOT / "docs" / "must-attention-learn.md").read_text(encoding="utf-8")
    for share in ("0.71 (0.61 to 0.85)", "0.20 (0.01 to 0.41)"):
        assert share in PAGE
        assert share in source


def best_held_out(task, attention):
    return [
        max(history["holdout_accuracy"])
        for run in read_sweep(ROOT / "experiments" / "length-40.toml")
        if (run.training.task, run.model.attention_label) == (task, attention)
        and (history := read_history(ROOT / "experiments" / "length-40", run)) is not None
    ]


def test_held_out_accuracies_differ_by_what_is_said():
    """Of the records; the shipped references, which are on the page of findings, differ by no more."""
    said = float(re.search(r"within ([\d.]+) points", row("It generalises")[1]).group(1))
    gaps = []
    for task in ("even-pairs", "missing-duplicate", "stack-manipulation"):
        pairs = zip(best_held_out(task, "topk-5"), best_held_out(task, "full"), strict=False)
        gaps += [100 * abs(a - b) for a, b in pairs]
    assert len(gaps) >= 5
    assert max(gaps) <= said + 0.05


def test_listops_says_what_the_two_runs_say():
    measured = row("On ListOps")[1]
    runs = {
        name: pd.read_csv(ROOT / "experiments" / "listops" / name / "history.csv") for name in ("topk", "full")
    }
    epochs = [int(run.loc[run["train_accuracy"] >= 0.95, "epoch"].min()) for run in runs.values()]
    best = [100 * run["holdout_accuracy"].max() for run in runs.values()]
    assert (
        "95% training accuracy in epoch {} with top-5, in epoch {} with full attention".format(*epochs) in measured
    )
    assert f"{epochs[1] / epochs[0]:.2f} times as fast" in measured
    assert "the best held-out accuracy is {:.1f}% and {:.1f}%".format(*best) in measured


def test_language_says_what_its_records_say():
    found = language.judge(ROOT / "experiments" / "language").set_index("mask")
    assert (found["seeds"] == 3).all()
    measured = row("The benefit carries over")[1]
    table = (ROOT / "experiments" / "language.md").read_text(encoding="utf-8").partition("## Result")[2]

    def interval(mask, name, sign=1):
        ends = [sign * found.loc[mask, f"{name}{end}"] for end in ("", "_low", "_high")]
        return "{:.3f} ({:.3f} to {:.3f})".format(ends[0], *sorted(ends[1:])).replace("-", "−")

    assert f"by {interval('topk-8', 'area').replace(' (', ' nats a byte (')}" in measured
    assert f"at the end by {interval('topk-8', 'end')}" in measured
    assert f"is ahead by {interval('window-8', 'area', -1)}" in measured
    for mask in found.index.drop("full"):
        line = next(line for line in table.splitlines() if line.startswith(f"| {mask} |"))
        own = found.loc[mask]
        assert interval(mask, "area") in line.replace("*", "")
        assert interval(mask, "end") in line
        assert f"| {own['reach_full']:.0f}" in line
        shown = f"{own['dispersion']:.2f} | {own['separation']:.3f} | {own['entropy']:.2f} | {own['stay']:.1%} |"
        assert line.endswith(shown)
    assert f"after {found.loc['window-8', 'bytes_to_full'] / 1e6:.2f} of 3.07 million bytes" in table


def test_robustness_says_what_its_records_say():
    outcomes = robustness.read_outcomes(ROOT / "experiments" / "robustness")
    assert outcomes["loss_area"].notna().all()
    table = robustness.advantages(outcomes)
    committed = pd.read_csv(ROOT / "reports" / "robustness" / "advantages.csv")
    pd.testing.assert_frame_equal(table, committed, rtol=1e-9)
    answers = robustness.verdicts(table).set_index(["attention", "task"])["answer"]
    page = (ROOT / "experiments" / "robustness.md").read_text(encoding="utf-8").partition("## Result")[2]
    measured = row("The advantage is robust")[1]
    for (attention, task), answer in answers.items():
        own = table[(table["task"] == task) & (table["attention"] == attention)]
        recipe, others = own[own["level"] == robustness.RECIPE].iloc[0], own[own["level"] != robustness.RECIPE]
        sign = np.sign(recipe["advantage"])
        ends = others["low" if sign > 0 else "high"]
        same, clear = (sign * others["advantage"] > 0).sum(), (sign * ends > 0).sum()
        said = "{:.2f} ({:.2f} to {:.2f})".format(*recipe[["advantage", "low", "high"]]).replace("-", "−")
        line = next(line for line in page.splitlines() if line.startswith(f"| {task} | {attention} |"))
        assert line.endswith(f"| {said} | {same} | {clear} | {answer} |"), (said, same, clear, answer)
        if attention == "topk-5":
            assert f"{said} on {task}" in measured
    shrunk = table[(table["task"] == "missing-duplicate") & (table["attention"] == "topk-5")].set_index("level")
    for level in ("norm post", "dropout 0.1"):
        ends = shrunk.loc[level, ["advantage", "low", "high"]]
        assert "{:.2f} ({:.2f} to {:.2f})".format(*ends).replace("-", "−") in page
