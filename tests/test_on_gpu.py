"""The script for a machine with a GPU, dry on a CPU: it ends, resumes, and says that it has measured no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "on_gpu.sh"


def run(*words):
    places = os.pathsep.join(str(ROOT / name) for name in ("diagnostics", "models"))
    more = {"PYTHON": sys.executable, "PYTHONPATH": places, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [SCRIPT, *map(str, words)], capture_output=True, text=True, env={**os.environ, **more}, check=False
    )


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path):
    outcome = run(tmp_path)
    assert outcome.returncode == 2
    assert "torch sees no CUDA device" in outcome.stderr


@pytest.mark.nightly
def test_the_dry_run_ends_and_leaves_nothing_to_do(tmp_path):
    outcome = run("--dry-run", tmp_path)
    assert outcome.returncode == 0, outcome.stdout
    done = {file.stem for file in tmp_path.glob("*.done")}
    assert {"trainer", "statistics", "agreement", "monitor", "listops-full", "listops-topk"} < done
    assert "a dry run, no measurement of a GPU" in outcome.stdout
    again = run("--dry-run", tmp_path)
    assert again.stdout.count("done before") == len(done)
