"""How far a command is, in logs: a line at the start, one a minute, none on a terminal or with --quiet."""

import io
import sys
import threading

import pytest

from semdiag.commands.printing import SweepProgress
from semdiag.commands.sweep_results import result
from semdiag.commands.train import TrainingProgress
from semdiag.presenting import terminal as minutes
from semdiag.presenting.progress import Stages
from semdiag.presenting.terminal import Minutes
from semdiag_models import ModelConfig, TrainingConfig, open_run
from semdiag_models.sweep import SweepRun


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """In the place of the system's; no thread looks at it."""
    found = Clock()
    monkeypatch.setattr(minutes, "_clock", found)
    monkeypatch.setattr(Minutes, "_watch", lambda self: None)
    return found


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_a_measurement_says_its_start_and_every_minute_how_far_it_is(clock, capsys):
    with Stages("measuring", 4, quiet=False, what="2 models") as bar:
        bar.announce("a.pt", 10)
        assert lines(capsys) == []  # what is refused before the first batch is over is one line
        bar.advance(1)
        assert lines(capsys) == ["semdiag: measuring 2 models in 4 stages."]
        clock.now += 59
        bar._minutes.tick()
        assert lines(capsys) == []
        bar.announce("a.pt: masks", 0)
        bar.announce("b.pt", 20)
        bar.advance(10)
        clock.now += 61
        for _ in range(3):
            bar._minutes.tick()
        assert lines(capsys) == [
            "semdiag: measuring stage 3 of 4, b.pt (10 of 20), after 2 min, about 2 min left."
        ]  # 61 s of this stage, and for the last the mean of the others: (59 + 2 · 61) / 3 s
        clock.now += 60
        bar._minutes.tick()
        assert len(lines(capsys)) == 1


def test_a_long_loading_is_not_silent(clock, capsys):
    with Stages("measuring", 300, quiet=False, what="300 models") as bar:
        clock.now += 9
        bar._minutes.tick()
        assert lines(capsys) == []
        clock.now += 1
        bar._minutes.tick()
        bar._minutes.tick()
        bar.announce("a.pt", 10)
        bar.advance(1)
        assert lines(capsys) == ["semdiag: measuring 300 models in 300 stages."]
        clock.now += 60
        bar._minutes.tick()
        assert lines(capsys) == [
            "semdiag: measuring stage 1 of 300, a.pt (1 of 10), after 1 min, about 50 h 49 min left."
        ]  # 300 stages of 10 s before the first sample and 600 s for ten, without the 70 s that are over


def test_drawing_is_told_by_its_figures_and_has_no_line_at_its_start(clock, capsys):
    with Stages("drawing", 1, quiet=False) as bar:
        bar.announce("figures", 30)
        bar.advance(20)
        assert lines(capsys) == []
        clock.now += 120
        bar._minutes.tick()
        assert lines(capsys) == ["semdiag: drawing figures (20 of 30), after 2 min, about 1 min left."]


@pytest.mark.parametrize("way", ["quiet", "terminal"])
def test_nothing_is_said_where_it_is_not_wanted(clock, capsys, monkeypatch, way):
    if way == "terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")
    threads = threading.active_count()
    bar = Stages("measuring", 4, quiet=way == "quiet", what="2 models")
    with bar._minutes:
        assert threading.active_count() == threads
        bar.announce("a.pt", 10)
        clock.now += 3600
        bar._minutes.tick()
    assert lines(capsys) == []


@pytest.mark.slow
def test_a_thread_looks_at_the_clock_and_ends_with_the_work(monkeypatch):
    looked = threading.Event()
    monkeypatch.setattr(Minutes, "tick", lambda self: looked.set())
    threads = threading.active_count()
    with Stages("measuring", 4, quiet=False):
        assert looked.wait(30)
    assert threading.active_count() == threads


def test_a_reader_that_leaves_ends_the_lines_alone(clock, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.undo()
    monkeypatch.setattr(minutes, "_clock", clock)
    bar = Minutes("begun", lambda: "working", lambda: None, silent=False)
    clock.now += 60
    monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.setattr(bar._finished, "wait", lambda seconds: False)
    bar._watch()  # it returns


def training(epochs=4, seed=1):
    return TrainingConfig("even-pairs", 6, epochs, seed=seed, train_samples=8, holdout_samples=4, batch_size=4)


def test_a_training_says_its_start_and_every_minute_how_far_it_is(clock, capsys, tmp_path):
    import torch

    model = ModelConfig(3, 2, 6, blocks=1, width=4)
    trainer = open_run(tmp_path / "r", model, training(), torch.device("cpu"), resume=False, overwrite=False)
    trainer.release()
    with TrainingProgress([trainer], quiet=False) as bar:
        assert lines(capsys) == ["semdiag: training 1 run for 4 epochs of 2 steps."]
        bar.batch(trainer)
        bar.batch(trainer)
        clock.now += 60
        bar._minutes.tick()
        assert lines(capsys) == ["semdiag: training, epoch 0 of 4, after 1 min, about 3 min left."]


def test_a_sweep_says_every_minute_how_far_it_is(clock, capsys, tmp_path):
    runs = [SweepRun(f"run-{seed}", ModelConfig(3, 2, 6, blocks=1), training(seed=seed)) for seed in (1, 2)]
    rows = {run.name: result(run, tmp_path / run.name, 0.95) for run in runs}
    with SweepProgress(runs, rows, tmp_path, quiet=False) as bar:
        assert lines(capsys) == [f"2 runs in {tmp_path}, 0 of them done."]
        (tmp_path / "run-1").mkdir()
        (tmp_path / "run-1" / "history.csv").write_text("epoch\n1\n2\n")
        clock.now += 120
        bar.tick()
        assert lines(capsys) == ["semdiag: 0 of 2 runs ended, 25% of epochs, after 2 min, about 6 min left."]
