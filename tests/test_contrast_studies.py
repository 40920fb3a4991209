"""The studies of contrast and of concentration: their runs as registered, their parts by naive references."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import claims
import concentration
import contrast
import fresh_seeds
import numpy as np
import pandas as pd
import pytest
import torch
import why_faster_figures

from semdiag.measuring.findings.resampling import Interval
from semdiag_files import InputError
from semdiag_models import ModelConfig, configure, find_task, read_checkpoint
from semdiag_models.sweep import SweepRun

ROOT = Path(__file__).parents[1]


def test_the_runs_of_contrast_are_those_registered():
    study = contrast.registered()
    counts = Counter((task, attention) for task, attention, _, _ in study)
    assert len(study) == len({run.name for *_, run in study}) == 85
    assert {
        counts["even-pairs", name] for name in (*contrast.COMPARISONS[0], "full-times-8", contrast.FASTER)
    } == {8}
    assert counts["missing-duplicate", "topk-5-times-4"] == 5
    assert ("cycle-navigation", "topk-5-times-4") not in counts
    assert {run.training.epochs for task, _, _, run in study if task == "cycle-navigation"} == {300}
    sizes = {(run.model.blocks, run.model.width, run.model.length, run.training.until) for *_, run in study}
    assert sizes == {(5, 64, 40, 0.99)}
    assert {attention for _, attention, _, _ in study[:61]} == set(contrast.PRIMARY)
    assert {each[:2] for each in study[:16]} == {("even-pairs", name) for name in contrast.COMPARISONS[0]}


@pytest.mark.slow
@pytest.mark.parametrize("study", ["contrast", "concentration"])
def test_no_seed_was_used_before(study):
    seeds = {67201} if study == "concentration" else {67101}
    fresh_seeds.refuse_used(seeds, study)
    with pytest.raises(InputError, match="57003"):
        fresh_seeds.refuse_used({57003, *seeds}, study)


def test_seeds_are_found_wherever_a_study_has_them(tmp_path):
    (tmp_path / "a.toml").write_text("[[grid]]\nseed = [11, 12]\n[other]\ntask = [{seed = 13}]\n")
    (tmp_path / "b.py").write_text("SEEDS = tuple(range(21, 23))\nSEEDS_ELSEWHERE = 5\n")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "full-seed-31.csv").write_text("x\n1\n")
    (tmp_path / "c" / "t.csv").write_text("seed\n41\n")
    record = {"run": ["r"], "record": [json.dumps({"training": {"seed": 51}})]}
    pd.DataFrame(record).to_parquet(tmp_path / "c" / "runs.parquet")
    assert fresh_seeds.used_seeds(tmp_path) == {11, 12, 13, 21, 22, 31, 41, 51}
    assert fresh_seeds.used_seeds(tmp_path, apart="c") == {11, 12, 13, 21, 22}


def naive_factor(row, k):
    """The factor of one row, by bisection in float64."""
    target = float((torch.softmax(torch.sort(row).values[-k:], 0) ** 2).sum())
    low, high = 1.0, 1e6
    for _ in range(80):
        middle = math.sqrt(low * high)
        above = float((torch.softmax(middle * row, 0) ** 2).sum()) > target
        low, high = (low, middle) if above else (middle, high)
    return low, target


@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0, 30.0])
def test_matched_rows_are_as_concentrated_as_top_k(spread):
    scores = spread * torch.randn(8, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    factors = concentration.matching_factors(scores, 5)[:, 0]
    expected = torch.tensor([naive_factor(row, 5) for row in scores], dtype=torch.float64)
    if spread <= 3:  # beyond, rows with one key hardly move with their factor
        torch.testing.assert_close(factors, expected[:, 0], rtol=1e-6, atol=0)
    weights = (factors[:, None] * scores).softmax(-1)
    torch.testing.assert_close(concentration.concentration(weights), expected[:, 1], rtol=1e-7, atol=0)
    single = concentration.matching_factors(scores.float(), 5)
    matched = concentration.concentration((single * scores.float()).softmax(-1))
    torch.testing.assert_close(matched.double(), expected[:, 1], rtol=1e-4, atol=0)


def test_matched_attention_learns_as_if_its_factors_were_constants():
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 1, 7, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    core = concentration.MatchedCore(ModelConfig(vocabulary_size=3, classes=2, length=7)).eval()
    points = [t.clone().requires_grad_() for t in (q, k)]
    core(*points, v, 0.5, None, None).square().sum().backward()
    factors = concentration.matching_factors(0.5 * q @ k.mT, 5)

    def constant(q, k):
        return ((factors * 0.5 * (q @ k.mT)).softmax(-1) @ v).square().sum()

    expected = torch.autograd.functional.jacobian(constant, (q, k))
    for point, gradient in zip(points, expected, strict=True):
        torch.testing.assert_close(point.grad, gradient)


def test_rows_whose_scores_are_equal_have_the_largest_factor():
    assert concentration.matching_factors(torch.zeros(1, 20), 5).item() == pytest.approx(
        concentration.SHARPEST, rel=1e-2
    )


@pytest.mark.slow
def test_matched_attention_begins_as_concentrated_as_top_5_and_with_a_larger_dispersion():
    tables = {
        name: concentration.train("even-pairs", name, (1,), 1)
        for name in (concentration.TOP, concentration.MATCHED)
    }
    first = {name: table.iloc[0] for name, table in tables.items()}
    top, matched = first[concentration.TOP], first[concentration.MATCHED]
    assert matched["concentration"] == pytest.approx(
        top["concentration"], rel=1e-2
    )  # later layers see other inputs
    assert matched["dispersion"] > 10 * top["dispersion"]
    assert (tables[concentration.MATCHED]["epoch"] == [0, 1]).all()


def test_steps_of_queries_and_keys_are_multiplied_and_no_others():
    trainers = [concentration.configured("even-pairs", "full", 3, 1) for _ in range(2)]
    faster = contrast.FasterQueriesAndKeys(trainers[1].encoder, 4.0)
    before = [p.detach().clone() for p in trainers[0].encoder.parameters()]
    moved = []
    for trainer, after_step in zip(trainers, (lambda: None, faster), strict=True):
        generator = torch.Generator().manual_seed(4)
        for p in trainer.encoder.parameters():
            p.data -= torch.randn(p.shape, generator=generator)
        after_step()
        moved.append([p.detach() - b for p, b in zip(trainer.encoder.parameters(), before, strict=True)])
    names = [name for name, _ in trainers[0].encoder.named_parameters()]
    for name, plain, quick in zip(names, *moved, strict=True):
        expected = plain.clone()
        if ".qkv." in name:
            expected[:64] *= 4
        torch.testing.assert_close(quick, expected)


def test_areas_are_integrals_up_to_the_stop():
    steps = np.array([0.6, 0.4, 0.2, 0.0])
    by_hand = (math.log(5) + 0.6) / 2 + 0.5 + 0.3 + 0.1
    assert contrast.area(steps, 5) == pytest.approx(by_hand)


def history(losses):
    accuracy = [0.5] * (len(losses) - 1) + [0.995]
    columns = {
        "train_loss": losses,
        "train_accuracy": accuracy,
        "holdout_loss": losses,
        "holdout_accuracy": accuracy,
    }
    columns |= {"epoch": range(1, len(losses) + 1), "seconds": [1.0] * len(losses)}
    return {name: np.array(list(values), dtype=float) for name, values in columns.items()}


def test_a_planted_ratio_of_areas_is_found_with_its_sign():
    runs = {}
    for seed in (1, 2, 3):
        losses = 0.01 * seed + np.linspace(0.7, 0.01, 20)
        runs["even-pairs", contrast.TOP, seed] = history(losses)
        runs["even-pairs", contrast.SHARP, seed] = history(np.repeat(losses, 2))
    table = pd.DataFrame(contrast.differences(runs)).set_index(["attention", "less", "quantity"])
    found = table.loc[(contrast.SHARP, contrast.TOP, "ln_area")]
    assert found["pairs"] == 3
    assert found["estimate"] == pytest.approx(math.log(2), abs=0.05)
    assert found["low"] > 0
    matched = table.loc[(contrast.SHARP, contrast.TOP, "holdout_loss_at_matched_loss"), "estimate"]
    assert matched == pytest.approx(0, abs=1e-12)


def test_attentions_with_a_missing_run_are_not_compared(tmp_path, capsys):
    contrast.judge(tmp_path, tmp_path / "out")
    told = capsys.readouterr().out
    assert "even-pairs, topk-5: 8 runs are missing, no comparison." in told
    assert "cycle-navigation, full-times-4: 3 runs" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("low", "high", "parts"),
    [(-0.5, 0.1, {"not needed"}), (0.1, 0.5, {"adds"}), (0.05, 0.2, {"not needed", "adds"}), (-0.5, 0.5, set())],
)
def test_thresholds_of_contrast_are_those_registered(low, high, parts):
    said = contrast.said(Interval((low + high) / 2, low, high))
    assert {part for part in ("not needed", "adds") if part in said} == parts
    assert (said == "these runs cannot tell") == (not parts)


def test_planted_areas_give_each_explanation_its_answer(tmp_path):
    """Top-5 and matched full attention alike, halved scores slower: concentration."""
    gains = {concentration.FULL: 0.0, concentration.TOP: 1.0, concentration.MATCHED: 1.0, concentration.HALF: 0.5,
             concentration.STRAIGHT: 1.0}  # fmt: skip
    rows = []
    rng = np.random.default_rng(0)
    for attention, gain in gains.items():
        for seed in concentration.SEEDS:
            loss = math.exp(-gain + 0.02 * rng.standard_normal())
            rows += [
                {"task": "even-pairs", "attention": attention, "seed": seed, "epoch": epoch, "train_loss": loss}
                | {"train_accuracy": 0.9, "holdout_accuracy": 0.9, "dispersion": 1.0, "concentration": 0.2}
                | {"core_seconds": 1.0}
                for epoch in range(concentration.EPOCHS + 1)
            ]
    table = pd.DataFrame(rows)
    answers = concentration.explanations(concentration.differences(concentration.areas(table)))
    told = answers.set_index(["explanation", "attention"])["answer"].to_dict()
    assert told == {
        ("a small δ and ξ", concentration.MATCHED): "contradicted",
        ("a small δ and ξ", concentration.HALF): "contradicted",
        ("concentration", concentration.MATCHED): "as expected",
        ("concentration", concentration.HALF): "as expected",
        ("selective gradients", concentration.MATCHED): "contradicted",
        ("selective gradients", concentration.STRAIGHT): "contradicted",
    }
    gone = (table["attention"] == concentration.STRAIGHT) & (table["seed"] == concentration.SEEDS[-1])
    table[~gone].to_parquet(tmp_path / "epochs.parquet")
    concentration.judge(tmp_path, tmp_path / "out")
    judged = pd.read_csv(tmp_path / "out" / "verdicts.csv")
    assert set(judged["attention"]) == {concentration.MATCHED, concentration.HALF}
    assert (judged["task"] == "even-pairs").all()


def tiny_run(epochs):
    task = find_task("parity")
    sizes = {"blocks": 1, "width": 8, "mlp_width": 8, "head_width": 8, "train_samples": 50, "holdout_samples": 20}
    return SweepRun("tiny", *configure(task, {**sizes, "length": 6, "epochs": epochs, "seed": 1}))


@pytest.mark.parametrize("faster", [False, True])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path, faster):
    contrast.train(tmp_path / "stopped", tiny_run(1), faster)
    contrast.train(tmp_path / "stopped", tiny_run(3), faster)
    contrast.train(tmp_path / "whole", tiny_run(3), faster)
    stopped, whole = (read_checkpoint(tmp_path / name / "last.pt") for name in ("stopped", "whole"))
    assert stopped.epoch == whole.epoch == 3
    for name, value in whole.state.items():
        torch.testing.assert_close(stopped.state[name], value, rtol=0, atol=0)


def test_a_damaged_run_is_named_and_not_trained_over(tmp_path):
    contrast.train(tmp_path / "run", tiny_run(1), False)
    (tmp_path / "run" / "last.pt").write_bytes(b"PK damaged")
    with pytest.raises(InputError, match=r"run/last\.pt"):
        contrast.train(tmp_path / "run", tiny_run(2), False)
    assert (tmp_path / "run" / "last.pt").read_bytes() == b"PK damaged"


def test_results_stand_above_their_registrations():
    """Of the studies that were judged; of the others nothing is said above."""
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "experiments").glob("*.md")}
    registered = {
        name: text for name, text in pages.items() if "before any of" in text or "before anything here" in text
    }
    assert len(registered) >= 9
    for name, text in registered.items():
        if (ROOT / "reports" / name / "verdicts.csv").exists() or name not in ("contrast", "concentration"):
            assert 0 < text.index("\n## Result") < text.index("\n## The registration"), name
        else:
            assert "## Result" not in text, name


def test_the_result_is_what_the_registered_script_makes_of_the_records(tmp_path):
    contrast.judge(ROOT / "experiments" / "contrast", tmp_path)
    committed = pd.read_csv(ROOT / "reports" / "contrast" / "verdicts.csv")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "verdicts.csv"), committed)
    pages = [ROOT / page for page in ("experiments/contrast.md", "docs/paper.md")]
    texts = [" ".join(page.read_text(encoding="utf-8").split()) for page in pages]
    for row in committed.to_dict("records"):
        low, estimate, high = (f"{math.exp(row[name]):.2f}" for name in ("low", "estimate", "high"))
        assert all(f"{estimate} ({low} to {high}) of top-5's" in text for text in texts), row["task"]
    assert dict(zip(committed["task"], committed["verdict"], strict=True)) == {
        "even-pairs": "the mask is not needed for the head start",
        "missing-duplicate": "the mask is not needed for the head start",
    }


def test_the_page_for_students_is_short_and_has_five_figures():
    page = (ROOT / "docs" / "why-faster.md").read_text(encoding="utf-8")
    shown = re.findall(r"\]\(\.\./reports/why-faster/([\w-]+)\.svg\)", page)
    assert shown == list(why_faster_figures.FIGURES)
    assert len(shown) == 5
    assert len(page.split()) <= 700
    assert all((ROOT / "reports" / "why-faster" / f"{name}.svg").exists() for name in shown)


@pytest.mark.slow
def test_the_chain_breaks_where_the_figure_says():
    names = [name for name, _, holds in why_faster_figures.links() if not holds]
    assert names == ["ξ smaller", "λ smaller"]
    assert (claims.top_over_full("dispersion") < 1).all()
    assert (claims.top_over_full("xi_sound") > 1).all()
    assert (claims.top_over_full("lambda_sound") > 1).all()
    text = "".join(t.get_text() for t in why_faster_figures.chain().axes[0].texts)
    assert "10 to 92 times full's" in text


def test_runs_with_a_record_are_not_trained_again(tmp_path):
    records = ROOT / "experiments" / "contrast"
    through = contrast.read(records).keys()
    assert through
    left = {each[:3] for each in contrast.waiting(tmp_path, records)}
    assert not left & through
    assert len(left) + len(through) == 85
    assert len(contrast.waiting(tmp_path, tmp_path)) == 85


def test_blocks_that_are_packed_are_parted_again_and_not_trained(tmp_path):
    concentration.unpack(ROOT / "experiments" / "concentration", tmp_path)
    files = list(tmp_path.glob("*.parquet"))
    assert files
    concentration.pack(tmp_path, tmp_path / "packed")
    table, again = (
        pd.read_parquet(folder / "epochs.parquet")
        for folder in (ROOT / "experiments" / "concentration", tmp_path / "packed")
    )
    keys = ["task", "attention", "seed", "epoch"]
    pd.testing.assert_frame_equal(
        table.sort_values(keys, ignore_index=True), again.sort_values(keys, ignore_index=True)
    )
