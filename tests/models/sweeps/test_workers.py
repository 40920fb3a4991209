import os
import shutil
import signal
import threading
import time

import pytest

from semdiag.commands.sweep_results import result
from semdiag_files.workers import LocalWorkers, cores
from semdiag_models import read_checkpoint
from semdiag_models.sweep import Order, SweepRun, epochs_so_far, name_run, together, train_all, train_order

pytestmark = pytest.mark.slow


@pytest.fixture
def orders(tmp_path, tiny_model, tiny_training):
    """Call with seeds and fields of the training: one order a seed."""

    def make(seeds, **fields):
        runs = []
        for seed in seeds:
            model, training = tiny_model(), tiny_training(seed=seed, **fields)
            runs.append(SweepRun(name_run(model, training), model, training))
        return [Order((run,), tmp_path, "cpu", {}) for run in runs]

    return make


def ended(events):
    return {run.training.seed: outcome for run, outcome in filter(None, events)}


def folder_of(order):
    return order.folder / order.runs[0].name


def test_runs_are_trained_in_processes_with_one_thread_each(orders):
    asked = orders([1, 2, 3])
    outcomes = ended(train_all(asked, LocalWorkers(2, train_order), retries=0))
    assert {seed: outcome.status for seed, outcome in outcomes.items()} == dict.fromkeys([1, 2, 3], "done")
    for order in asked:
        assert read_checkpoint(folder_of(order) / "last.pt").provenance["threads"] == 1


def test_a_killed_process_loses_nothing_but_its_epoch(orders, tmp_path):
    (order,) = orders([1], epochs=100, train_samples=200)
    killed_at = []

    def kill_after_three_epochs():
        while epochs_so_far(folder_of(order)) < 3:
            time.sleep(0.005)
        (child,) = _training_processes()
        os.kill(child, signal.SIGKILL)
        killed_at.append(epochs_so_far(folder_of(order)))

    killer = threading.Thread(target=kill_after_three_epochs, daemon=True)
    killer.start()
    assert ended(train_all([order], LocalWorkers(1, train_order), retries=0))[1].status == "done"
    killer.join(timeout=10)
    assert 3 <= killed_at[0] < 100
    alone = Order(order.runs, tmp_path / "alone", "cpu", {})
    train_order(alone)
    went_on, in_one_go = (read_checkpoint(folder_of(o) / "last.pt") for o in (order, alone))
    assert went_on.epoch == 100
    assert all((went_on.state[name] == in_one_go.state[name]).all() for name in in_one_go.state)


def _training_processes():
    """Living processes that this one started and that have torch loaded, as the tracker of resources has not."""
    children = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
            with open(f"/proc/{name}/maps") as file:
                torch = "libtorch" in file.read()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and torch:
            children.append(int(name))
    return children


@pytest.mark.parametrize("retries", [0, 2])
def test_what_fails_is_tried_again_and_then_recorded_while_the_rest_goes_on(orders, retries):
    bad, good = orders([1, 2])
    (folder_of(bad) / "best.pt" / "in the way").mkdir(parents=True)
    attempts = []
    workers = LocalWorkers(1, train_order)
    submit = workers.submit
    workers.submit = lambda order: attempts.append(order) or submit(order)  # counted, and done
    outcomes = ended(train_all([bad, good], workers, retries))
    assert (outcomes[1].status, outcomes[2].status) == ("failed", "done")
    assert sum(order == bad for order in attempts) == retries + 1
    row = result(bad.runs[0], folder_of(bad), 0.95, outcomes[1])
    assert row.status == "failed"
    assert "best.pt" in row.problem


@pytest.mark.parametrize("path", [os.environ["PATH"], ""], ids=["", "without pgrep"])
def test_leaving_early_ends_the_processes(orders, path, monkeypatch):
    """Slim containers have no pgrep, by which loky would look for them without psutil."""
    monkeypatch.setenv("PATH", path)
    events = train_all(orders([1, 2], epochs=100_000), LocalWorkers(2, train_order), retries=0)
    next(events)
    events.close()
    deadline = time.monotonic() + 10
    while _training_processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _training_processes()


def test_there_is_at_least_one_core():
    assert 1 <= cores() <= (os.cpu_count() or 1)


def test_runs_that_differ_in_seed_alone_go_together(tiny_model, tiny_training):
    def run(name, model=None, **fields):
        return SweepRun(name, model or tiny_model(), tiny_training(**fields))

    runs = [
        run("a", seed=1),
        run("b", tiny_model(attention="topk", k=3), seed=1),
        run("wider", tiny_model(width=16)),
        run("c", seed=2),
        run("longer", epochs=9),
        run("d", seed=3),
    ]
    names = [[one.name for one in group] for group in together(runs, 3)]
    assert names == [["a", "c", "d"], ["b"], ["wider"], ["longer"]]


def test_of_runs_in_one_step_only_those_that_failed_are_tried_again(orders):
    one, other = orders([1, 2])
    both = one._replace(runs=one.runs + other.runs)
    (folder_of(other) / "best.pt" / "in the way").mkdir(parents=True)
    outcomes = ended(train_all([both], LocalWorkers(1, train_order), retries=1))
    assert outcomes[2].status == "failed"
    assert outcomes[1].status in ("done", "failed")  # its epoch ended with the other's
    shutil.rmtree(folder_of(other) / "best.pt")
    outcomes = ended(train_all([both], LocalWorkers(1, train_order), retries=1))
    assert {outcome.status for outcome in outcomes.values()} == {"done"}
