"""The examples of docs/your-own-model.md run as they stand there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "your-own-model.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: ([a-z ]+) -->\n```python\n(.*?)```", GUIDE, re.S))
NEEDS = {"nanogpt": "torch", "hugging face": "transformers"}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_the_example_runs_and_misses_nothing(name: str) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    printed = run(EXAMPLES[name])
    residuals = [float(number) for number in re.findall(r"\b\d\.\d+e-\d\d\b|\b0\.0\b", printed)]
    assert residuals, printed
    # Weights are at most 1, and float32 rounds at 6e-8: a sum over some tens of keys and channels stays below.
    assert max(residuals) < 1e-5


def test_every_example_is_run() -> None:
    assert set(EXAMPLES) == set(NEEDS)


def test_the_readme_links_the_guide() -> None:
    assert "docs/your-own-model.md" in (ROOT / "README.md").read_text(encoding="utf-8")
