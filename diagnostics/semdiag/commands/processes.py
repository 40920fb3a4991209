"""What ``--jobs`` and ``--ray`` ask for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semdiag.capturing.loading import LoadedModel
    from semdiag.measuring.conditions import Conditions
    from semdiag.measuring.measurements import Measurements
    from semdiag_models.sweeps.workers import Workers


def in_processes(jobs: int | None, ray: str) -> "Callable[..., Measurements] | None":
    """Return a function that measures models in other processes; None to measure in this one.

    Args:
        jobs: number of processes.
        ray: address of a Ray cluster; empty: processes on this machine.

    Raises:
        InputError: if ``jobs`` is below 1.
    """
    from semdiag_models import InputError

    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs must be at least 1. Got {jobs}.")
    if jobs is None and not ray:
        return None  # without importing the rest

    from semdiag.measuring.parallel import measure_in_parallel
    from semdiag.measuring.survey import survey

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

        def apart(paths: list[str], decided: "Conditions") -> "list[Measurements]":
            return measure_in_parallel(paths, decided, _workers(jobs, ray), ended)

        return survey(loaded, conditions, elsewhere=apart)

    return run


def _workers(jobs: int | None, ray: str) -> "Workers":
    from semdiag.measuring.parallel import run_order
    from semdiag_models.sweeps.ray import RayWorkers
    from semdiag_models.sweeps.workers import LocalWorkers

    return RayWorkers(ray, 0.0, jobs, run_order) if ray else LocalWorkers(jobs or 1, run_order)
