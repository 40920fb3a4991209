"""Measure the models of a survey in separate processes."""

import os
from collections import deque
from collections.abc import Callable, Sequence
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
    """What a worker process needs to measure a model; everything in it can be pickled.

    Attributes:
        path: of the model.
        conditions: of the survey.
        parent: id of the process with which measuring ends; None means it does not.
    """

    path: str
    conditions: Conditions
    parent: int | None = None


def run_order(order: MeasuringOrder) -> Measurements | str:
    """Measure a model on one CPU thread, in a process of its own.

    Returns:
        Its measurements, or one line on why it cannot be measured.
    """
    torch.set_num_threads(1)

    def go_on(*steps: Any) -> None:
        if order.parent is not None and os.getppid() != order.parent:
            os._exit(1)

    try:
        return survey_one(order.path, order.conditions, Progress(go_on, go_on, go_on))
    except InputError as error:
        return str(error)


def measure_in_parallel(
    paths: Sequence[str], conditions: Conditions, workers: Workers, ended: Callable[[str], None]
) -> list[Measurements]:
    """Measure several models at once; the results do not depend on which worker measures which.

    Args:
        paths: of the models.
        conditions: resolved for all models together.
        workers: run orders with :func:`run_order`; closed at the end.
        ended: called with the path of each measured model.

    Returns:
        Their measurements, in the order of the paths.

    Raises:
        InputError: if one cannot be measured, or its process was killed.
    """
    waiting, measured = deque(enumerate(paths)), dict[int, Measurements]()
    running: dict[Any, tuple[int, str]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers.capacity:
                entry = waiting.popleft()
                running[workers.submit(MeasuringOrder(entry[1], conditions))] = entry
            for handle in workers.wait(list(running), TICK):
                number, path = running.pop(handle)
                outcome = workers.outcomes(handle)
                if outcome is None:
                    raise InputError(
                        f"{path}: its process was killed, perhaps for lack of memory. Try fewer --jobs."
                    )
                if isinstance(outcome, str):
                    raise InputError(outcome)
                measured[number] = outcome
                ended(path)
    finally:
        workers.close()
    return [measured[number] for number in range(len(paths))]
