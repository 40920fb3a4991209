"""The study of twins: what is trained, what is measured of it, and that its records are judged as registered."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import stability
import torch

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "stability"


TABLE = stability.read(FOLDER)
MOVED = stability.MOVE * math.sqrt(10_000)  # the null twins' first distance, at least: they have more parameters


@pytest.mark.parametrize(
    ("task", "attention", "most"), [("even-pairs", "topk-5", 0.0), ("cycle-navigation", "random-5", MOVED / 10)]
)
def test_a_member_that_differs_in_nothing_stays_equal_and_the_base_is_the_trainers_run(task, attention, most):
    """To the last bit at length 20, up to a tenth of the null twins' move at length 10, where vector units cut.

    The trainer's own run of the seed has the losses of the base, up to the rounding of stacked products.
    """
    table = stability.train(task, attention, 1, epochs=2, move=0.0).set_index("member")
    null = table.loc["null"]
    assert null["distance"] <= most
    assert null["largest_change"] <= most
    assert (table.loc["twin-1":"twin-4", "distance"] > 1e-4).all()
    with torch.random.fork_rng(devices=[]):
        trainer = stability.configured(task, attention, 1)
        trainer.training = replace(trainer.training, train_samples=stability.SAMPLES, epochs=2)
        trainer.train_split = type(trainer.train_split)(*(x[: stability.SAMPLES] for x in trainer.train_split))
        trainer.run(lambda progress: None)
    assert table.loc["base", "train_loss"] == pytest.approx(trainer.history["train_loss"][-1], rel=1e-4)
    assert table.loc["base", "fresh_loss"] == pytest.approx(trainer.history["holdout_loss"][-1], rel=1e-4)


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
    files = sorted(FOLDER.glob("*.parquet"))
    blocks = pd.concat([pd.read_parquet(file, columns=["task", "attention", "seed"]) for file in files])
    through = len(blocks.drop_duplicates())
    assert through < 96, "all are there: judge them, write the result, and let a test hold it against the records"
    with pytest.raises(SystemExit, match="Nothing is judged before all 96 blocks"):
        stability.judge(FOLDER, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_followed_the_batches_is_never_below_the_distance():
    """By the triangle inequality, step by step; the records are in float32."""
    twins = TABLE[TABLE["member"] != "base"]
    assert (twins["ln_followed"] >= np.log(twins["distance"]) - 1e-4).all()
