"""The names of columns that the terminal shows are those of the CSV whose rows it shows."""

from importlib import import_module

import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.tables import Column
from semdiag.questions import registry

pytestmark = pytest.mark.usefixtures("few_resamples")

# Question and declaration; the CSV files that hold the rows; names that the terminal adds to them.
SHOWN = [
    ("bounds", "answer:_SLOPES", ("parameters",), set()),
    ("compare", "answer:_SHOWN", ("compare",), set()),
    ("convergence", "answer:_RUNS", ("runs", "speed_ups"), set()),
    ("convergence", "answer:_SEEDS", ("over_seeds",), set()),
    ("k-sweep", "answer:_RERUN", ("k_sweep_rerun",), {"growth", "name", "random"}),
    ("landscape", "answer:_COLUMNS", ("landscape_planes",), set()),
    ("mask-precision", "answer:_SHOWN", ("mask_precision",), set()),
    ("mask-stability", "answer:_SHOWN_COLUMNS", ("mask_stability",), {"noise"}),
    ("overlap", "answer:_COLUMNS_SHOWN", ("overlap",), set()),
    ("retrieval", "answer:_COLUMNS", ("retrieval",), set()),
    ("retrieval", "answer:_TILES", ("tiles",), set()),
]


@pytest.fixture(scope="module")
def everything(make_everything):
    """Findings on measurements that have every table; nobody may change them."""
    return Findings(make_everything())


@pytest.mark.parametrize(("name", "declaration", "files", "added"), SHOWN)
def test_a_declared_column_has_the_name_that_its_csv_has(everything, name, declaration, files, added):
    question = registry.QUESTIONS[name]
    tables = question.answered(everything).tables
    written = {column for file in files for column in tables[file].columns}
    module, _, variable = declaration.partition(":")
    columns = getattr(import_module(f"{question.package}.{module}"), variable)
    assert all(isinstance(column, Column) for column in columns)
    shown = {entry for column in columns for entry in column.name.split()}
    assert shown
    assert shown - written == added
