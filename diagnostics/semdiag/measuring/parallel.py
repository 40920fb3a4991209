"""Measure the models of a survey in separate processes."""

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
    """What a worker process needs to measure a model; everything in it can be pickled."""

    path: str  # of the model
    conditions: Conditions  # of the survey


def run_order(order: MeasuringOrder) -> Measurements | str:
    """Measure a model on one CPU thread, in a process of its own."""
    torch.set_num_threads(1)
    try:
        return survey_one(order.path, order.conditions, Progress())
    except InputError as error:
        return str(error)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one CPU thread inside the context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_in_parallel(
    orders: Sequence[tuple[str, Any]], workers: Workers, ended: Callable[[str], None] = lambda path: None
) -> list[Any]:
    """Run several orders at once; the results do not depend on which worker runs which."""
    waiting, results = deque(enumerate(orders)), dict[int, Any]()
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
                        f"{path}: its process was killed, perhaps for lack of memory. Try fewer --jobs."
                    )
                if isinstance(outcome, str):
                    raise InputError(outcome)
                results[number] = outcome
                ended(path)
    finally:
        workers.close()
    return [results[number] for number in range(len(orders))]
