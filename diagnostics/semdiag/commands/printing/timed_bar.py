"""A bar with the time spent and the time left, on stderr."""

from abc import ABC, abstractmethod
from typing import Any, Self

from semdiag.presenting.terminal.minutes import Minutes
from semdiag.presenting.terminal.terminal import terminal


class TimedBar(ABC):
    """Progress of a training on a terminal; in a log, a line a minute."""

    def __init__(self, columns: tuple[str, str, str, str], quiet: bool, start: str = "", **task: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.table import Column

        before, after, left, end = columns
        self._quiet = quiet
        self._bar = Progress(
            TextColumn(before, markup=False),
            BarColumn(),
            *([TextColumn(after, markup=False)] if after else []),
            TimeElapsedColumn(table_column=Column(min_width=7)),  # on 80 columns the bar gives way, not the times
            TextColumn(left, markup=False),
            TimeRemainingColumn(table_column=Column(min_width=7)),
            TextColumn(end, markup=False),
            console=(console := terminal(stderr=True)),
            disable=quiet,
        )
        self._minutes = Minutes(start, self._state, self._share, quiet or console.is_terminal)
        self._task = self._bar.add_task("", **task)
        self._completed_before = self._bar.tasks[0].completed

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._minutes.__exit__(None, None, None)
        if not self._bar.disable:  # before rich 14.3 it would leave an empty line
            self._bar.stop()

    @abstractmethod
    def _state(self) -> str:
        """Return what the bar shows, in words."""

    def _share(self) -> float | None:
        """Return the share done of this session's work; what was done before took an unknown time."""
        (task,) = self._bar.tasks
        left = (task.total or 0) - self._completed_before
        return (task.completed - self._completed_before) / left if left else None
