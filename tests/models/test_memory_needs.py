"""The least memory of a training: exact in parameters, never more than is taken, and refused before it is."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from semdiag_models import Encoder, InputError, ModelConfig, Trainer, TrainingConfig, reading
from semdiag_models.sweeps import runs as estimates
from semdiag_models.sweeps.grid import SweepRun
from semdiag_models.training import parameter_count, training_memory

STATUS = Path("/proc/self/status").read_text() if sys.platform == "linux" else ""
SHAPES = (
    {"width": 6, "mlp_width": 5, "heads": 3, "head_width": 7, "blocks": 2},
    {"attention": "banded", "k": 3, "global_tokens": 2, "pooling": "cls"},
    {"attention": "routing", "k": 3},
    {"attention": "lsh", "k": 4, "blocks": 1},
)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_counted_exactly(shape):
    config = ModelConfig(5, 3, 12, **shape)
    with torch.device("meta"):
        made = Encoder(config)
    assert parameter_count(config) == sum(parameter.numel() for parameter in made.parameters())


@pytest.mark.slow
@pytest.mark.skipif("VmHWM" not in STATUS, reason="the system does not say the most memory that a process held")
@pytest.mark.parametrize(
    ("shape", "choices"),
    [
        ({"width": 3000}, {}),
        ({"mlp_width": 20_000}, {"optimizer": "adam"}),
        ({"heads": 40}, {"precision": "bf16"}),
        ({"attention": "random", "k": 5, "blocks": 2}, {"length": 1200, "train_samples": 2}),
        ({"width": 2, "mlp_width": 1, "head_width": 1}, {"train_samples": 9000, "batch_size": 9000}),
    ],
)
def test_training_takes_at_least_what_is_said(shape, choices):
    """Beyond what a small run has taken before it in the same process: libraries, kernels.

    Not from `getrusage`: a process that is started takes over the maximum of the one that starts it.
    """
    work = f"""
import re, torch
from pathlib import Path
from semdiag_models import ModelConfig, Trainer, TrainingConfig
from semdiag_models.training import training_memory
def peak(shape, choices):
    choices = dict(train_samples=50, holdout_samples=20, length=40) | choices
    model = ModelConfig(3, 2, choices["length"], **shape)
    training = TrainingConfig("even-pairs", epochs=1, **choices)
    Trainer(model, training, torch.device("cpu")).run(lambda progress: None)
    held = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    return training_memory(model, training), 1024 * int(held[1])
choices = {choices!r}
small = peak(dict(width=4, blocks=1), {{name: choices[name] for name in choices if name == "precision"}})[1]
said, whole = peak({shape!r}, choices)
print(said <= whole - small, said, whole - small)
"""
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("True"), done.stdout + done.stderr[-500:]


def test_a_training_that_does_not_fit_is_refused_before_anything_is_made(monkeypatch):
    model, training = ModelConfig(3, 2, 12), TrainingConfig("even-pairs", 12, 1, train_samples=20)
    needed = training_memory(model, training)
    monkeypatch.setattr(reading, "_memory", lambda: needed)
    Trainer(model, training, torch.device("cpu"))
    monkeypatch.setattr(reading, "_memory", lambda: needed - 1)
    with pytest.raises(InputError, match="Training this model would take"):
        Trainer(model, training, torch.device("cpu"))


@pytest.mark.parametrize("huge", ["width", "heads", "length"])
def test_the_largest_sizes_are_refused(huge, monkeypatch):
    monkeypatch.setattr(reading, "_memory", lambda: 2**33)
    sizes = {huge: 100_000} | ({"mlp_width": 100_000} if huge != "length" else {})
    length = sizes.pop("length", 40)
    with pytest.raises(InputError, match="Training this model would take"):
        Trainer(
            ModelConfig(3, 2, length, **sizes),
            TrainingConfig("even-pairs", length, 1, train_samples=50, holdout_samples=20),
            torch.device("cpu"),
        )


def run_of(**sizes):
    training = TrainingConfig("even-pairs", 12, 1, train_samples=20, holdout_samples=10)
    return SweepRun("a-run", ModelConfig(3, 2, 12, **sizes), training)


def test_of_a_large_model_one_block_is_timed(monkeypatch):
    made = []

    class Noted(Trainer):
        def __init__(self, model, *rest):
            made.append(model.blocks)
            super().__init__(model, *rest)

    monkeypatch.setattr(estimates, "Trainer", Noted)
    assert estimates.time_epoch(run_of(blocks=4), "cpu") > 0
    monkeypatch.setattr(estimates, "_WHOLE", 2**10)
    assert estimates.time_epoch(run_of(blocks=4), "cpu") > 0
    assert made == [4, 4, 1, 1]  # the first timing warms up


def test_a_block_that_is_too_large_is_not_timed():
    with pytest.raises(InputError, match=r"a-run cannot be timed: .* GiB of memory"):
        estimates.time_epoch(run_of(width=100_000, mlp_width=100_000), "cpu")
