"""Progress of a command as bars on stderr."""

from typing import Self

from semdiag.measuring.progress import SurveyProgress
from semdiag.measuring.words import counted
from semdiag.presenting.terminal import Minutes, clock, escaped, tell, terminal

_WIDTH = 50  # of a stage's name


def _shown(stage: str) -> str:
    """Return a stage's name, of a long path the last folders that have room."""
    stage = escaped(stage)  # escapes take room, which the console would not give them
    end = stage[1 - _WIDTH :]
    return stage if len(stage) <= _WIDTH else f"…{end[max(0, end.find('/')) :]}"


class Stages(SurveyProgress):
    """Two progress bars on a terminal, for a command's stages and a stage's steps; else a line a minute."""

    def __init__(self, name: str, stages: int, quiet: bool, what: str = "") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
        console = terminal(stderr=True)
        self._quiet = quiet
        self._hidden = quiet or not console.is_terminal  # in a file even a transient bar leaves an empty line
        self._bar = Bars(*columns, TimeElapsedColumn(), console=console, disable=self._hidden, transient=True)
        self._whole = self._bar.add_task(escaped(name), total=stages)
        self._step = self._bar.add_task("loading", total=None)
        self._begun = False
        self._name = name
        start = f"{name} {what} in {counted(stages, 'stage')}" if what else ""
        self._minutes = Minutes(start, self._state, self._share, quiet or console.is_terminal)
        self._started = self._stage_started = clock()

    def __enter__(self) -> Self:
        if not self._hidden:  # before rich 14.3 even a disabled one leaves an empty line
            self._bar.start()
        self._minutes.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._minutes.__exit__()
        if not self._hidden:
            self._bar.stop()

    def announce(self, stage: str, steps: int) -> None:
        """Start a stage and end the one before."""
        if self._begun:
            self._minutes.begin()
        self._bar.advance(self._whole, int(self._begun))
        self._begun = True
        self._stage_started = clock()
        self._bar.reset(self._step, total=steps or None, description=_shown(stage))

    def expect(self, steps: int) -> None:
        """Set the number of steps of the current stage, once it is known."""
        self._bar.update(self._step, total=steps)

    def advance(self, steps: int) -> None:
        """Count finished steps of the current stage."""
        self._minutes.begin()  # not before: unsuitable inputs are refused in the first batch, in one line
        self._bar.advance(self._step, steps)

    def say(self, text: str) -> None:
        """Print a line, unless the command is quiet."""
        if not self._quiet:
            tell(f"semdiag: {text}")

    def _state(self) -> str:
        stages_bar, step = self._bar.tasks
        counted = f" ({step.completed:g} of {step.total:g})" if step.total else ""
        stages = f" stage {stages_bar.completed + 1:g} of {stages_bar.total:g}," if stages_bar.total != 1 else ""
        return f"{self._name}{stages} {step.description}{counted}"

    def _share(self) -> float | None:
        """Return the share of time that has passed; later stages are assumed to last as long as those so far."""
        stages_bar, step = self._bar.tasks
        if not stages_bar.total:
            return None
        if not step.total or not step.completed:
            return stages_bar.completed / stages_bar.total
        in_all, on_stage = (clock() - since for since in (self._started, self._stage_started))
        until_next = in_all - on_stage + on_stage * step.total / step.completed
        stages = stages_bar.completed + 1
        return in_all / (until_next * stages_bar.total / stages)
