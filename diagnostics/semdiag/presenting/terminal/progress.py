"""Progress on stderr."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from semdiag.presenting.terminal.minutes import Minutes, clock
from semdiag.presenting.terminal.terminal import counted, terminal


class Stages:
    """Two bars on a terminal, the stages of a command and the steps of the running one; elsewhere a line a minute.

    Args:
        name: of what all stages together do.
        stages: how many there will be.
        quiet: whether nothing is shown.
        what: it is done to, for the first line in a log, said after the first batch; empty: no such line.
    """

    def __init__(self, name: str, stages: int, quiet: bool, what: str = "") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
        console = terminal(stderr=True)
        self._hidden = quiet or not console.is_terminal  # elsewhere even a transient bar leaves an empty line
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, disable=self._hidden, transient=True)
        self._whole, self._step = self._bar.add_task(name, total=stages), self._bar.add_task("loading", total=None)
        self._begun = False
        self._name = name
        start = f"{name} {what} in {counted(stages, 'stage')}" if what else ""
        self._minutes = Minutes(start, self._state, self._share, quiet or console.is_terminal)
        self._open = ExitStack()
        self._started = self._stage_started = clock()

    def __enter__(self) -> Self:
        if not self._hidden:  # before rich 14.3 even a disabled one leaves an empty line
            self._open.enter_context(self._bar)
        self._open.enter_context(self._minutes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def announce(self, stage: str, steps: int) -> None:
        """Begin a stage and end the one before.

        Args:
            stage: its name.
            steps: that it will take; 0 if that is not known.
        """
        if self._begun:
            self._minutes.begin()
        self._bar.advance(self._whole, int(self._begun))
        self._begun, self._stage_started = True, clock()
        self._bar.reset(self._step, total=steps or None, description=stage[-50:])

    def expect(self, steps: int) -> None:
        """Set how many steps the running stage will take, once that is known."""
        self._bar.update(self._step, total=steps)

    def advance(self, steps: int) -> None:
        """Count finished steps of the running stage."""
        self._minutes.begin()  # no sooner: what does not suit a model is refused in its first batch, in one line
        self._bar.advance(self._step, steps)

    def _state(self) -> str:
        """Return what the bars show, in words."""
        whole, step = self._bar.tasks
        counted = f" ({step.completed:g} of {step.total:g})" if step.total else ""
        stages = f" stage {whole.completed + 1:g} of {whole.total:g}," if whole.total != 1 else ""
        return f"{self._name}{stages} {step.description}{counted}"

    def _share(self) -> float | None:
        """Return the share of the time that is over; later stages are taken to last as long as those so far."""
        whole, step = self._bar.tasks
        if not whole.total:
            return None
        if not step.total or not step.completed:
            return whole.completed / whole.total
        spent, own = (clock() - since for since in (self._started, self._stage_started))
        until_next = spent - own + own * step.total / step.completed
        stages = whole.completed + 1
        return spent / (until_next * whole.total / stages)
