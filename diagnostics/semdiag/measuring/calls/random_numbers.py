"""Detect random numbers that a model draws in evaluation mode, and replay them."""

import torch
from torch import Tensor

DRAWS = "its forward pass draws random numbers in evaluation mode"


class RandomNumbers:
    """The state of torch's global generators at construction, for the CPU and a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._now()

    @property
    def drawn(self) -> bool:
        """Whether numbers have been drawn since."""
        return any(not torch.equal(now, then) for now, then in zip(self._now(), self._states, strict=True))

    def again(self) -> None:
        """Restore the state, so that the same numbers are drawn again."""
        torch.set_rng_state(self._states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._states[1], self._device)

    def _now(self) -> list[Tensor]:
        of_device = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *of_device]
