"""Train or measure several things at a time: in processes on this machine, or on Ray."""

import os
import signal
import socket
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
_HEARTBEAT = 5.0  # seconds between two questions to a Ray cluster
_MOST_UNANSWERED = 40  # checks, one a TICK; Ray ends this process a minute after its cluster's head died
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
        _refuse_unreachable(address)
        quiet = {"logging_level": "ERROR", "log_to_driver": False, "include_dashboard": None}
        try:
            self._ray.init(address=None if address == "auto" else address, **quiet)
        except (Exception, SystemExit) as error:  # whatever Ray raises, plain exceptions and exits included
            raise InputError(f"No Ray cluster at {address} ({_reason(error)}). {_elsewhere(address)}") from None
        self.capacity = 10_000 if jobs is None else jobs  # in Ray's own queue
        remote = self._ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_carry_out_in)
        self.submit = partial(remote.remote, os.getcwd(), carry_out)
        self._heartbeat = _Heartbeat(self._ray, {"CPU": 1.0, "GPU": gpus})

    def wait(self, handles: list[Any], seconds: float) -> list[Any]:
        """Wait until an order ends, or the time is over; InputError if the cluster is dead."""
        try:
            ended: list[Any] = self._ray.wait(handles, num_returns=1, timeout=seconds)[0]
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise _dead_cluster(_reason(error)) from None
        if not ended:
            self._heartbeat.check()
        return ended

    def outcomes(self, handle: Any) -> Any:
        """Return the result of an ended order; None if a worker or a machine failed."""
        kinds = self._ray.exceptions
        try:
            return self._ray.get(handle)
        except kinds.RayTaskError as error:
            if isinstance(error.cause, ModuleNotFoundError):
                raise InputError(
                    f"A machine of the Ray cluster cannot run semdiag ({error.cause}): "
                    "install the same version there."
                ) from None
            raise  # by our function
        except (kinds.LocalRayletDiedError, kinds.RaySystemError, ConnectionError) as error:
            raise _dead_cluster(_reason(error)) from None
        except kinds.RayError:
            return None

    def close(self) -> None:
        """End all tasks; a cluster that existed before stays."""
        self._heartbeat.close()
        self._ray.shutdown()


class _Heartbeat:
    """Asks a Ray cluster for its nodes in a thread: where they are dead, Ray itself waits for ever."""

    def __init__(self, ray: Any, needs: dict[str, float]) -> None:
        self._ray = ray
        self._needs = needs  # resources of an order
        self._node = ray.get_runtime_context().get_node_id()  # of this process
        self._nodes: list[dict[str, Any]] | None = None  # as last told
        self._unanswered = 0  # checks since then
        self._warned = False
        self._closed = threading.Event()
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        while not self._closed.wait(_HEARTBEAT):
            try:
                self._nodes = self._ray.nodes()
            except Exception:  # Ray's, about a cluster that is gone: an answer that does not come
                continue
            self._unanswered = 0

    def check(self) -> None:
        """Raise InputError if the cluster is dead; warn if none of its nodes has room for an order."""
        self._unanswered += 1  # a count, not a time: a program that was suspended is not late
        if self._unanswered > _MOST_UNANSWERED:
            raise _dead_cluster("it does not answer")
        if self._nodes is None:
            return
        alive = [node for node in self._nodes if node["Alive"]]
        if all(node["NodeID"] != self._node for node in alive):
            raise _dead_cluster("the node of this machine died")
        if not self._warned and not any(self._has_room(node) for node in alive):
            self._warned = True
            needs = " and ".join(f"{amount:g} {name}" for name, amount in self._needs.items() if amount)
            warnings.warn(f"no node of the Ray cluster has {needs}: orders wait until one joins.", stacklevel=3)

    def _has_room(self, node: dict[str, Any]) -> bool:
        resources = node.get("Resources", {})
        return all(resources.get(name, 0.0) >= amount for name, amount in self._needs.items())

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()


def _dead_cluster(reason: str) -> InputError:
    return InputError(
        f"The Ray cluster died ({reason}). Start it again (--ray auto does), then repeat the command."
    )


def _refuse_unreachable(address: str) -> None:
    """Refuse ``HOST:PORT`` where nothing listens; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(f"No Ray cluster at {address} ({_reason(error)}). {_elsewhere(address)}") from None


def _elsewhere(address: str) -> str:
    if address == "auto":
        return "--jobs N does without Ray."
    return "Use --ray auto to start one here."


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


Workers = LocalWorkers | RayWorkers


def _carry_out_in(folder: str, carry_out: Callable[[Any], Any], order: Any) -> Any:
    """Execute an order in the folder where the command started, if it exists, so that paths stay valid."""
    if os.path.isdir(folder):
        os.chdir(folder)
    return carry_out(order)
