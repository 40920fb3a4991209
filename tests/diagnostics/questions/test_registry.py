"""The registry: every question with what a report asks of it, every figure reached."""

import inspect
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import semdiag.questions as package
from semdiag.commands.check import CHECK
from semdiag.commands.main import REPORT, app
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions
from semdiag.measuring.plan import Plan
from semdiag.presenting import options
from semdiag.presenting.answer import Claim
from semdiag.presenting.drawing.style import Drawing
from semdiag.presenting.question import PANELS
from semdiag.questions import registry

pytestmark = pytest.mark.usefixtures("few_resamples")

FOLDER = Path(package.__path__[0])
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
WITHOUT_TABLES = [name for name, q in registry.reported().items() if not q.needs]  # drawn from every measurement
SHOWN = [
    pytest.param(drawing, id=f"{name}-{external}-{drawing.name}")
    for name, question in registry.reported().items()
    for external in (False, True)
    for heading in question.headings_for(external)
    for drawing in heading.figures
]


def drawn():
    """Each figure, by the file that draws it."""
    files = [path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.py") if path.stem != "__init__"]
    modules = [import_module(".".join((package.__name__, *file.parts))) for file in files]
    return [
        each
        for module in modules
        for _, each in inspect.getmembers(module, lambda one: isinstance(one, Drawing))
        if each.__module__ == module.__name__
    ]


@pytest.fixture(scope="module")
def everything(make_everything):
    """Findings on measurements that have every table; nobody may change them."""
    return Findings(make_everything())


@pytest.mark.parametrize("name", NAMES)
def test_every_folder_holds_a_question_whose_parts_are_there(name):
    question = registry.QUESTIONS[import_module(f"{package.__name__}.{name}").QUESTION.name]
    if question.answer is None:  # it is asked of files, or of one text, and has a page of its own
        assert question.ask is not None
        assert question.plan is None or not issubclass(question.plan, Plan)
        assert not question.headings
        return
    assert question.headings
    if question.plan is not None and issubclass(question.plan, Plan):
        assert question.plan in registry.plans()


def test_every_question_stands_under_its_name():
    assert set(registry.QUESTIONS) - set(registry.reported()) == {"indexer", "selections", "look"}
    assert all(question.name == name for name, question in registry.QUESTIONS.items())


@pytest.mark.parametrize("external", [False, True])
def test_no_two_figures_of_a_report_share_a_name_or_files(external):
    figures = [d for q in registry.reported().values() for h in q.headings_for(external) for d in h.figures]
    assert len({figure.name for figure in figures}) == len({*figures})
    assert all(name == draw.__name__ for name, draw in registry.figures().items())


def test_every_figure_is_reached_by_a_question():
    assert {figure.name for figure in drawn()} == set(registry.figures())


def test_anchors_are_unique_in_a_page():
    for external in (False, True):
        anchors = [h.anchor for question in registry.reported().values() for h in question.headings_for(external)]
        assert len(set(anchors)) == len(anchors)
        assert "measured" not in anchors  # the last section of every page


@pytest.mark.parametrize("drawing", SHOWN)
def test_every_figure_is_described_and_read(drawing):
    assert drawing.alt.endswith(": {shown}.")
    assert len(drawing.alt) > 60, f"say what {drawing.name} draws, in a sentence of more than 60 characters"
    assert drawing.reading.endswith(".")
    assert len(drawing.reading) > 60, f"say how to read {drawing.name}, in more than 60 characters"


def test_every_heading_says_what_it_does_not_cover():
    for question in registry.reported().values():
        for heading in (*question.headings, *question.headings_for(True)):
            assert heading.title.endswith("?")
            assert heading.caveats
            assert all(caveat.endswith(".") for caveat in heading.caveats)


@pytest.mark.slow
def test_tables_have_names_of_their_own(everything):
    found = {name: question.answered(everything).tables for name, question in registry.reported().items()}
    names = [name for tables in found.values() for name in tables]
    assert len(set(names)) == len(names)
    assert [name for name, tables in found.items() if not tables] == ["learning"]
    assert not [name for tables in found.values() for name, table in tables.items() if table.empty]


@pytest.mark.slow
def test_alone_a_question_has_the_same_tables(everything):
    for question in registry.reported().values():
        answer = question.answered(everything)
        assert set(answer.tables_alone) <= set(answer.tables)


@pytest.mark.slow
def test_every_question_applies_where_everything_was_measured(everything):
    assert all(question.applies(everything) for question in registry.reported().values())


@pytest.mark.parametrize("name", registry.reported())
def test_a_question_applies_only_where_its_tables_have_rows(name, everything, model):
    question = registry.reported()[name]
    assert question.applies(Findings(model("full"))) == (name in WITHOUT_TABLES)
    measurements = everything.measurements
    empty = {table: getattr(measurements, table).iloc[:0] for table in question.needs}
    assert question.applies(Findings(measurements.replace(**empty))) == (name in WITHOUT_TABLES)
    for table in question.needs:  # one of them is enough
        others = {other: rows for other, rows in empty.items() if other != table}
        assert question.applies(Findings(measurements.replace(**others)))


@pytest.mark.parametrize("name", registry.reported())
def test_of_external_models_it_applies_only_with_headings_for_them(name, everything):
    measurements = everything.measurements
    foreign = measurements.replace(models=measurements.models.assign(source="factory"))
    question = registry.reported()[name]
    assert question.applies(Findings(foreign)) == bool(question.headings_for(True)) == question.external
    mixed = measurements.models.copy()
    mixed.loc[0, "source"] = "factory"
    assert question.applies(Findings(measurements.replace(models=mixed)))


@pytest.mark.parametrize("question", [*registry.QUESTIONS.values(), REPORT, CHECK], ids=lambda one: one.name)
def test_no_name_in_a_record_is_stale(question):
    shared = {*options.of_plan(options.Shared)}
    assert {*question.takes, *question.leave_out} <= shared
    assert {*question.defaults} <= shared | {*options.of_plan(question.plan)}
    assert {*question.conditions} <= {field.name for field in fields(Conditions)}
    assert {*question.needs} <= {*registry.tables()}
    assert question.panel in PANELS
    anchors = [heading.anchor for external in (False, True) for heading in question.headings_for(external)]
    assert question.tile_anchor in ("", *anchors)


def test_every_command_stands_in_a_group_of_the_help():
    assert {command.rich_help_panel for command in app.registered_commands} == {*PANELS}


@pytest.mark.slow
def test_no_two_claims_of_a_question_about_a_subject_have_one_id(everything):
    for name, question in registry.reported().items():
        answer = question.answered(everything)
        claims = [each for each in (*answer.headline, *(answer.details or ())) if isinstance(each, Claim)]
        keys = [claim.key for claim in claims]
        assert len(keys) == len(set(keys)), name
        if answer.glance is not None and answer.glance.claim_id:
            assert answer.glance.claim_id in {claim.id for claim in answer.headline} or not answer.headline
