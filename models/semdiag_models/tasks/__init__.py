"""The tasks, by name."""

from semdiag_models.errors import InputError, unknown_name
from semdiag_models.tasks.cycle_navigation import CycleNavigation
from semdiag_models.tasks.even_pairs import EvenPairs
from semdiag_models.tasks.listops import ListOps
from semdiag_models.tasks.missing_duplicate import MissingDuplicate
from semdiag_models.tasks.modular_arithmetic import ModularArithmetic
from semdiag_models.tasks.parity import Parity
from semdiag_models.tasks.solve_equation import SolveEquation
from semdiag_models.tasks.stack_manipulation import StackManipulation
from semdiag_models.tasks.task import Classification, Recipe, Task
from semdiag_models.tasks.text import Text, open_text, perplexity
from semdiag_models.training_config import TrainingConfig

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
    """Look a task up by its name or by an alias."""
    for task in TASKS.values():
        if name == task.name or name in task.aliases:
            return task
    if name == Text.name:
        raise InputError("The task text needs a file: semdiag train text --text FILE.")
    raise unknown_name("task", name, [*TASKS, Text.name])


def task_of(training: TrainingConfig) -> Classification:
    """Return what a run learns."""
    if training.text is not None:
        return Text(training.text)
    if training.listops is not None:
        return ListOps(**training.listops.to_dict())
    return find_task(training.task)
