"""What a dry run says an epoch costs."""

from dataclasses import replace

from semdiag_models.sweeps import runs as estimates
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


def test_each_cost_is_timed_once_and_named_by_what_sets_it_apart(tiny_model, tiny_training, monkeypatch, tmp_path):
    """Seeds and learning rates cost the same; of what differs otherwise, every line says what."""
    monkeypatch.setattr(estimates, "time_epoch", lambda run, device: float(run.model.heads))
    usual = SweepRun("usual", tiny_model(heads=1), tiny_training(seed=1))
    same = [replace(usual, name=f"seed {seed}", training=replace(usual.training, seed=seed)) for seed in (2, 3)]
    heads = SweepRun("heads", tiny_model(heads=2), tiny_training(seed=1))
    both = SweepRun("both", tiny_model(heads=2, norm="post"), tiny_training(seed=1, optimizer="adam"))
    said = []
    found = estimates.estimate([usual, *same, heads, both, heads], tmp_path, "cpu", said.append)
    assert [left.epoch_seconds for left in found] == [1, 1, 1, 2, 2, 2]
    label = f"Timing {usual.training.task_label}, {usual.model.attention_label}, length {usual.model.length}"
    assert said == [label, f"{label}, heads 2", f"{label}, heads 2, norm post, optimizer adam"]
