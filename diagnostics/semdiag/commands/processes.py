"""Measure in other processes: ``--jobs`` and ``--ray``."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semdiag.capturing.loading import LoadedModel
    from semdiag.measuring.measure import Conditions
    from semdiag.measuring.measurements import Measurements
    from semdiag_models.sweeps.workers import Workers


def in_processes(jobs: int | None, ray: str) -> "Callable[..., Measurements] | None":
    """Return a function that measures models in other processes; None to measure in this one."""
    from semdiag_models import InputError

    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs must be at least 1. Got {jobs}.")
    if jobs is None and not ray:
        return None  # without importing the rest

    from dataclasses import replace

    from semdiag.measuring.survey import MeasuringOrder, one_thread, run_in_parallel, survey
    from semdiag_models.training import find_device

    def run(
        loaded: "list[LoadedModel]",
        conditions: "Conditions",
        announce: Callable[[str, int], None],
        after_batch: Callable[[int], None],
    ) -> "Measurements":
        def ended(path: str) -> None:
            for _ in range(1 + len(conditions.plans)):
                announce(path, 0)
            after_batch(0)

        reruns = [getattr(plan, "rerun", False) for plan in conditions.plans]
        alone = len(loaded) == 1 and find_device(conditions.device).type == "cpu"
        if alone and jobs and jobs > 1 and not ray and any(reruns):  # their masks are divided, not models
            pairs = zip(conditions.plans, reruns, strict=True)
            plans = tuple(replace(plan, jobs=jobs) if again else plan for plan, again in pairs)
            with one_thread():  # as each of the processes has
                return survey(loaded, replace(conditions, plans=plans), lambda path, steps: announce(path, 0))

        def apart(paths: list[str], decided: "Conditions") -> "list[Measurements]":
            orders = [(path, MeasuringOrder(path, decided)) for path in paths]
            size = max(model.size for model in loaded)
            return run_in_parallel(orders, _workers(jobs, ray, len(orders), size), ended)

        return survey(loaded, conditions, elsewhere=apart)

    return run


def _workers(jobs: int | None, ray: str, tasks: int, size: int) -> "Workers":
    from semdiag.measuring.survey import run_order
    from semdiag_models.sweeps.workers import LocalWorkers, RayWorkers

    return RayWorkers(ray, 0.0, jobs, run_order) if ray else LocalWorkers(jobs or 1, run_order, tasks, size)
