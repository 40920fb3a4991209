"""Consoles on stdout and stderr, and progress as a line a minute."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console


def escaped(text: str) -> str:
    r"""Return a text with control characters escaped: :func:`semdiag_files.visible`."""
    if text.replace("\n", "").isprintable():  # without control sequences; the other function would import torch
        return text
    from semdiag_files import visible

    return visible(text)


_STDOUT: ContextVar[TextIO | None] = ContextVar("stdout", default=None)  # where JSON goes; None: to stdout


@contextmanager
def stdout_for_json(as_json: bool) -> Iterator[None]:
    """Keep stdout for :func:`print_json` inside the context: all else, what models print, too, goes to stderr."""
    before = _STDOUT.set(sys.stdout if as_json else None)
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            yield
    finally:
        _STDOUT.reset(before)


def print_json(content: Any, indent: int | None = None) -> None:
    """Print one JSON object on stdout."""
    typer.echo(json.dumps(content, indent=indent, allow_nan=False), file=_STDOUT.get())


def tell(line: str) -> None:
    """Print a line about progress, or a remark, on stderr."""
    typer.echo(escaped(line), err=True)


def say(line: str) -> None:
    """Print a line of a result."""
    typer.echo(escaped(line))


def terminal(stderr: bool = False) -> "Console":
    """Return the one kind of console: it shows texts as they are; no markup, emoji code or escape acts."""
    from rich.console import Console
    from rich.segment import Segment

    class Careful(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(escaped(segment.text), segment.style)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with code 1, which means a failed check

    return Careful(stderr=stderr, markup=False, emoji=False, highlight=False)


def speak_any_language() -> None:
    """Escape characters that a stream's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


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
        self._start = start
        self._state = state
        self._share = share
        self._silent = silent
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

    def __exit__(self, *exception: object) -> None:
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
                passed = now - self._begun
                share = self._share()
                left = f", about {minutes(passed * (1 - share) / share)} left" if share and share < 1 else ""
                tell(f"semdiag: {self._state()}, after {minutes(passed)}{left}.")

    def _watch(self) -> None:
        while not self._finished.wait(1):
            try:
                self.tick()
            except (OSError, ValueError):  # stderr is closed; the command will notice
                return


def minutes(seconds: float) -> str:
    """Return a time in minutes, or in hours and minutes."""
    rounded_minutes = max(1, round(seconds / 60))
    return (
        f"{rounded_minutes} min"
        if rounded_minutes < 60
        else f"{rounded_minutes // 60} h {rounded_minutes % 60} min"
    )
