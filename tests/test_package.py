"""What is published: every package in the wheel, and a source distribution without tests, studies and reports."""

import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TARGETS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
LARGEST = 4e6  # bytes, not compressed


def test_the_wheel_holds_every_package():
    packages = [path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("[dm]*/semdiag*/__init__.py")]
    assert sorted(TARGETS["wheel"]["packages"]) == sorted(packages)
    assert len(packages) == 3


def test_the_source_distribution_is_small():
    """It had 13.7 MB of tests and experiments."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no checkout of git")
    left_out = tuple(f"{folder.removeprefix('/')}/" for folder in TARGETS["sdist"]["exclude"])
    files = [name for name in done.stdout.split("\0") if name and not name.startswith(left_out)]
    assert {name.split("/")[0] for name in files if "/" in name} <= {"diagnostics", "models", "docs", ".github"}
    assert sum((ROOT / name).stat().st_size for name in files) < LARGEST
