"""Inputs that lie about sizes, depths and kinds: 72 of the 3,000 of ``python tests/fuzz_limits.py``, by day 24."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SEED = 20261127
NUMBER = 72 if os.environ.get("SEMDIAG_EVERY_CASE") else 24


@pytest.mark.slow
def test_no_input_brings_a_command_down_or_takes_a_minute_or_four_gibibytes(tmp_path):
    pytest.importorskip("transformers")
    script = Path(__file__).parents[1] / "fuzz_limits.py"
    words = [sys.executable, "-W", "ignore", str(script), str(tmp_path), str(SEED), str(NUMBER)]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert set(found["all"]) <= {"exit 0", "exit 1", "exit 2"}, done.stderr[-2000:]
    assert found["inputs"] == NUMBER
    assert found["all"]["exit 0"] > 1
    assert len(found["kinds"]) == 12
