"""Measuring the models of a survey in processes of their own."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from semdiag.measuring.conditions import Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.survey import Progress, survey_one
from semdiag_models import InputError
from semdiag_models.sweeps.workers import TICK, Workers


@dataclass(frozen=True)
class MeasuringOrder:
    """What a worker needs to know: everything can be sent to another process.

    Attributes:
        path: of the model.
        conditions: of the survey.
        parent: process with which the measuring ends, if it should end with one.
    """

    path: str
    conditions: Conditions
    parent: int | None = None


def carry_out(order: MeasuringOrder) -> Measurements | str:
    """Measure a model on one CPU thread; for a process of its own.

    Returns:
        Its measurements, or in one line why it cannot be measured.
    """
    torch.set_num_threads(1)

    def go_on(*steps: Any) -> None:
        end_without(order.parent)

    try:
        return survey_one(order.path, order.conditions, Progress(go_on, go_on, go_on))
    except InputError as error:
        return str(error)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch runs on one CPU thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def end_without(parent: int | None) -> None:
    """End this process if the one is gone for which it works.

    Args:
        parent: its number; None: it works for itself.
    """
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def carried_out(
    orders: Sequence[tuple[str, Any]], workers: Workers, ended: Callable[[str], None] = lambda path: None
) -> list[Any]:
    """Have orders carried out, several at once; whoever does, what comes of them is the same.

    Args:
        orders: each behind the path of its model.
        workers: that carry them out; they are closed at the end.
        ended: called with the path of each that is carried out.

    Returns:
        What came of each, in their order.

    Raises:
        InputError: if a line says why nothing came of one, or its process was killed.
    """
    waiting, found = deque(enumerate(orders)), dict[int, Any]()
    running: dict[Any, tuple[int, str]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers.capacity:
                place, (path, order) = waiting.popleft()
                running[workers.submit(order)] = place, path
            for handle in workers.wait(list(running), TICK):
                number, path = running.pop(handle)
                outcome = workers.outcomes(handle)
                if outcome is None:
                    raise InputError(
                        f"{path}: its process was killed, by someone or for lack of memory. Try fewer --jobs."
                    )
                if isinstance(outcome, str):
                    raise InputError(outcome)
                found[number] = outcome
                ended(path)
    finally:
        workers.close()
    return [found[number] for number in range(len(orders))]
