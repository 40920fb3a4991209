"""Send a monitor's numbers to TensorBoard, and to a function like ``wandb.log``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from semdiag_models import InputError


class ScalarWriter(Protocol):
    """The part of a TensorBoard SummaryWriter that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Log one number."""


class Scalars:
    """Sends numbers by name."""

    def __init__(
        self,
        tensorboard: Path | str | ScalarWriter | None,
        log: Callable[[dict[str, float], int], object] | None,
    ) -> None:
        self._tensorboard, self._log = tensorboard, log
        self._own = isinstance(tensorboard, Path | str)
        self._writer: Any = None

    @property
    def wanted(self) -> bool:
        """Whether there is a receiver."""
        return self._writer is not None or self._log is not None

    def open(self) -> None:
        """Open the writer."""
        self._writer = self._tensorboard
        if self._own:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise InputError(
                    "TensorBoard is not installed. Install it with: pip install tensorboard."
                ) from None
            self._writer = SummaryWriter(str(self._tensorboard))

    def send(self, step: int, numbers: dict[str, float]) -> None:
        """Send the numbers of a step."""
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
        if self._log is not None:
            self._log(numbers, step)

    def close(self) -> None:
        """Close the writer, unless the user passed it."""
        if self._own and self._writer is not None:
            self._writer.close()
        self._writer = None
