"""Train or measure several things at a time: in processes on this machine, or on Ray."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from importlib import import_module
from typing import Any

from loky import BrokenProcessPool, get_reusable_executor

from semdiag_files.errors import InputError
from semdiag_files.files import MEMORY_SHARE, memory_share

TICK = 1.0  # seconds between polls
_BYTES = 2**29  # memory of a process with torch, before it has a model


class LocalWorkers:
    """Processes on this machine that train or measure; they ignore Ctrl-C, and end with this process."""

    def __init__(
        self, jobs: int | None, carry_out: Callable[[Any], Any], tasks: int | None = None, size: int = 0
    ) -> None:
        room = max(1, int(memory_share() / MEMORY_SHARE / (_BYTES + size)))
        most, why = min(
            (cores(), "this machine has no more cores"),
            (room, f"its memory holds no more of {(_BYTES + size) / 2**30:.1f} GiB each"),
            (room if tasks is None else max(1, tasks), "there is no more to divide among processes"),
            key=lambda limit: limit[0],
        )
        self.capacity = most if jobs is None else min(jobs, most)  # largest number of pending orders
        if jobs is not None and most < jobs:
            warnings.warn(f"{most} of {jobs:,} processes are used: {why}.", stacklevel=2)
        self._carry_out = carry_out
        self._begun = False

    def _executor(self) -> Any:
        """Return the pool, or a new one if a killed process broke it."""
        env = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        start = {"initializer": _work_for, "initargs": (os.getpid(),)}
        return get_reusable_executor(self.capacity, timeout=3600, env=env, **start)

    def submit(self, order: Any) -> Any:
        """Submit an order; return a handle."""
        self._begun = True
        return self._executor().submit(self._carry_out, order)

    def wait(self, handles: list[Any], seconds: float) -> list[Any]:
        """Wait until an order ends, or the time is over; return the handles of ended orders."""
        return list(wait(handles, seconds, FIRST_COMPLETED).done)

    def outcomes(self, handle: Any) -> Any:
        """Return the result of an ended order; None if its process died."""
        try:
            return handle.result()
        except BrokenProcessPool:
            return None

    def close(self) -> None:
        """End all processes immediately; what they saved stays. Further calls do nothing."""
        if self._begun:
            self._executor().shutdown(wait=True, kill_workers=True)
        self._begun = False


def _work_for(parent: int) -> None:
    """Ignore interrupts, and end this process when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.filterwarnings("ignore", message=".* has no locks")  # the parent process has said so

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(TICK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RayWorkers:
    """Ray tasks with one CPU and a share of a GPU each, wherever the cluster has room; see LocalWorkers."""

    def __init__(self, address: str, gpus: float, jobs: int | None, carry_out: Callable[[Any], Any]) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports to Ray's makers
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            self._ray: Any = import_module("ray")
        except ImportError:
            raise InputError("--ray needs Ray: pip install ray") from None
        quiet = {"logging_level": "ERROR", "log_to_driver": False, "include_dashboard": None}
        try:
            self._ray.init(address=None if address == "auto" else address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            why = " ".join(str(error).split())[:200]
            raise InputError(f"No Ray cluster at {address} ({why}). Use --ray auto to start one here.") from None
        self.capacity = 10_000 if jobs is None else jobs  # in Ray's own queue
        remote = self._ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_carry_out_in)
        self.submit = partial(remote.remote, os.getcwd(), carry_out)

    def wait(self, handles: list[Any], seconds: float) -> list[Any]:
        """Wait until an order ends, or the time is over."""
        return self._ray.wait(handles, num_returns=1, timeout=seconds)[0]  # type: ignore[no-any-return]

    def outcomes(self, handle: Any) -> Any:
        """Return the result of an ended order; None if a worker or a machine failed."""
        try:
            return self._ray.get(handle)
        except self._ray.exceptions.RayTaskError:  # raised by our function
            raise
        except self._ray.exceptions.RayError:
            return None

    def close(self) -> None:
        """End all tasks; a cluster that existed before stays."""
        self._ray.shutdown()


Workers = LocalWorkers | RayWorkers


def _carry_out_in(folder: str, carry_out: Callable[[Any], Any], order: Any) -> Any:
    """Execute an order in the folder where the command started, if it exists, so that paths stay valid."""
    if os.path.isdir(folder):
        os.chdir(folder)
    return carry_out(order)
