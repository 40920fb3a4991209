"""A monitor's outputs: its two tables, with their files, and the numbers for loggers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from semdiag.measuring.calls.monitor_faults import Faults
from semdiag.measuring.calls.monitor_heads import head_columns, scalars
from semdiag.measuring.calls.monitor_log import MonitorLog
from semdiag.measuring.calls.monitor_rows import columns
from semdiag.measuring.calls.monitor_scalars import Scalars, ScalarWriter


class Outputs:
    """The tables of a monitor, and the loggers that get what is added to them."""

    def __init__(
        self,
        path: Path | None,
        tensorboard: Path | str | ScalarWriter | None,
        log: Callable[[dict[str, float], int], object] | None,
        k: Sequence[int],
        first_step: int,
    ) -> None:
        self._k = k
        self._scalars = Scalars(tensorboard, log)
        self.layers = MonitorLog(path, columns(k), first_step)
        beside = None if path is None else path.with_name(f"{path.stem}-heads{path.suffix}")
        self.heads = MonitorLog(beside, head_columns(k), None)

    def open(self) -> None:
        """Open the files and the loggers."""
        self.layers.open()
        self.heads.open()
        self._scalars.open()

    def add(self, step: int, rows: list[dict[str, Any]], heads: list[dict[str, Any]], faults: Faults) -> None:
        """Keep and send the rows of a step; failures are reported to ``faults`` and stop nothing."""
        if self._scalars.wanted:
            with faults.reporting():
                self._scalars.send(step, scalars(heads, self._k))
        for log, more in ((self.layers, rows), (self.heads, heads)):
            with faults.reporting():
                log.add(more)

    def close(self, faults: Faults) -> None:
        """Write the remaining rows, and close everything; failures are reported to ``faults``."""
        for log in (self.layers, self.heads):
            with faults.reporting():
                log.close()
        self._scalars.close()
