"""The tasks, by name, and the samples of a run."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag_models.config import TrainingConfig
from semdiag_models.reading import InputError, unknown_name
from semdiag_models.tasks.language_tasks import (
    CycleNavigation,
    EvenPairs,
    ListOps,
    MissingDuplicate,
    ModularArithmetic,
    Parity,
    SolveEquation,
    StackManipulation,
)
from semdiag_models.tasks.task import Classification, Recipe, Task
from semdiag_models.tasks.text import Text, open_text, perplexity

__all__ = [
    "TASKS",
    "Classification",
    "ListOps",
    "Recipe",
    "Split",
    "Task",
    "Text",
    "draw_data",
    "draw_fresh",
    "find_task",
    "open_text",
    "perplexity",
    "task_of",
]

TASKS: dict[str, Task] = {
    "parity": Parity(),
    "even-pairs": EvenPairs(),
    "missing-duplicate": MissingDuplicate(),
    "stack-manipulation": StackManipulation(),
    "cycle-navigation": CycleNavigation(),
    "modular-arithmetic": ModularArithmetic(),
    "solve-equation": SolveEquation(),
    "listops": ListOps(),
}


def find_task(name: str) -> Task:
    """Return the task with a name or an alias."""
    for task in TASKS.values():
        if name == task.name or name in task.aliases:
            return task
    if name == Text.name:
        raise InputError("The task text needs a file: semdiag train text --text FILE.")
    raise unknown_name("task", name, [*TASKS, Text.name])


def task_of(training: TrainingConfig) -> Classification:
    """Return the task or text of a run."""
    if training.text is not None:
        return Text(training.text)
    if training.listops is not None:
        return ListOps(**training.listops.to_dict())
    return find_task(training.task)


class Split(NamedTuple):
    """Labelled samples: tokens (N, L) int64 and labels (N,) int64."""

    tokens: Tensor
    labels: Tensor


def draw_data(config: TrainingConfig, padded_length: int, pad_id: int) -> tuple[Split, Split]:
    """Regenerate a run's training and held-out samples from its seed."""
    generator = torch.Generator().manual_seed(config.seed)
    train, holdout = _draw(config, config.holdout_samples, generator, pad_id)
    return _padded(*train, padded_length, pad_id), _padded(*holdout, padded_length, pad_id)


def draw_fresh(config: TrainingConfig, epoch: int, padded_length: int, pad_id: int) -> Split:
    """Draw an epoch's training samples from seed and epoch alone, so that a resumed run sees the same ones."""
    if epoch == 0:
        return draw_data(config, padded_length, pad_id)[0]
    words = np.random.SeedSequence([config.seed, epoch]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))
    train, _ = _draw(config, 1, generator, pad_id)
    return _padded(*train, padded_length, pad_id)


def _draw(config: TrainingConfig, holdout: int, generator: torch.Generator, pad_id: int) -> tuple[Split, Split]:
    """Draw training samples and this many held-out ones, padded to the longest if lengths are drawn."""
    task = task_of(config)
    if config.least_length is None:
        first, second = task.draw(config.train_samples, holdout, config.length, generator)
        return Split(*first), Split(*second)
    total = config.train_samples + holdout
    lengths = torch.randint(config.least_length, config.length + 1, (total,), generator=generator)
    tokens = torch.full((total, config.length), pad_id)
    labels = torch.empty(total, dtype=torch.int64)
    for length in sorted(set(lengths.tolist())):
        rows = (lengths == length).nonzero().flatten()
        (drawn, theirs), _ = task.draw(len(rows), 1, length, generator)
        tokens[rows, :length], labels[rows] = drawn, theirs
    n = config.train_samples
    return Split(tokens[:n], labels[:n]), Split(tokens[n:], labels[n:])


def _padded(tokens: Tensor, labels: Tensor, length: int, pad_id: int) -> Split:
    return Split(F.pad(tokens, (0, length - tokens.shape[1]), value=pad_id), labels)
