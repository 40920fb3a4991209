"""docs/theory.md and the code point at each other: no dead anchor, no function unnamed or gone."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
ANCHORS = set(re.findall(r'<a id="([\w-]+)"></a>', DOCUMENT))
SOURCES = [file for folder in ("diagnostics", "models") for file in sorted((ROOT / folder).rglob("*.py"))]
WITH_FORMULAS = (
    "softmax_stability",
    "key_swaps",
    "same_set_pairs",
    "paper_stability",
    "softmax_secants",
    "heavy_hitter_pairs",
    "spectral_norms",
    "bounds.layer_constants",
    "attention_rows",
    "bounds.attention_bounds",
    "bounds.point_bounds",
    "bounds.paper_attention_bounds",
    "bounds.block_bounds",
    "bounds.network_bounds",
    "bounds.corollary",
    "mask_stability",
    "selections.number_formats",
    "selections.rounded_operands",
    "selections.top_k_check",
    "planes",
    "power_iteration",
    "top_recall",
)
TRAINER = ("hashed_selection", "clustered_selection", "reach")  # of the other package


def public_functions(module_name: str) -> dict:
    package = "semdiag_models.attention" if module_name in TRAINER else "semdiag.mathematics"
    module = importlib.import_module(f"{package}.{module_name}")
    return {
        name: member
        for name, member in inspect.getmembers(module, lambda found: inspect.isfunction(inspect.unwrap(found)))
        if member.__module__ == module.__name__ and not name.startswith("_")
    }


def test_every_anchor_in_the_code_exists():
    named = {
        (source.name, anchor)
        for source in SOURCES
        for anchor in re.findall(r"theory\.md#([\w-]+)", source.read_text(encoding="utf-8"))
    }
    assert named
    assert not {(name, anchor) for name, anchor in named if anchor not in ANCHORS}


@pytest.mark.parametrize("module_name", WITH_FORMULAS)
def test_functions_and_formulas_name_each_other(module_name):
    for name, function in public_functions(module_name).items():
        assert "docs/theory.md#" in function.__doc__, f"{name} names no formula"
        assert re.search(r"Source: .*Deviation: ", function.__doc__, re.DOTALL), name
        assert f"`{name}`" in DOCUMENT, f"docs/theory.md does not name {name}"


def test_the_document_names_nothing_that_is_gone():
    known = {name for module in WITH_FORMULAS + TRAINER for name in public_functions(module)}
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", DOCUMENT))
    assert named <= known


def test_links_inside_the_document_lead_somewhere():
    assert set(re.findall(r"\]\(#([\w-]+)\)", DOCUMENT)) <= ANCHORS
