"""No file brings the program down: 5,000 mutated files, 216 reports, 104 commands; by day a sixteenth."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from semdiag.capturing.loading import load
from semdiag.measuring.findings.findings import Findings, json_ready, schema
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions.bounds.measure import BoundsPlan
from semdiag.questions.k_sweep.measure import KSweepPlan
from semdiag.questions.lipschitz.measure import LipschitzPlan
from semdiag.questions.mask_stability.measure import NoisePlan
from semdiag.questions.stability.measure import SecantsPlan
from semdiag.reporting.gate import tracked_numbers

pytestmark = pytest.mark.slow
SEED = 20261121
NUMBERS = {"in process": 5000, "reports": 216, "command lines": 104}
if not os.environ.get("SEMDIAG_EVERY_CASE"):
    NUMBERS = {way: number // 16 for way, number in NUMBERS.items()}
GIBIBYTE = 2**20  # in KiB


@pytest.fixture
def good(tmp_path, tiny_runs, paper_code):
    """A folder with a good file for every reader."""
    model = load(tiny_runs.full)
    tokens = torch.randint(2, (4, 12), generator=torch.Generator().manual_seed(0))
    plans = SecantsPlan(), BoundsPlan(), NoisePlan(draws=1), KSweepPlan(), LipschitzPlan()
    measured = survey([model], Conditions(samples=4, k=(3,), plans=plans))
    (tmp_path / "last.pt").write_bytes((tiny_runs.full / "last.pt").read_bytes())
    (tmp_path / "paper.pt").write_bytes(paper_code.checkpoint.read_bytes())
    (tmp_path / "config.json").write_bytes(paper_code.config_file.read_bytes())
    np.save(tmp_path / "tokens.npy", tokens.numpy())
    np.savez_compressed(tmp_path / "tokens.npz", tokens=tokens.numpy())
    torch.save({"tokens": tokens}, tmp_path / "tokens.pt")
    (tmp_path / "text.txt").write_text("the cat sat on the mat\nthe dog lay in the hall\n" * 4, encoding="utf-8")
    (tmp_path / "sweep.toml").write_text(
        'epochs = 1\n[grid]\ntask = ["parity"]\nattention = ["full", { attention = "topk", k = [1, 2] }]\n'
    )
    scores = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {"scores": scores, "indices": np.array([[3, 2], [3, 1], [0, -1]]), "lengths": np.array([4, 4, 3])}
    np.savez(tmp_path / "selection.npz", **arrays)
    pd.DataFrame({name: list(array) for name, array in arrays.items()}).to_parquet(tmp_path / "selection.parquet")
    header = {
        "scores": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
        "indices": {"dtype": "I64", "shape": [3, 2], "data_offsets": [48, 96]},
    }
    text = json.dumps(header).encode()
    content = scores.tobytes() + arrays["indices"].astype("<i8").tobytes()
    (tmp_path / "selection.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    models = Findings(measured)(tracked_numbers)
    (tmp_path / "baseline.json").write_text(json.dumps(json_ready({"schema": schema("check"), "models": models})))
    (tmp_path / "monitor.csv").write_text("step,layer\n0,0\n1,0\n")
    measured.save(tmp_path)
    if find_spec("transformers"):
        import transformers

        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        with torch.random.fork_rng():
            tiny = transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes))
        tiny.save_pretrained(tmp_path / "hf")
    (tmp_path / "mutated").mkdir()
    measured.save(tmp_path / "mutated")
    (tmp_path / "mutated" / "SHA256SUMS").unlink()  # behind which readers do their work
    if (tmp_path / "hf").exists():
        shutil.copytree(tmp_path / "hf", tmp_path / "mutated" / "hf")
    return tmp_path


def fuzz(good, way):
    """What the script finds one way; nothing was executed, and no input took more than 2 GiB."""
    script = Path(__file__).parents[1] / "fuzz.py"
    words = [sys.executable, "-W", "ignore", str(script), str(good), way, str(SEED), str(NUMBERS[way])]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    print(json.dumps(found, indent=1))  # shown by pytest -s
    assert not found["executed"]
    assert found["largest KiB"] < 2 * GIBIBYTE
    return found["outcomes"]


def test_every_mutated_file_is_read_or_refused(good):
    every = sum((Counter(classes) for classes in fuzz(good, "in process").values()), Counter())
    assert set(every) == {"read", "refused"}
    assert sum(every.values()) >= NUMBERS["in process"]


@pytest.mark.nightly
def test_every_report_of_mutated_tables_is_written_or_refused(good):
    outcomes = fuzz(good, "reports")
    assert set(outcomes) <= {"exit 0", "exit 2"}
    assert sum(outcomes.values()) == NUMBERS["reports"]


def test_every_command_line_with_a_mutated_file_ends_as_it_should(good):
    outcomes = fuzz(good, "command lines")
    assert set(outcomes) <= {"exit 0", "exit 1", "exit 2"}
    assert sum(outcomes.values()) == NUMBERS["command lines"]
