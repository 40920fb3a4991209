"""What a dry run says an epoch costs."""

from semdiag_models.sweeps import estimates
from semdiag_models.sweeps.grid import SweepRun


def test_what_the_first_steps_cost_alone_is_not_counted(tiny_model, tiny_training, monkeypatch):
    """Kernels are compiled in a process once: the second timing counts."""
    timings = iter([(100.0, 100.0), (2.0, 0.5)])
    monkeypatch.setattr(estimates, "_timed", lambda trainer: next(timings))
    run = SweepRun("a run", tiny_model(), tiny_training())
    steps, evaluated = 4, 70  # of 40 samples in batches of 12, and 30 held out
    assert estimates.time_epoch(run, "cpu") == steps * 2.0 + evaluated * 0.5


def test_what_takes_long_is_timed_once(tiny_model, tiny_training, monkeypatch):
    timings = iter([(2.0, 0.5)])
    monkeypatch.setattr(estimates, "_timed", lambda trainer: next(timings))
    monkeypatch.setattr(estimates, "_COLD", 0.0)
    assert estimates.time_epoch(SweepRun("a run", tiny_model(), tiny_training()), "cpu") == 43.0
