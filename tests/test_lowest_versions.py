"""The lowest versions that pyproject.toml promises are those that .ci/lowest.txt lets be tested."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def promised():
    """The lowest version of everything that the program itself can need, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in ("text", "ray", "hf") for line in extras[name])]
    bounds = {}
    for requirement in map(Requirement, lines):
        (bound,) = requirement.specifier  # a single one, from below
        assert bound.operator == ">="
        bounds[canonicalize_name(requirement.name)] = Version(bound.version)
    return bounds


def pinned():
    found = {}
    for line in (ROOT / ".ci" / "lowest.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            found[canonicalize_name(name)] = Version(version)
    return found


def test_every_lower_bound_is_the_version_that_is_tested():
    bounds, pins = promised(), pinned()
    assert {"torch", "numpy", "transformers"} <= set(bounds)
    assert {name: pins.get(name) for name in bounds} == bounds
