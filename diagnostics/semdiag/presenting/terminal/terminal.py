"""Output to the terminal: texts from files are displayed, and never act as control sequences."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def visible(text: str) -> str:
    r"""Return a text with control characters escaped: :func:`semdiag_models.plain_text.visible`."""
    if text.replace("\n", "").isprintable():  # without control sequences; the other function would import torch
        return text
    from semdiag_models.plain_text import visible

    return visible(text)


_JSON_ON_STDOUT = ContextVar("json_on_stdout", default=False)


@contextmanager
def beside_json(as_json: bool) -> Iterator[None]:
    """Print results on stderr inside the context if stdout is for JSON."""
    before = _JSON_ON_STDOUT.set(as_json)
    try:
        yield
    finally:
        _JSON_ON_STDOUT.reset(before)


def results_on_stderr() -> bool:
    """Return whether results go to stderr, because stdout is for JSON."""
    return _JSON_ON_STDOUT.get()


def tell(line: str) -> None:
    """Print a line about progress, or a remark, on stderr."""
    typer.echo(visible(line), err=True)


def say(line: str) -> None:
    """Print a line of a result: on stdout, unless that is for JSON."""
    typer.echo(visible(line), err=results_on_stderr())


def terminal(stderr: bool = False) -> "Console":
    """Return the one kind of console: it shows texts as they are; no markup, emoji code or escape acts."""
    from rich.console import Console
    from rich.segment import Segment

    class Careful(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with code 1, which means a failed check

    return Careful(stderr=stderr, markup=False, emoji=False, highlight=False)


def speak_any_language() -> None:
    """Escape characters that a stream's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
