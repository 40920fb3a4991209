"""The tasks, by name."""

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
    "Task",
    "Text",
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
