"""The workers of a sweep on a Ray cluster."""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from semdiag_models.errors import InputError
from semdiag_models.sweeps.runs import train_order

_AT_ONCE = 10_000  # runs waiting in Ray's own queue


class RayWorkers:
    """Ray tasks with one CPU and a share of a GPU each, wherever the cluster has room."""

    def __init__(
        self,
        address: str,
        gpus_per_run: float,
        jobs: int | None,
        carry_out: Callable[[Any], Any] = train_order,
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports to Ray's makers
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            ray: Any = import_module("ray")
        except ImportError:
            raise InputError("--ray needs Ray: pip install 'semdiag[ray]'") from None
        self._ray = ray
        where = None if address == "auto" else address
        try:
            ray.init(address=where, logging_level="ERROR", log_to_driver=False, include_dashboard=None)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"No Ray cluster at {address} ({reason}). Use --ray auto to start one here."
            ) from None
        self.capacity = _AT_ONCE if jobs is None else jobs
        self._remote = ray.remote(num_cpus=1, num_gpus=gpus_per_run, max_retries=0)(_carry_out_in)
        self._carry_out = carry_out

    def submit(self, order: Any) -> Any:
        """See :class:`semdiag_models.sweeps.workers.Workers`."""
        return self._remote.remote(os.getcwd(), self._carry_out, order)

    def wait(self, handles: list[Any], seconds: float) -> list[Any]:
        """See :class:`semdiag_models.sweeps.workers.Workers`."""
        ready: list[Any] = self._ray.wait(handles, num_returns=1, timeout=seconds)[0]
        return ready

    def outcomes(self, handle: Any) -> Any:
        """See :class:`semdiag_models.sweeps.workers.Workers`."""
        try:
            return self._ray.get(handle)
        except self._ray.exceptions.RayTaskError:  # raised by our function
            raise
        except self._ray.exceptions.RayError:  # a worker or machine failed
            return None

    def close(self) -> None:
        """See :class:`semdiag_models.sweeps.workers.Workers`; a cluster that existed before stays."""
        self._ray.shutdown()


def _carry_out_in(folder: str, carry_out: Callable[[Any], Any], order: Any) -> Any:
    """Execute an order in the folder where the command was started, if it exists, so that paths stay valid."""
    if os.path.isdir(folder):
        os.chdir(folder)
    return carry_out(order)
