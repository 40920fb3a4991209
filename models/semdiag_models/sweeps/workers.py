"""Many runs at once: processes on this machine, or whatever else fulfils the same contract."""

import os
import signal
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, Protocol

from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.process_executor import BrokenProcessPool

from semdiag_models.sweeps.runs import Order, Outcome, epochs_so_far, train_order

TICK = 1.0  # seconds between two looks at who is ready
KILLED = Outcome("failed", "its process was killed, by someone or for want of memory", retry=True)


class Workers(Protocol):
    """Processes that train runs."""

    capacity: int  # runs to hand over at once

    def submit(self, order: Order) -> Any:
        """Hand a run over; return what stands for it."""

    def wait(self, handles: list[Any], seconds: float) -> list[Any]:
        """Wait until one of the runs ends, or the time is over; return those that have ended."""

    def outcome(self, handle: Any) -> Outcome:
        """How an ended run ended; ``KILLED`` if its process did not live to say."""

    def close(self) -> None:
        """End all processes at once; what they saved stays. Closing twice is closing once."""


class LocalWorkers:
    """Processes of this machine, through joblib's loky; they ignore Ctrl-C, which the sweep answers for them.

    Args:
        jobs: processes, each with one CPU thread.
    """

    def __init__(self, jobs: int) -> None:
        self.capacity = jobs
        self._begun = False

    def _executor(self) -> Any:
        """The pool; a new one if a process of the last was killed, which breaks it for all."""
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return get_reusable_executor(
            max_workers=self.capacity, timeout=3600, env=one_thread, initializer=_ignore_interrupts
        )

    def submit(self, order: Order) -> Future[Outcome]:
        """See :class:`Workers`."""
        self._begun = True
        future: Future[Outcome] = self._executor().submit(train_order, replace(order, parent=os.getpid()))
        return future

    def wait(self, handles: list[Future[Outcome]], seconds: float) -> list[Future[Outcome]]:
        """See :class:`Workers`."""
        return list(wait(handles, seconds, FIRST_COMPLETED).done)

    def outcome(self, handle: Future[Outcome]) -> Outcome:
        """See :class:`Workers`."""
        try:
            return handle.result()
        except BrokenProcessPool:
            return KILLED

    def close(self) -> None:
        """See :class:`Workers`."""
        if self._begun:
            self._executor().shutdown(wait=True, kill_workers=True)
        self._begun = False


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def train_all(orders: list[Order], workers: Workers, retries: int) -> Iterator[tuple[Order, Outcome] | None]:
    """Train many runs, several at once, each from where it is.

    A run whose process dies, or that stops with an error that may pass, is tried again; attempts after which it
    has new epochs do not count. Leaving the iteration ends all processes.

    Args:
        orders: the runs, in the order in which to begin them.
        workers: who trains them.
        retries: further attempts of a run, besides the first.

    Yields:
        A run and how it ended; or None, about once a second, when there is time to show progress.
    """
    waiting, attempts = deque(orders), Counter[str]()
    running: dict[Any, tuple[Order, int]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers.capacity:
                order = waiting.popleft()
                running[workers.submit(order)] = order, epochs_so_far(order.folder)
            for handle in workers.wait(list(running), TICK):
                order, before = running.pop(handle)
                outcome = workers.outcome(handle)
                if outcome.retry:
                    attempts[order.run.name] += epochs_so_far(order.folder) <= before
                    if attempts[order.run.name] <= retries:
                        waiting.append(order)
                        continue
                yield order, outcome
            yield None
    finally:
        workers.close()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
