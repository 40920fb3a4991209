"""The contract of plans: what each declares is what it returns, of our encoders and of external models."""

import dataclasses

import pandas as pd
import pytest
import torch
from torch import nn

import semdiag
from semdiag.capturing.batches import split
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.measure import Conditions
from semdiag.measuring.plan import Plan
from semdiag.measuring.subject import Subject
from semdiag.measuring.survey import survey
from semdiag.measuring.table import TABLES, column_types
from semdiag.questions.bounds.measure import BoundsPlan
from semdiag.questions.dispersion.measure import InitialisationPlan
from semdiag.questions.k_sweep.measure import KSweepPlan
from semdiag.questions.landscape.measure import LandscapePlan
from semdiag.questions.lipschitz.measure import LipschitzPlan
from semdiag.questions.mask_precision.measure import PrecisionPlan
from semdiag.questions.mask_stability.measure import NoisePlan, noise_tables
from semdiag.questions.overlap.measure import key_overlaps
from semdiag.questions.registry import plans as every_plan
from semdiag.questions.registry import tables as declared_tables
from semdiag.questions.retrieval import RetrievalPlan
from semdiag.questions.stability.measure import SecantsPlan
from semdiag_files import InputError

CHEAP = {
    NoisePlan: NoisePlan((0.1,), draws=2, k=3),
    PrecisionPlan: PrecisionPlan(("fp8-e5m2",), k=3),
    KSweepPlan: KSweepPlan(3),
    LandscapePlan: LandscapePlan(grid=3),
    LipschitzPlan: LipschitzPlan(5, 2, 2, 5),
}
# Retrieval needs a tokenizer and a language head, which no model here has: test_retrieval.py.
FEW = {plan: CHEAP.get(plan) or plan() for plan in every_plan() if plan is not RetrievalPlan}
ON_REQUEST = {
    "sweep_estimates",
    "rerun",
    "rerun_lengths",
    "budgets",
}  # with rows only of drawn queries, and of models run again
SAMPLES = 5


class Decoder(nn.Module):
    """A causal attention with an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.qkv, self.out = nn.Embedding(5, 8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, tokens):
        q, k, v = self.qkv(self.embedding(tokens)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Blind(nn.Module):
    """An attention without an embedding, so that no noise can enter."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.fixture
def decoder():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Decoder().eval()
        tokens = torch.randint(5, (SAMPLES, 7))
    return LoadedModel("own:decoder", "", model, "factory", "unknown", batches=tokens)


@pytest.fixture
def blind():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Blind().eval(), torch.randn(SAMPLES, 6, 8)
    return LoadedModel("own:blind", "", model, "factory", "unknown", batches=x)


def subject_of(model, **fields):
    """The model under survey, with its own inputs."""
    if model.external:
        batches, labels = split(model.batches, 3), None
    else:
        tokens, labels, _ = model.default_inputs(SAMPLES, 0)
        batches = split(tokens, 3)
    return Subject(model, batches, labels, 0, 3, torch.device("cpu"), torch.float32, **fields)


def assert_declared(plan, tables, model):
    """Tables under their declared names, with their declared columns."""
    declared = {table.name: table for table in plan.tables()}
    assert set(tables) <= set(declared)
    for name, table in tables.items():
        assert isinstance(table, pd.DataFrame)
        assert column_types(table) == declared[name].columns
        assert list(table) == list(declared[name].columns)
        assert set(table["model"]) <= {model.path}


@pytest.fixture(params=FEW, ids=lambda kind: kind.__name__)
def plan(request):
    """Every plan in turn."""
    return FEW[request.param]


def test_a_plan_is_a_frozen_dataclass_that_needs_nothing_said(plan):
    kind = type(plan)
    assert isinstance(plan, Plan)
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert kind in every_plan()
    assert kind() == kind()
    assert hash(kind()) == hash(kind())
    Conditions(plans=(kind(),))


def test_a_plan_declares_its_tables(plan):
    assert plan.name
    assert plan.tables()
    for table in plan.tables():
        assert declared_tables()[table.name] is table
        assert next(iter(table.columns)) == "model"
        assert table.about.endswith(".")


def test_names_of_tables_and_plans_are_unique():
    names = [table.name for plan in every_plan() for table in plan.tables()]
    assert len(set(names)) == len(names)
    assert not set(names) & set(TABLES)
    assert len({plan.name for plan in every_plan()}) == len(every_plan())
    assert [table.name for table in declared_tables().values()] == list(declared_tables())


@pytest.mark.parametrize("which", [0, 1], ids=["full", "topk"])
def test_what_is_declared_is_what_an_encoder_gives(plan, tiny_models, which):
    subject = subject_of(tiny_models[which])
    tables = plan.measure(subject)
    assert set(tables) == {table.name for table in plan.tables()}
    assert_declared(plan, tables, tiny_models[which])
    assert {name for name, table in tables.items() if not len(table)} <= ON_REQUEST
    assert subject.unavailable == {}


@pytest.mark.slow
def test_a_random_mask_has_every_table_even_where_it_has_no_rows(plan, tiny_models, wild_encoder):
    model = dataclasses.replace(tiny_models[0], module=wild_encoder("random").float())
    tables = plan.measure(subject_of(model))
    assert set(tables) == {table.name for table in plan.tables()}
    assert_declared(plan, tables, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "blind"])
def test_an_external_model_has_tables_or_a_reason_why_not(plan, name, request):
    model = request.getfixturevalue(name)
    subject = subject_of(model)
    try:
        tables = plan.measure(subject)
    except NotAvailableError:
        tables = {}
    assert_declared(plan, tables, model)
    found = survey([model], Conditions(plans=(plan,)))
    rows = {table.name: len(found[table]) for table in plan.tables()}
    said = found.remarks["text"].str.startswith(f"{plan.name} not available, because ")
    silent = type(plan) is InitialisationPlan  # of which nobody asks, and which only runs have
    assert any(rows.values()) or said.any() or silent
    assert rows == {table.name: len(tables.get(table.name, ())) for table in plan.tables()}


@pytest.mark.slow
def test_which_probes_know_what_to_do_with_external_models(decoder, blind):
    asked = (SecantsPlan, BoundsPlan, NoisePlan, KSweepPlan, LandscapePlan, LipschitzPlan)

    def of(model):
        found = survey([model], Conditions(plans=tuple(FEW[plan] for plan in asked)))
        assert set(found.remarks["model"]) == {model.path}
        tables = {name for name in declared_tables() if name in found}
        tables -= {"calls", "heads", "remarks", "skipped"}
        said = found.remarks["text"].str.extract(r"^(.+) not available, because (.+)$").dropna()
        return tables, dict(said.itertuples(index=False))

    tables, reasons = of(decoder)
    assert tables == {"secants", "gains", "masks", "sweep"}
    assert set(reasons) == {"bounds", "loss surface", "Lipschitz estimates"}
    assert reasons["loss surface"] == "its loss is not known"
    tables, reasons = of(blind)
    assert tables == {"sweep"}
    assert set(reasons) == {"secants", "bounds", "mask stability", "loss surface", "Lipschitz estimates"}
    assert reasons["mask stability"].startswith("it has no token embedding")


@pytest.mark.slow
def test_every_table_of_a_probe_is_given_by_some_model(plan, tiny_models, decoder):
    given = set()
    for model in (tiny_models[1], decoder):
        found = survey([model], Conditions(samples=SAMPLES, plans=(plan,)))
        given |= {table.name for table in plan.tables() if len(found[table])}
    assert given == {table.name for table in plan.tables()} - ON_REQUEST


def test_finished_steps_are_as_many_as_were_announced(plan, tiny_models, recorder):
    plan.measure(subject_of(tiny_models[1], progress=recorder))
    steps = recorder.expected[-1] if recorder.expected else plan.steps()
    assert sum(recorder.advanced) == steps


@pytest.mark.slow
def test_the_progress_bar_of_a_survey_fills_and_external_models_have_no_steps(tiny_models, decoder, recorder):
    conditions = Conditions(samples=SAMPLES, plans=tuple(FEW.values()))
    survey([tiny_models[1], decoder], conditions, recorder)
    announced = sum(steps for _, steps in recorder.stages)
    assert announced == SAMPLES + sum(plan.steps() for plan in FEW.values()) + SAMPLES
    assert sum(recorder.advanced) == announced + sum(recorder.expected)


@pytest.mark.slow
def test_what_is_recorded_stands_in_the_provenance(plan, tiny_models):
    plain = survey([tiny_models[1]], Conditions(samples=SAMPLES)).provenance
    found = survey([tiny_models[1]], Conditions(samples=SAMPLES, plans=(plan,))).provenance
    assert found == {**plain, **plan.provenance(SAMPLES, SAMPLES)}


def test_of_what_was_not_measured_nothing_is_recorded(blind):
    found = survey([blind], Conditions(plans=(FEW[SecantsPlan], FEW[LipschitzPlan])))
    assert not {"noise", "noise_samples", "lipschitz_samples"} & set(found.provenance)


def test_few_samples_are_those_of_the_costly_probes(tiny_models):
    few = Conditions(samples=SAMPLES, probe_samples=2, plans=(FEW[NoisePlan], FEW[KSweepPlan]))
    found = survey([tiny_models[1]], few)
    assert set(found.masks["sample"]) == {0, 1}
    assert found.queries["sample"].nunique() == SAMPLES
    assert found.provenance["probe_samples"] == 2


@pytest.mark.parametrize("few", [None, 2, SAMPLES, 100])
def test_the_first_inputs_and_their_labels(few, tiny_models, decoder):
    tokens, labels = subject_of(tiny_models[0], probe_samples=few).first
    assert len(tokens) == len(labels) == min(few or SAMPLES, SAMPLES)
    assert torch.equal(tokens, tiny_models[0].default_inputs(SAMPLES, 0)[0][:few])
    batches, unknown = subject_of(decoder, probe_samples=few).first
    assert unknown is None
    assert torch.equal(torch.cat([*batches]), decoder.batches[:few])


def test_measuring_leaves_the_model_as_it_was(plan, wild_encoder, tiny_models, untouched):
    encoder = wild_encoder("topk").float().train()
    check = untouched(encoder)
    plan.measure(subject_of(dataclasses.replace(tiny_models[0], module=encoder)))
    check()


def test_a_plan_says_the_same_twice(plan, tiny_models):
    one, again = (plan.measure(subject_of(tiny_models[0])) for _ in range(2))
    for name, table in one.items():
        pd.testing.assert_frame_equal(table, again[name])


@pytest.mark.parametrize("function", [noise_tables, key_overlaps])
def test_another_plan_is_refused_by_name(function, tiny_models):
    with pytest.raises(InputError, match=r"^The plan must be a \w+Plan\. Got BoundsPlan"):
        function(tiny_models[0], torch.zeros(1, 4, dtype=torch.int64), plan=BoundsPlan())


def test_what_is_no_module_cannot_be_captured():
    refused = pytest.raises(InputError, match=r"^A capture watches a torch\.nn\.Module\. Got int\.$")
    with refused, semdiag.capture(3):
        pass
