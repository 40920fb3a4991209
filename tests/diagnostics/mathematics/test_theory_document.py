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
MATHEMATICS, TRAINER = (
    [file.relative_to(ROOT / package).with_suffix("").as_posix().replace("/", ".") for file in sorted(files)]
    for package, files in (
        ("diagnostics", (ROOT / "diagnostics/semdiag/mathematics").rglob("[!_]*.py")),
        ("models", (ROOT / "models/semdiag_models/attention").rglob("[!_]*.py")),
    )
)
# Functions of a module that compute no formula of the document, and modules that compute none at all.
HELPERS = {
    "bounds.block_bounds": {"merged"},
    "planes": {"unraveled"},
    "row_statistics": {"finished", "nan_where", "row_statistics", "strip_statistics"},
    "score_strips": {"add_ranks_", "largest_scores", "part_of", "rows_of"},
    "selections": {"allowed_keys", "overlaps", "places_in", "weight_lost", "without_repeats"},
    "spectral_norms": {
        "broadcast", "float64", "log", "log_one_plus", "log_one_plus_inverse", "log_product",
        "log_root_sum_squares", "log_sum",
    },
}  # fmt: skip
WITHOUT_FORMULAS = {"censored", "sampled_intervals"}


def public_functions(module_name: str) -> dict:
    module = importlib.import_module(module_name)
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


@pytest.mark.parametrize("module_name", MATHEMATICS)
def test_functions_and_formulas_name_each_other(module_name):
    short = module_name.removeprefix("semdiag.mathematics.")
    functions = public_functions(module_name)
    without = {name for name, function in functions.items() if "docs/theory.md#" not in function.__doc__}
    assert without == (set(functions) if short in WITHOUT_FORMULAS else HELPERS.get(short, set()))
    for name in set(functions) - without:
        assert re.search(r"Source: .*Deviation: ", functions[name].__doc__, re.DOTALL), name
        assert f"`{name}`" in DOCUMENT, f"docs/theory.md does not name {name}"


def test_the_document_names_nothing_that_is_gone():
    known = {name for module in MATHEMATICS + TRAINER for name in public_functions(module)}
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", DOCUMENT))
    assert named <= known
    for path in re.findall(r"`(semdiag(?:\.\w+)+)`", DOCUMENT):
        importlib.import_module(path)


def test_links_inside_the_document_lead_somewhere():
    assert set(re.findall(r"\]\(#([\w-]+)\)", DOCUMENT)) <= ANCHORS
