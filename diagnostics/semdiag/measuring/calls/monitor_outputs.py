"""What a monitor keeps and sends: its two tables, with their files, and the numbers for loggers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from semdiag.measuring.calls.monitor_faults import Faults
from semdiag.measuring.calls.monitor_heads import head_columns, scalars
from semdiag.measuring.calls.monitor_log import MonitorLog
from semdiag.measuring.calls.monitor_rows import columns
from semdiag.measuring.calls.monitor_scalars import Scalars, ScalarWriter


class Outputs:
    """The tables of a monitor, and whoever gets what is added to them.

    Args:
        path: of the file of layers; None: rows stay in memory.
        tensorboard: see :class:`~semdiag.measuring.calls.monitor_scalars.Scalars`.
        log: likewise.
        k: counterfactual numbers of heavy hitters.
        first_step: of the training.

    Attributes:
        layers: rows of layers.
        heads: rows of heads.
    """

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
        """Take the files and the loggers.

        Raises:
            InputError: if one cannot be had.
        """
        self.layers.open()
        self.heads.open()
        self._scalars.open()

    def add(self, step: int, rows: list[dict[str, Any]], heads: list[dict[str, Any]], faults: Faults) -> None:
        """Keep and send the rows of a step; what fails is told, and stops nothing.

        Args:
            step: its number.
            rows: of layers.
            heads: of heads.
            faults: to whom it is told.
        """
        if self._scalars.wanted:
            with faults.told():
                self._scalars.send(step, scalars(heads, self._k))
        for log, more in ((self.layers, rows), (self.heads, heads)):
            with faults.told():
                log.add(more)

    def close(self, faults: Faults) -> None:
        """Write what is left, and let all go.

        Args:
            faults: who is told what fails.
        """
        for log in (self.layers, self.heads):
            with faults.told():
                log.close()
        self._scalars.close()
