"""The registry: every section with what a report asks of it, every figure reached."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import semdiag.questions as package
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.probe import probes
from semdiag.questions import registry

pytestmark = pytest.mark.usefixtures("few_resamples")

FOLDER = Path(package.__path__[0])
FOLDERS = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
DRAWN = {  # each public function of a file of figures that draws findings
    name: path.parent.name
    for path in FOLDER.glob("*/figures.py")
    for name in re.findall(r"\ndef ([a-z]\w*)\(findings: Findings\) -> Figure:", path.read_text(encoding="utf-8"))
}
WITHOUT_TABLES = ("dispersion", "heads", "separation", "learning")  # drawn from what every measurement has
SHOWN = [
    pytest.param(shown, id=f"{section.name}-{kind}-{shown.figure}")
    for section in registry.all_sections().values()
    for kind in ("headings", "external")
    for heading in getattr(section, kind)
    for shown in heading.figures
]


@pytest.fixture(scope="module")
def everything(make_everything):
    """Findings on measurements that have every table; nobody may change them."""
    return Findings(make_everything())


@pytest.mark.parametrize("name", FOLDERS)
def test_every_folder_holds_a_question_whose_parts_are_there(name):
    question = import_module(f"{package.__name__}.{name}").QUESTION
    assert registry.QUESTIONS[question.name] is question
    if question.section is None:  # it is asked of files, or of one text, and has a page of its own
        assert question.command is not None
        assert question.summary is question.probe is None
        return
    assert question.section.name == question.name
    assert bool(question.command) == bool(question.summary)
    if question.probe is not None:
        assert question.probe.plan in probes()


def test_every_question_stands_under_its_name_and_has_headings():
    assert len(registry.QUESTIONS) == len(FOLDERS)
    assert set(registry.QUESTIONS) - set(registry.all_sections()) == {"selections", "look"}
    for name, question in registry.QUESTIONS.items():
        assert question.name == name
        assert question.section is None or question.section.headings


def test_no_two_figures_of_a_report_share_a_name_or_files():
    for kind in ("headings", "external"):
        drawn = [
            shown
            for s in registry.all_sections().values()
            for heading in getattr(s, kind)
            for shown in heading.figures
        ]
        assert len({shown.figure for shown in drawn}) == len(drawn)
    assert all(name == draw.__name__ for name, draw in registry.figures().items())
    assert len(set(registry.figures().values())) == len(registry.figures())


def test_a_figure_that_external_models_share_is_the_same_one():
    for param in SHOWN:
        (shown,) = param.values
        assert registry.figures()[shown.figure] is shown.draw


def test_every_figure_is_reached_by_a_section():
    assert set(registry.figures()) == set(DRAWN)
    for name, draw in registry.figures().items():
        assert draw.__module__ == f"{package.__name__}.{DRAWN[name]}.figures"


def test_anchors_are_unique_in_a_page():
    for kind in ("headings", "external"):
        anchors = [
            heading.anchor for section in registry.all_sections().values() for heading in getattr(section, kind)
        ]
        assert len(set(anchors)) == len(anchors)
        assert "measured" not in anchors  # the last section of every page


@pytest.mark.parametrize("shown", SHOWN)
def test_every_figure_is_described_and_read(shown):
    assert shown.alt.endswith(": {shown}.")
    assert len(shown.alt) > 60, f"say what {shown} draws, in a sentence of more than 60 characters"
    assert shown.reading.endswith(".")
    assert len(shown.reading) > 60, f"say how to read {shown}, in more than 60 characters"


def test_every_heading_says_what_it_does_not_cover():
    for section in registry.all_sections().values():
        for heading in (*section.headings, *section.external):
            assert heading.title.endswith("?")
            assert heading.caveats
            assert all(caveat.endswith(".") for caveat in heading.caveats)


def test_tables_have_names_of_their_own(everything):
    found = {name: section.tables(everything, False) for name, section in registry.all_sections().items()}
    names = [name for tables in found.values() for name in tables]
    assert len(set(names)) == len(names)
    assert [section for section, tables in found.items() if not tables] == ["learning"]
    assert not [name for tables in found.values() for name, table in tables.items() if table.empty]


def test_alone_a_section_has_the_same_tables(everything):
    for section in registry.all_sections().values():
        assert set(section.tables(everything, True)) == set(section.tables(everything, False))


def test_every_section_applies_where_everything_was_measured(everything):
    assert all(section.applies(everything) for section in registry.all_sections().values())


@pytest.mark.parametrize("name", registry.all_sections())
def test_a_section_applies_only_where_its_tables_have_rows(name, everything, model):
    section = registry.all_sections()[name]
    assert section.applies(Findings(model("full"))) == (name in WITHOUT_TABLES)
    measurements = everything.measurements
    empty = {table: getattr(measurements, table).iloc[:0] for table in section.needs}
    if name == "within":
        empty = {"queries": measurements.queries.drop(columns=["dispersion_k3", "separation_k3", "mass_k3"])}
    assert section.applies(Findings(measurements.replace(**empty))) == (name in WITHOUT_TABLES)
    for table in section.needs:  # one of them is enough
        others = {other: rows for other, rows in empty.items() if other != table}
        assert section.applies(Findings(measurements.replace(**others)))


@pytest.mark.parametrize("name", registry.all_sections())
def test_of_external_models_it_applies_only_with_questions_for_them(name, everything):
    measurements = everything.measurements
    foreign = measurements.replace(models=measurements.models.assign(source="factory"))
    section = registry.all_sections()[name]
    assert section.applies(Findings(foreign)) == bool(section.external)
    assert section.applicable_headings(Findings(foreign)) == section.external
    mixed = measurements.models.copy()
    mixed.loc[0, "source"] = "factory"
    assert section.applicable_headings(Findings(measurements.replace(models=mixed))) == section.headings
