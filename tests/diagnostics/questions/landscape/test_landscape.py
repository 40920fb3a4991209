"""Landscapes: every cell is a model that was run, and the model it is about stays as it was."""

import copy
import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

import semdiag
from semdiag.mathematics.planes import random_plane
from semdiag.measuring.encoders.weights import MovableEncoder
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions, measure
from semdiag.measuring.survey import survey
from semdiag.questions.landscape.answer import landscape_claims, landscape_facts, working_distance
from semdiag.questions.landscape.measure import LandscapePlan, landscape_table
from semdiag_files import InputError

FEW = LandscapePlan(grid=5, radius=0.5)


@pytest.fixture
def inputs(tiny_models):
    tokens, labels, _ = tiny_models[0].default_inputs(30, 0)
    return tokens, labels


def state(encoder):
    generators = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002  # the global one is what is watched
    flags = torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in encoder.modules()]
    modes = [m.training for m in encoder.modules()], [p.requires_grad for p in encoder.parameters()]
    return [p.clone() for p in encoder.parameters()], generators, (flags, hooks, modes)


def assert_same(before, after):
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert torch.equal(before[1][0], after[1][0])
    assert (before[1][1] == after[1][1]).all()
    assert before[2] == after[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "plan", "name"),
    [
        (semdiag.landscape, LandscapePlan(grid=3), "landscape"),
        (semdiag.lipschitz, semdiag.LipschitzPlan(planes=2, directions=2, draws=5), "loss_secants"),
        (semdiag.k_sweep, semdiag.KSweepPlan(), "sweep"),
        (semdiag.mask_stability, semdiag.NoisePlan(), "masks"),
    ],
    ids=["landscape", "lipschitz", "k_sweep", "mask_stability"],
)
def test_python_and_the_commands_give_the_same_numbers(tiny_models, ask, plan, name):
    """Of one checkpoint, its inputs and a seed: also in which precision it runs is the same rule."""
    model = tiny_models[0]
    tokens, labels, _ = model.default_inputs(20, 1)
    by_command = survey([model], Conditions(samples=20, seed=1, device="cpu", plans=(plan,)))
    found = ask(model, tokens, labels, plan, seed=1)
    assert found.provenance["dtype"] == by_command.provenance["dtype"] == "float64"
    pd.testing.assert_frame_equal(getattr(found, name), getattr(by_command, name), check_exact=True)
    pd.testing.assert_frame_equal(found.queries, by_command.queries, check_exact=True)
    single = ask(model, tokens, labels, plan, seed=1, dtype=torch.float32)
    assert single.provenance["dtype"] == "float32"


def test_a_loss_that_float32_cannot_hold_is_no_zero(tiny_models, inputs):
    """Of logits in float32 the loss is worked out in float64: far below its resolution around 1, too."""
    moved = MovableEncoder(tiny_models[0].encoder)
    moved.encoder.head.weight.data.zero_()
    moved.encoder.head.bias.data.copy_(torch.tensor([30.0, 0.0]))
    loss, accuracy = moved.loss_and_accuracy(inputs[0], torch.zeros_like(inputs[1]))
    assert (loss, accuracy) == (pytest.approx(math.exp(-30), rel=1e-3), 1.0)


@pytest.mark.parametrize("kind", [0, 1], ids=["full", "topk"])
def test_every_cell_is_the_loss_of_that_very_model(tiny_models, inputs, kind):
    model = tiny_models[kind]
    table = landscape_table(model, *inputs, plan=FEW, seed=3, dtype=torch.float64)
    grid = table[table["place"] == "grid"]
    assert len(grid) == 25
    far = grid[(grid["x"] != 0) | (grid["y"] != 0)]
    naive = copy.deepcopy(model.module).double().eval()
    vector = torch.nn.utils.parameters_to_vector(naive.parameters()).detach()
    length = float(vector.norm())
    np.testing.assert_allclose(far["distance"], length * np.hypot(far["x"], far["y"]), rtol=1e-9)
    plane = random_plane(vector, MovableEncoder(model.module).slices(), torch.Generator().manual_seed(3))
    for row in grid.to_dict("records")[::4]:
        torch.nn.utils.vector_to_parameters(plane.point(row["x"], row["y"]), naive.parameters())
        with torch.no_grad():
            logits = naive(inputs[0])
        assert row["loss"] == pytest.approx(float(F.cross_entropy(logits, inputs[1])), rel=1e-9)
        assert row["accuracy"] == pytest.approx(float((logits.argmax(1) == inputs[1]).double().mean()))


def test_the_checkpoint_is_a_cell(tiny_models, inputs):
    table = landscape_table(tiny_models[0], *inputs, plan=LandscapePlan(grid=3, planes=2))
    assert table.groupby("plane").size().tolist() == [10, 10]
    for _, rows in table.groupby("plane"):
        here = rows[(rows["x"] == 0) & (rows["y"] == 0)]
        assert sorted(here["place"]) == ["checkpoint", "grid"]
        assert here["loss"].nunique() == 1
        assert (here["distance"] == 0).all()


@pytest.mark.slow
def test_the_seed_decides(tiny_models, inputs):
    one, again, other = (landscape_table(tiny_models[1], *inputs, plan=FEW, seed=s) for s in (0, 0, 1))
    pd.testing.assert_frame_equal(one, again)
    assert not one["loss"].equals(other["loss"])


@pytest.mark.parametrize("stop", [None, KeyboardInterrupt, RuntimeError])
def test_the_model_and_the_world_stay_as_they_were(tiny_models, inputs, stop):
    model = tiny_models[1]
    model.module.train()
    before, points = state(model.module), []

    def after_point(count):
        points.append(count)
        if stop is not None and len(points) == 7:
            raise stop

    plan = LandscapePlan(grid=3)
    if stop is None:
        landscape_table(model, *inputs, plan=plan, after_point=after_point)
        assert sum(points) == plan.steps()
    else:
        with pytest.raises(stop):
            landscape_table(model, *inputs, plan=plan, after_point=after_point)
    assert_same(before, state(model.module))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"planes": 0}, "planes must be at least 1"),
        ({"radius": 0.0}, "radius must be a positive number"),
        ({"radius": math.inf}, "radius must be a positive number"),
        ({"grid": 4}, "grid must be an odd number"),
        ({"grid": 1}, "grid must be an odd number"),
    ],
)
def test_wrong_options_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        LandscapePlan(**values)


def test_the_loss_needs_labels(tiny_models, inputs):
    with pytest.raises(InputError, match="has no labels"):
        landscape_table(tiny_models[0], inputs[0], plan=FEW)
    with pytest.raises(InputError, match="There is nothing to measure"):
        landscape_table(tiny_models[0], inputs[0][:0], inputs[1][:0], plan=FEW)


def test_working_distance_by_hand():
    cells = pd.DataFrame([(0, 0, 1.0), (1, 0, 0.96), (0, 2, 0.5), (3, 0, 1.0)], columns=["x", "y", "accuracy"])
    assert working_distance(cells) == 1.0
    assert math.isnan(working_distance(cells.assign(accuracy=0.5)))
    assert working_distance(cells.assign(accuracy=1.0)) == 3.0


def test_facts_of_a_plane(tiny_models, inputs):
    found = measure(tiny_models[0], inputs[0])
    table = landscape_table(tiny_models[0], *inputs, plan=FEW)
    table.loc[3, "loss"] = math.inf
    facts = landscape_facts(Findings(found.replace(landscape=table))).iloc[0]
    assert (facts["cells"], facts["samples"], facts["not_finite"]) == (25, 30, 1)
    finite = table["loss"][1:][np.isfinite(table["loss"][1:])]
    assert (facts["lowest_loss"], facts["highest_loss"]) == (finite.min(), finite.max())


@pytest.mark.parametrize(("planes", "said"), [(1, ", one random plane ("), (11, ", 11 random planes (")])
def test_planes_are_counted_in_words(tiny_models, inputs, planes, said):
    found = measure(tiny_models[0], inputs[0])
    table = landscape_table(tiny_models[0], *inputs, plan=LandscapePlan(planes=planes, grid=3))
    (claim,) = landscape_claims(Findings(found.replace(landscape=table)))
    assert said in claim.sentence


@pytest.mark.parametrize("label", [7, -1, -100])
@pytest.mark.parametrize("ask", [semdiag.landscape, semdiag.lipschitz])
def test_labels_that_are_no_classes_of_the_model_are_refused(tiny_models, inputs, ask, label):
    tokens, labels = inputs
    labels = labels.clone()
    labels[3] = label
    with pytest.raises(InputError, match=f"Labels must be classes of the model, 0 to 1. Got {label}"):
        ask(tiny_models[0], tokens, labels)
