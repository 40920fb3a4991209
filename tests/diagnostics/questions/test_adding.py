"""The page on adding a question, followed step by step in a copy of the package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_PAGE = (_ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## Adding a question")[2]
_STEPS = re.findall(r"   ```python\n(.*?)   ```\n", _PAGE, flags=re.S)
_TRIAL = """
import json, torch
from semdiag import measure, summary
from semdiag.questions import registry
from semdiag_models import Encoder, ModelConfig

torch.manual_seed(0)
encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
found = measure(encoder, torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]))
from semdiag.measuring.findings.findings import Findings
findings = Findings(found)
print(json.dumps({
    "summary": registry.QUESTIONS["peaks"].json(findings),
    "tables": {n: len(table) for n, table in registry.all_sections()["peaks"].tables(findings, True).items()},
    "expected": float((found.queries["largest_weight"] > 0.5).mean()),
    "applies": registry.all_sections()["peaks"].applies(findings),
}))
"""


@pytest.mark.slow
def test_a_question_is_one_folder_and_one_line(tmp_path):
    for package in ("diagnostics/semdiag", "models/semdiag_models"):
        shutil.copytree(_ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "diagnostics/semdiag/questions/peaks"
    folder.mkdir()
    for name, code in zip(("__init__", "answer", "figures"), _STEPS, strict=True):
        (folder / f"{name}.py").write_text(re.sub(r"^   ", "", code, flags=re.M), encoding="utf-8")
    registry = folder.parent / "registry.py"
    registry.write_text(registry.read_text().replace('    "heads",\n', '    "heads",\n    "peaks",\n'))
    paths = os.pathsep.join(str(tmp_path / name) for name in ("diagnostics", "models"))
    done = subprocess.run(
        [sys.executable, "-c", _TRIAL],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["applies"]
    assert said["tables"] == {"peaks": 1}
    (row,) = said["summary"]["results"]
    assert row["peaked"] == pytest.approx(said["expected"])
    assert said["summary"]["schema"] == "semdiag.peaks/2"
