"""A monitor inside the training loop of transformers. Importing this needs transformers."""

from typing import Any

from torch import nn

from semdiag.measuring.calls.monitor import Monitor
from semdiag_files import InputError

try:
    from transformers import TrainerCallback
except ImportError:
    raise InputError('MonitorCallback needs transformers: pip install "transformers>=5.1".') from None


class MonitorCallback(TrainerCallback):
    """A :class:`~semdiag.Monitor` for the Trainer of transformers."""

    def __init__(self, every: int = 200, **options: Any) -> None:
        self.monitor: Monitor | None = None
        self._every = every
        self._options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start the monitor of the model that is trained."""
        if self.monitor is not None:
            self.monitor.stop()  # of a training that an exception ended
        model: nn.Module = more["model"]
        counted = {"accumulation": args.gradient_accumulation_steps, "first_step": state.global_step}
        self.monitor = Monitor(model, self._every, **{**counted, **self._options}).start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Tell the monitor which optimiser step begins."""
        if self.monitor is not None:
            self.monitor.begin_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop the monitor."""
        if self.monitor is not None:
            self.monitor.stop()
