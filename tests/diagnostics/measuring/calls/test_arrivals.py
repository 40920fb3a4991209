"""Numbers on their way from a GPU: used in the order in which they were sent, and not before they arrived."""

import threading

import pandas as pd
import pytest
import torch

from semdiag import Monitor, capture
from semdiag.measuring.calls.counted_rows import Arrivals
from semdiag.measuring.calls.monitor_alarms import AlarmError
from semdiag_models import Encoder, ModelConfig


class Event:
    """An event of a device, which has not happened until someone waits for it."""

    def __init__(self):
        self.happened = False

    def query(self):
        return self.happened

    def synchronize(self):
        self.happened = True


@pytest.fixture
def later(monkeypatch):
    """Everything that is sent arrives only when it is waited for, as from a GPU that is behind."""
    threads = []

    def send(self, tensors, use):
        def used(here):
            threads.append(threading.current_thread())
            use(here)

        self._waiting.append(([Event()], dict(tensors), used))
        if self._polls:
            self.settle(wait=False)

    monkeypatch.setattr(Arrivals, "send", send)
    return threads


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(ModelConfig(vocabulary_size=3, classes=2, length=6, blocks=2)).train()


TOKENS = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 1]])


def test_what_comes_from_the_cpu_is_used_at_once():
    arrivals, used = Arrivals(polls=False), []
    x = torch.arange(3)
    arrivals.send({"a": x, "b": x}, used.append)
    assert len(arrivals) == 0
    assert used[0]["a"] is used[0]["b"] is x


def test_later_arrivals_wait_for_earlier_ones(later):
    arrivals, used = Arrivals(), []
    for number in range(3):
        arrivals.send({}, lambda here, number=number: used.append(number))
    arrivals._waiting[1][0][0].happened = True
    arrivals.settle(wait=False)
    assert used == []
    arrivals._waiting[0][0][0].happened = True
    arrivals.settle(wait=False)
    assert used == [0, 1]
    arrivals.settle()
    assert used == [0, 1, 2]


def test_a_capture_whose_numbers_arrive_late_has_the_same_tables(later, monkeypatch, model):
    model.eval()
    with torch.no_grad(), capture(model, k=2) as behind:
        model(TOKENS)
        assert len(behind) == 2
        inside = behind.residual
    monkeypatch.undo()
    with torch.no_grad(), capture(model, k=2) as calls:
        model(TOKENS)
    for name in ("dispersion", "separation", "loads"):
        pd.testing.assert_frame_equal(getattr(behind, name)([1, 2]), getattr(calls, name)([1, 2]))
    pd.testing.assert_frame_equal(inside, calls.residual)


def watched(model, steps, **how):
    with torch.random.fork_rng(), Monitor(model, every=2, **how) as monitor:
        torch.manual_seed(0)  # dropout
        forwards(model, steps)
    return monitor


def forwards(model, steps):
    for _ in range(steps):
        model(TOKENS)


def test_a_look_that_arrives_late_is_described_in_a_thread_and_written(later, monkeypatch, model):
    behind = watched(model, 5, k=[2])
    assert later
    assert threading.main_thread() not in later
    monkeypatch.undo()
    now = watched(model, 5, k=[2])
    pd.testing.assert_frame_equal(behind.table, now.table)
    pd.testing.assert_frame_equal(behind.heads, now.heads)
    assert behind.table["step"].unique().tolist() == [0, 2, 4]


def test_an_alarm_of_a_look_that_arrives_late_is_raised_by_a_later_forward(later, model):
    with Monitor(model, every=2, alarm={"max_logit": -1e9}, on_alarm="raise") as monitor:
        model(TOKENS)
        with pytest.raises(AlarmError):
            forwards(model, 2)  # the second one is the next look, which waits
        assert len(monitor.alarms) > 0


def test_rows_of_a_look_are_written_if_the_training_fails(later, model):
    monitor = Monitor(model, every=5)

    def train():
        with monitor:
            model(TOKENS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert len(monitor.table) == 2
