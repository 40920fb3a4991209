import json
import shlex
import shutil
from dataclasses import replace

import pytest
import torch

from semdiag.commands.sweep_results import result
from semdiag_files import InputError
from semdiag_models import read_checkpoint, write_checkpoint
from semdiag_models.checkpoint import weights_sha256
from semdiag_models.sweep import (
    AttemptOutcome,
    Order,
    SweepRun,
    epochs_so_far,
    inspect,
    name_run,
    train_order,
)


@pytest.fixture
def run(tiny_model, tiny_training):
    """Call with fields of the training: a run of a sweep."""

    def make(**fields):
        model, training = tiny_model(attention="topk", k=3, dropout=0.1), tiny_training(**fields)
        return SweepRun(name_run(model, training), model, training)

    return make


@pytest.fixture
def trained(tmp_path):
    """Call with a run: its folder, after training it."""

    def train(run, folder="runs"):
        assert train_order(Order((run,), tmp_path / folder, "cpu", {"command": "x"})) == [AttemptOutcome("done")]
        return tmp_path / folder / run.name

    return train


def weights(folder):
    return read_checkpoint(folder / "last.pt").state


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_folder_goes_from_waiting_to_begun_to_done(run, trained, tmp_path):
    assert inspect(tmp_path / "nowhere", run()) == ("waiting", None)
    folder = trained(run(epochs=2))
    assert inspect(folder, run(epochs=2))[0] == "done"
    assert inspect(folder, run(epochs=1))[0] == "done"
    assert inspect(folder, run(epochs=5))[0] == "begun"
    assert inspect(folder, run(epochs=5, until=1e-9))[0] == "done"
    assert epochs_so_far(folder) == 2


def test_a_run_that_goes_on_ends_with_the_same_bits(run, trained):
    in_one_go = trained(run(epochs=4), "one")
    trained(run(epochs=2), "two")
    assert same(weights(in_one_go), weights(trained(run(epochs=4), "two")))


def test_a_finished_run_is_not_touched(run, trained):
    folder = trained(run())
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    trained(run())
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize("size", [0, 1000])
def test_a_folder_half_written_by_a_crash_is_done_anew(run, trained, size):
    whole = weights(trained(run(), "whole"))
    folder = trained(run())
    (folder / "last.pt").write_bytes((folder / "last.pt").read_bytes()[:size])
    (folder / ".last.pt.abcdefgh").write_bytes(b"half")
    assert inspect(folder, run()) == ("waiting", None)
    assert same(weights(trained(run())), whole)
    assert sorted(path.name for path in folder.iterdir()) == ["best.pt", "epoch-0.pt", "history.csv", "last.pt"]


def test_a_folder_without_its_last_snapshot_is_done_anew(run, trained):
    folder = trained(run())
    (folder / "last.pt").unlink()
    assert inspect(folder, run())[0] == "waiting"
    trained(run())
    assert inspect(folder, run())[0] == "done"


def test_a_folder_with_another_run_is_left_alone(run, trained, tmp_path):
    folder = trained(run())
    before = (folder / "last.pt").read_bytes()
    other = run(learning_rate=0.2)
    with pytest.raises(InputError, match="holds a run of another configuration"):
        inspect(folder, other)
    folder = folder.rename(folder.with_name(other.name))
    (outcome,) = train_order(Order((other,), tmp_path / "runs", "cpu", {}))
    assert (outcome.status, outcome.retry) == ("failed", False)
    row = result(other, folder, 0.95)
    assert (row.status, row.epochs) == ("failed", 0)
    assert "another configuration" in row.problem
    assert (folder / "last.pt").read_bytes() == before


def test_a_run_that_diverges_is_recorded_with_its_last_good_epoch(run, tmp_path):
    wild = run(learning_rate=1e30, gradient_clip=1e30)
    (outcome,) = train_order(Order((wild,), tmp_path, "cpu", {}))
    assert (outcome.status, outcome.retry) == ("diverged", False)
    row = result(wild, tmp_path / wild.name, 0.95, outcome)
    assert (row.status, row.epochs) == ("diverged", 0)
    assert "training loss became" in row.problem


def test_an_error_that_may_pass_asks_for_another_attempt(run, tmp_path):
    in_the_way = tmp_path / run().name / "best.pt"
    (in_the_way / "something").mkdir(parents=True)
    (outcome,) = train_order(Order((run(),), tmp_path, "cpu", {}))
    assert (outcome.status, outcome.retry) == ("failed", True)
    shutil.rmtree(in_the_way)
    assert train_order(Order((run(),), tmp_path, "cpu", {})) == [AttemptOutcome("done")]


@pytest.mark.slow
def test_runs_in_one_step_end_as_they_would_alone_and_one_that_diverges_stops_none(run, trained, tmp_path):
    wild = run(seed=9)
    wild = replace(wild, name="wild")
    several = [run(seed=seed) for seed in (1, 2)]
    alone = [trained(one, "alone") for one in several]
    train_order(
        Order((replace(several[0], training=replace(several[0].training, epochs=1)),), tmp_path, "cpu", {})
    )
    order = Order((*several, wild), tmp_path, "cpu", {"command": "x"})
    assert train_order(order) == [AttemptOutcome("done")] * 3  # the first one has begun
    for one, folder in zip(several, alone, strict=True):
        mine, theirs = (read_checkpoint(f / "last.pt") for f in (tmp_path / one.name, folder))
        assert mine.epoch == theirs.epoch
        for name in mine.state:
            torch.testing.assert_close(mine.state[name], theirs.state[name], rtol=0, atol=1e-5)
    diverging = read_checkpoint(tmp_path / "wild" / "last.pt")
    diverging.state["head.bias"].fill_(float("nan"))
    write_checkpoint(tmp_path / "wild" / "last.pt", diverging)
    longer = [replace(one, training=replace(one.training, epochs=5)) for one in (*several, wild)]
    outcomes = train_order(Order(tuple(longer), tmp_path, "cpu", {}))
    assert [outcome.status for outcome in outcomes] == ["done", "done", "diverged"]
    assert [read_checkpoint(tmp_path / one.name / "last.pt").epoch for one in longer] == [5, 5, 3]


def test_a_record_stands_for_a_run_whose_folder_is_gone(run, trained, tmp_path):
    folder, records = trained(run()), tmp_path / "records"
    row = result(run(), folder, 0.95, records=records)
    assert result(run(), folder, 0.95, records=records) == row
    (record,) = records.iterdir()
    content = json.loads(record.read_text())
    assert content["weights"] == weights_sha256(weights(folder))
    assert content["history"]["epoch"] == [1, 2, 3]
    shutil.rmtree(folder)
    again = result(run(), folder, 0.95, records=records)
    assert (again.status, again.epochs, again.train_accuracy) == ("done", 3, pytest.approx(row.train_accuracy))
    assert (
        result(run(epochs=9), folder, 0.95, records=records).status == "waiting"
    )  # it must be trained for longer
    assert result(run(seed=4), folder, 0.95, records=records).status == "waiting"


def test_a_record_grows_with_its_run_and_stands_for_the_longer_one(run, trained, tmp_path):
    records = tmp_path / "records"
    result(run(epochs=2), trained(run(epochs=2)), 0.95, records=records)
    folder = trained(run(epochs=4))
    result(run(epochs=2), folder, 0.95, records=records)
    (record,) = records.iterdir()
    assert json.loads(record.read_text())["history"]["epoch"] == [1, 2, 3, 4]
    assert json.loads(record.read_text())["weights"] == weights_sha256(weights(folder))
    shutil.rmtree(folder)
    assert result(run(epochs=4), folder, 0.95, records=records).status == "done"
    shorter = result(run(epochs=3), folder, 0.95, records=records)
    assert (shorter.status, shorter.epochs, shorter.problem[-17:]) == ("done", 3, "row is of epoch 3")


def test_a_record_tells_no_folder_of_the_machine(run, trained, tmp_path):
    folder, records = trained(run()), tmp_path / "records"
    typed = [
        "semdiag",
        "sweep",
        str(tmp_path / "my grid.toml"),
        f"--out={tmp_path}",
        "--records",
        "kept/here",
        "--jobs=2",
    ]
    checkpoint = read_checkpoint(folder / "last.pt")
    checkpoint.provenance["command"] = shlex.join(typed)
    write_checkpoint(folder / "last.pt", checkpoint)
    result(run(), folder, 0.95, records=records)
    (record,) = records.iterdir()
    told = ["semdiag", "sweep", "my grid.toml", f"--out={tmp_path.name}", "--records", "kept/here", "--jobs=2"]
    assert shlex.split(json.loads(record.read_text())["provenance"]["command"]) == told


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:50],
        lambda text: "[" * 100_000,
        lambda text: text.replace('"semdiag.run/1"', '"other/1"'),
        lambda text: text.replace('"epoch": [1', '"epoch": ["1"'),
        lambda text: text.replace('"epoch": [1, ', '"epoch": ['),
        lambda text: text.replace('"even-pairs"', '"parity"'),
    ],
)
def test_a_damaged_record_is_named_and_nothing_is_trained_over_it(run, trained, tmp_path, damage):
    folder, records = trained(run()), tmp_path / "records"
    result(run(), folder, 0.95, records=records)
    (record,) = records.iterdir()
    record.write_text(damage(record.read_text()))
    row = result(run(), folder, 0.95, records=records)
    assert row.status == "failed"
    assert str(record) in row.problem


def test_the_row_of_a_run_says_what_its_history_says(run, trained):
    folder = trained(run(epochs=3))
    checkpoint = read_checkpoint(folder / "last.pt")
    checkpoint.history["train_accuracy"] = [0.5, 0.97, 0.9]
    checkpoint.history["holdout_accuracy"] = [0.4, 0.8, 0.7]
    checkpoint.history["seconds"] = [1.0, 2.0, 3.5]
    write_checkpoint(folder / "last.pt", checkpoint)
    row = result(run(epochs=3), folder, 0.95)
    assert (row.status, row.task, row.attention, row.k, row.epochs) == ("done", "even-pairs", "topk", 3, 3)
    assert (row.epochs_to_target, row.train_accuracy) == (2, 0.9)
    assert (row.holdout_accuracy, row.best_holdout_accuracy, row.seconds) == (0.7, 0.8, 6.5)
    assert result(run(epochs=3), folder, 0.98).epochs_to_target is None
    first = result(run(epochs=1), folder, 0.95)
    assert (first.status, first.epochs, first.epochs_to_target, first.train_accuracy) == ("done", 1, None, 0.5)
    assert first.problem == "was trained to epoch 3 before; this row is of epoch 1"
