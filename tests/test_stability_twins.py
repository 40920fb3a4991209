"""The study of twins: what is trained, what is measured of it, and that its records are judged as registered."""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import stability
import stability_figure
import torch

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "stability"


TABLE = stability.read(FOLDER)


def test_twins_differ_from_the_base_in_one_sample_each():
    with torch.random.fork_rng(devices=[]):
        trainer = stability.configured("missing-duplicate", "full", 3)
    tokens, labels, chosen = stability.twin_sets(trainer)
    apart = (tokens != tokens[0]).any(-1)
    assert apart.sum(1).tolist() == [0, 1, 1, 1, 1, 0]
    assert [int(row.nonzero()) for row in apart[1:5]] == chosen.tolist()
    for twin, place in enumerate(chosen, 1):
        assert torch.equal(tokens[twin, place], trainer.train_split.tokens[stability.SAMPLES + twin - 1])
        assert labels[twin, place] == trainer.train_split.labels[stability.SAMPLES + twin - 1]


@pytest.mark.parametrize("reached", [0.3, 0.68])
def test_the_judge_finds_what_was_put_in(reached):
    """Top-5's changes are a tenth of full attention's in epoch 2 and four times it in the last, on five seeds."""
    rows = []
    for seed in range(5):
        for attention, at_two, at_end in (("full", 0.1, 0.01), ("topk-5", 0.01, 0.04)):
            for epoch, change in ((2, at_two), (150, at_end)):
                noise = math.exp(0.01 * seed * (attention == "full"))
                facts = {"task": "even-pairs", "attention": attention, "seed": seed, "epoch": epoch}
                losses = {2: 0.36, 150: 0.01 if attention == "full" else reached}
                rows += [{**facts, "member": "base", "train_loss": losses[epoch], "largest_change": math.nan}]
                rows += [
                    {**facts, "member": f"twin-{i}", "train_loss": losses[epoch], "largest_change": change * noise}
                    for i in range(1, 5)
                ]
    ratios = stability.ratios(pd.DataFrame(rows))
    found = stability.verdicts(ratios).set_index("moment")
    mean = -0.01 * np.mean(range(5))
    assert found.loc["end", "ln_ratio"] == pytest.approx(math.log(4) + mean)
    assert found.loc["end", "verdict"] == "less stable"
    assert found.loc["equal epoch", "ln_ratio"] == pytest.approx((math.log(4) + math.log(0.1)) / 2 + mean)
    assert found.loc["equal epoch", "verdict"] == "more stable"
    assert found.loc["matched loss", "ln_ratio"] == pytest.approx(math.log(0.1) + mean)
    assert found.loc["matched loss", "pairs"] == 5


def test_pairs_that_match_nowhere_are_named():
    """One run never gets below 0.65, above nine tenths of ln 2."""
    losses = pd.DataFrame({2: [0.69, 0.69], 4: [0.65, 0.2]})
    assert stability.matched(losses, 2)[0] == 0.65
    rows = [
        {"task": "even-pairs", "attention": a, "seed": 1, "epoch": e, "member": m, "train_loss": loss}
        for a, values in (("full", (0.69, 0.65)), ("topk-5", (0.69, 0.2)))
        for e, loss in zip((2, 4), values, strict=True)
        for m in ("base", "twin-1")
    ]
    ratios = stability.ratios(pd.DataFrame(rows).assign(largest_change=0.1))
    found = stability.verdicts(ratios).set_index("moment")
    assert found.loc["matched loss", ["pairs", "unmatched"]].tolist() == [0, "1"]
    assert found.loc["matched loss", "verdict"] == "cannot tell"


def test_nothing_is_judged_while_blocks_are_missing(tmp_path):
    for file in FOLDER.glob("*.parquet"):
        rows = pd.read_parquet(file)
        gone = (rows["seed"] == 57008) & (rows["attention"] == "full") & (rows["task"] == "even-pairs")
        rows[~gone].to_parquet(tmp_path / file.name)
    with pytest.raises(SystemExit, match="Nothing is judged before all 96 blocks"):
        stability.judge(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_page_says_what_the_records_do(tmp_path):
    stability.judge(FOLDER, tmp_path)
    found = pd.read_csv(tmp_path / "verdicts.csv").query("attention == 'topk-5'")
    text = (ROOT / "experiments" / "stability.md").read_text(encoding="utf-8")
    for row in found.to_dict("records"):
        line = next(line for line in text.splitlines() if line.startswith(f"| {row['task']} |"))
        cell = line.split("|")[2 + ["equal epoch", "matched loss", "end"].index(row["moment"])]
        ratio, low, high = (float(x.replace(",", "")) for x in re.findall(r"\d[\d.,]*\d|\d", cell)[:3])
        for said, ln in ((ratio, row["ln_ratio"]), (low, row["low"]), (high, row["high"])):
            assert said == pytest.approx(math.exp(ln), rel=0.06, abs=0.006)
        assert row["verdict"] in cell
    counts = found["verdict"].value_counts()
    assert "more stable" not in counts
    assert counts["less stable"] == 4
    assert "in none of nine comparisons, and less stable in four" in text
    committed = pd.read_csv(ROOT / "reports" / "stability" / "verdicts.csv").query("attention == 'topk-5'")
    assert committed["ln_ratio"].tolist() == pytest.approx(found["ln_ratio"].tolist())


def test_what_followed_the_batches_is_never_below_the_distance():
    """By the triangle inequality, step by step; the records are in float32."""
    twins = TABLE[TABLE["member"] != "base"]
    assert (twins["ln_followed"] >= np.log(twins["distance"]) - 1e-4).all()


def test_the_forest_plot_has_the_nine_ratios_of_the_verdicts():
    verdicts = pd.read_csv(ROOT / "reports" / "stability" / "verdicts.csv")
    axes = stability_figure.figure(verdicts).axes
    top = verdicts[verdicts["attention"] == "topk-5"].set_index(["task", "moment"])
    for ax, task in zip(axes, stability.TASKS, strict=True):
        own = top.loc[task].loc[list(stability_figure.MOMENTS[::-1])]
        points = sorted((y, x) for each in ax.containers for x, y in zip(*each[0].get_data(), strict=True))
        assert [x for _, x in points] == pytest.approx(np.exp(own["ln_ratio"]).tolist())
        bars = [bar for each in ax.containers for bar in each[2][0].get_segments()]
        ends = [
            end
            for _, low, high in sorted((bar[0][1], bar[0][0], bar[1][0]) for bar in bars)
            for end in (low, high)
        ]
        assert ends == pytest.approx(np.exp(own[["low", "high"]]).to_numpy().ravel().tolist())
        assert ax.get_xlim()[0] < np.exp(own["low"].min())
        assert ax.get_xlim()[1] > np.exp(own["high"].max())
