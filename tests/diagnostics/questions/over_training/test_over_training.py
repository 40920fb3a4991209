"""Numbers along training, from the snapshots in a run's folder."""

import math
import shutil

import pytest
import torch
import torch.nn.functional as F

from semdiag.capturing.loading import load
from semdiag.measuring.conditions import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions.over_training.measure import measure_along, snapshots_of


@pytest.fixture(scope="module")
def along(tiny_runs):
    return measure_along(load(tiny_runs.topk), Conditions(samples=10, dtype="float64"))


def value(table, epoch, quantity, statistic, layer=-1):
    rows = table[(table["epoch"] == epoch) & (table["layer"] == layer)]
    return rows.set_index(["quantity", "statistic"])["value"][quantity, statistic]


def test_snapshots_come_in_the_order_of_their_epochs_and_the_last_once(tiny_runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny_runs.full, run)
    for epoch in (10, 2, 9):
        shutil.copy(run / "epoch-0.pt", run / f"epoch-{epoch}.pt")
    names = [path.name for path in snapshots_of(load(run))]
    assert names == ["epoch-0.pt", "epoch-9.pt", "epoch-10.pt", "last.pt"]  # the run has 2 epochs: epoch-2 is last
    assert [path.name for path in snapshots_of(load(run / "best.pt"))] == ["best.pt"]


def test_every_snapshot_layer_and_number_is_there(along, tiny_runs):
    assert along["epoch"].unique().tolist() == [0, tiny_runs.epochs]
    assert sorted(along["layer"].unique()) == [-1, 0, 1]
    assert len(along) == 2 * 3 * 13
    assert along["value"].notna().all()


def test_dispersion_is_that_of_the_snapshot_itself(along, tiny_runs):
    first = survey([tiny_runs.topk / "epoch-0.pt"], Conditions(samples=10, dtype="float64"))
    assert value(along, 0, "dispersion", "p50") == pytest.approx(first.queries["dispersion"].median())


def test_the_gradient_share_is_that_of_autograd(along, tiny_runs):
    model = load(tiny_runs.topk / "last.pt")
    tokens, labels, _ = model.default_inputs(10, 0)
    encoder = model.encoder.double()
    F.cross_entropy(encoder(tokens), labels).backward()
    squared = {name: p.grad.square() for name, p in encoder.named_parameters()}
    chosen = sum(float(g[: 2 * len(g) // 3].sum()) for name, g in squared.items() if ".qkv." in name)
    share = chosen / sum(float(g.sum()) for g in squared.values())
    assert value(along, tiny_runs.epochs, "query_key_gradient", "share") == pytest.approx(share, rel=1e-6)


def test_a_local_constant_never_exceeds_one_half_and_gamma_is_the_largest_layer(along):
    assert (along.loc[along["quantity"] == "xi_local", "value"] <= 0.5).all()
    layers = [value(along, 0, "gamma", "max", layer) for layer in (0, 1)]
    assert value(along, 0, "gamma", "max") == max(layers) > 0
    assert math.isfinite(value(along, 0, "response", "mean"))
    assert torch.is_grad_enabled()
