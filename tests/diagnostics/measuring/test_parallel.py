"""Models that are measured in processes of their own: the same numbers, and one line for what goes wrong."""

import json
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import run_in_parallel, run_order, survey, survey_elsewhere
from semdiag.measuring.table import TABLES
from semdiag.questions.mask_stability.measure import NoisePlan
from semdiag.questions.overlap.measure import OverlapPlan
from semdiag_files import InputError
from semdiag_files.workers import LocalWorkers, cores

CONDITIONS = Conditions(samples=6, batch_size=4, k=(2,), dtype="float64", plans=(NoisePlan(), OverlapPlan()))


class Here:
    """Workers without a process: an order is carried out when it is handed over, and the last ends first."""

    capacity = 2

    def __init__(self, lost=()):
        self.lost, self.orders, self.open = lost, [], True

    def submit(self, order):
        self.orders.append(order)
        return len(self.orders) - 1

    def wait(self, handles, seconds):
        return handles[-1:]

    def outcomes(self, handle):
        return None if handle in self.lost else run_order(self.orders[handle])

    def close(self):
        self.open = False


def apart(workers, told):
    return lambda paths, conditions: run_in_parallel(
        [(path, (path, conditions)) for path in paths], workers, told.append
    )


def assert_same(found, expected):
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(found, name), getattr(expected, name), check_exact=True)
    for name in ("masks", "overlap"):
        assert len(getattr(expected, name))
        pd.testing.assert_frame_equal(getattr(found, name), getattr(expected, name), check_exact=True)
    assert json.dumps(found.provenance) == json.dumps(expected.provenance)  # the order, too: it is written so


@pytest.mark.slow
def test_models_measured_one_by_one_are_those_of_a_survey_in_whatever_order_they_end(tiny_runs):
    paths, workers, told = [tiny_runs.full, tiny_runs.topk], Here(), []
    found = survey_elsewhere(paths, CONDITIONS, apart(workers, told))
    assert_same(found, survey(paths, CONDITIONS))
    assert told == [str(tiny_runs.topk), str(tiny_runs.full)]
    assert not workers.open


@pytest.mark.slow
def test_two_processes_find_the_same_numbers(tiny_runs):
    paths, told = [tiny_runs.full, tiny_runs.topk], []
    found = survey_elsewhere(paths, CONDITIONS, apart(LocalWorkers(2, run_order), told))
    assert_same(found, survey(paths, CONDITIONS))
    assert sorted(told) == sorted(map(str, paths))


@pytest.mark.slow
def test_what_auto_means_is_decided_by_all_models_and_not_by_each(tiny_runs):
    workers = Here()
    survey_elsewhere([tiny_runs.full, tiny_runs.topk], replace(CONDITIONS, dtype="auto"), apart(workers, []))
    assert {order[1].dtype for order in workers.orders} == {"float64"}


def test_inputs_that_do_not_suit_are_refused_in_one_line(tiny_runs, tmp_path):
    np.save(tmp_path / "inputs.npy", np.zeros((3, 4), dtype=np.int64))
    workers = Here()
    conditions = replace(CONDITIONS, inputs=tmp_path / "inputs.npy", first=4)
    with pytest.raises(InputError, match=r"The inputs hold only 3 samples"):
        survey_elsewhere([tiny_runs.full, tiny_runs.topk], conditions, apart(workers, []))
    assert not workers.open


def test_a_process_that_was_killed_is_told_with_its_model(tiny_runs):
    workers = Here(lost=(0,))
    with pytest.raises(InputError, match=r"full.*: its process was killed, .* Try fewer --jobs\.$"):
        survey_elsewhere([tiny_runs.full, tiny_runs.topk], CONDITIONS, apart(workers, []))
    assert not workers.open


ORPHANS = """
import sys, time
from semdiag_files.workers import LocalWorkers, cores
workers = LocalWorkers(2, time.sleep)
workers.submit(600)
time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed_whatever_they_do():
    """One is busy, and one waits for work."""
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS])
    deadline = time.monotonic() + 60
    while len(left := _children(parent.pid)) < min(2, cores()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left
    parent.kill()
    parent.wait()
    while (living := [pid for pid in left if _works(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not living


def _children(parent):
    """Worker processes, without the one that tracks resources."""
    tasks = Path(f"/proc/{parent}/task")
    pids = [pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    return [int(pid) for pid in pids if _works(pid)]


def _works(pid):
    try:
        return "LokyProcess" in Path(f"/proc/{pid}/cmdline").read_text()  # empty once it has ended
    except OSError:
        return False


@pytest.mark.parametrize(
    ("jobs", "tasks", "size", "used", "said"),
    [
        (1000, None, 0, 8, "8 of 1,000 processes are used: this machine has no more cores."),
        (1000, 2, 0, 2, "2 of 1,000 processes are used: there is no more to divide among processes."),
        (5, 9, 2**30, 5, None),
        (5, 9, 3 * 2**30, 4, "4 of 5 processes are used: its memory holds no more of 3.5 GiB each."),
        (5, 0, 2**60, 1, "1 of 5 processes are used"),
        (None, 3, 0, 3, None),
        (3, 3, 0, 3, None),
    ],
)
def test_no_more_processes_than_cores_tasks_and_memory_allow(jobs, tasks, size, used, said, monkeypatch):
    monkeypatch.setattr("semdiag_files.workers.cores", lambda: 8)
    monkeypatch.setattr("semdiag_files.files._memory", lambda: 16 * 2**30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert LocalWorkers(jobs, run_order, tasks, size).capacity == used
    assert (said is None and not caught) or str(caught[0].message).startswith(said)


def test_an_order_can_be_carried_out_alone(tiny_runs):
    found = run_order((str(tiny_runs.full), CONDITIONS))
    assert found.models["model"].tolist() == [str(tiny_runs.full)]
    assert "not there" in run_order(("not there", CONDITIONS))
