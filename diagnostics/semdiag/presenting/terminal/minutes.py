"""Progress without bars: a line at the start, and one a minute."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from semdiag.presenting.terminal.terminal import tell

MINUTE = 60.0
_clock = time.monotonic
_PATIENCE = 10.0  # seconds until the first line appears without anything to count


def clock() -> float:
    """Return the time in seconds, for progress lines."""
    return _clock()


class Minutes:
    """Progress lines on stderr, for logs; terminals have bars. Inside ``with`` a thread watches the clock."""

    def __init__(
        self, start: str, state: Callable[[], str], share: Callable[[], float | None], silent: bool
    ) -> None:
        self._start, self._state, self._share, self._silent = start, state, share, silent
        self._begun = self._last_line = _clock()
        self._has_begun = False
        self._turn = threading.Lock()
        self._finished = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Self:
        if not self._silent:
            self._ticker = threading.Thread(target=self._watch, daemon=True)
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        if self._ticker is not None:
            self._ticker.join()

    def begin(self) -> None:
        """Print the first line, once."""
        with self._turn:
            if self._start and not self._silent and not self._has_begun:
                self._has_begun = True
                tell(f"semdiag: {self._start}.")

    def tick(self) -> None:
        """Print a line if a minute has passed since the last; the first line, if there was none."""
        now = _clock()
        if not self._has_begun and now - self._begun >= _PATIENCE:
            self.begin()
        with self._turn:
            if not self._silent and now - self._last_line >= MINUTE:
                self._last_line = now
                tell(f"semdiag: {self._state()}, after {minutes(now - self._begun)}{self._left(now)}.")

    def _left(self, now: float) -> str:
        share = self._share()
        if not share or share >= 1:
            return ""
        return f", about {minutes((now - self._begun) * (1 - share) / share)} left"

    def _watch(self) -> None:
        while not self._finished.wait(1):
            try:
                self.tick()
            except (OSError, ValueError):  # stderr is closed; the command will notice
                return


def minutes(seconds: float) -> str:
    """Return a time in minutes, or in hours and minutes."""
    whole = max(1, round(seconds / 60))
    return f"{whole} min" if whole < 60 else f"{whole // 60} h {whole % 60} min"
