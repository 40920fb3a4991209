"""docs/theory.md and the code point at each other: no dead anchor, no function unnamed or gone."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="modules of kernels are looked at, too")

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
ANCHORS = set(re.findall(r'<a id="([\w-]+)"></a>', DOCUMENT))
SOURCES = [file for folder in ("diagnostics", "models") for file in sorted((ROOT / folder).rglob("*.py"))]
PACKAGES = ("semdiag.mathematics", "semdiag_models.model", "semdiag_models.selection", "semdiag.measuring.reach")
PLAIN = {  # handle numbers, tensors and places; their docstrings say it all
    "allowed_by", "allowed_keys", "as_mask", "index_scores", "lacking", "operands", "quantised", "with_scales",
    "broadcast", "draw_queries", "float64", "kaplan_meier_median",
    "largest_scores", "log", "log_one_plus", "log_one_plus_inverse", "log_product", "log_root_sum_squares",
    "log_sum", "median_interval", "merged", "overlaps", "part_of",
    "fitting_tile", "kernel_rows", "rows_by_kernels",
    "predicted_classes", "ratio_ends", "refusal",
    "row_statistics", "rows_of", "sampled_estimates",
    "unraveled", "weight_lost", "without_repeats",
}  # fmt: skip


def public_functions(package: str) -> dict:
    """Return the public functions of a package by name, each from the module that defines it."""
    found = {}
    places = getattr(importlib.import_module(package), "__path__", [])
    for module in [package, *(each.name for each in pkgutil.walk_packages(places, f"{package}."))]:
        for name, member in vars(importlib.import_module(module)).items():
            defined = inspect.isfunction(inspect.unwrap(member)) if callable(member) else False
            if defined and member.__module__ == module and not name.startswith("_"):
                found[name] = member
    return found


def test_every_anchor_in_the_code_exists():
    named = {
        (source.name, anchor)
        for source in SOURCES
        for anchor in re.findall(r"theory\.md#([\w-]+)", source.read_text(encoding="utf-8"))
    }
    assert named
    assert not {(name, anchor) for name, anchor in named if anchor not in ANCHORS}


@pytest.mark.parametrize("name", sorted(public_functions(PACKAGES[0]).keys() - PLAIN))
def test_functions_and_formulas_name_each_other(name):
    function = public_functions(PACKAGES[0])[name]
    assert "docs/theory.md#" in function.__doc__, f"{name} names no formula"
    assert re.search(r"Source: .*Deviation: ", function.__doc__, re.DOTALL), name
    assert f"`{name}`" in DOCUMENT, f"docs/theory.md does not name {name}"


def test_the_document_names_nothing_that_is_gone():
    known = {name for package in PACKAGES for name in public_functions(package)}
    assert set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", DOCUMENT)) <= known
    assert known >= PLAIN


def test_links_inside_the_document_lead_somewhere():
    titles = [title.lower().replace(" ", "-") for title in re.findall("^#+ (.*)", DOCUMENT, re.M)]
    headings = {re.sub(r"[^\w-]", "", title) for title in titles}  # as GitHub names them
    assert set(re.findall(r"\]\(#([\w-]+)\)", DOCUMENT)) <= ANCHORS | headings
