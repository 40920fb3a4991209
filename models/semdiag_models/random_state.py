"""The states of the global random generators."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

RandomState = dict[str, Tensor]  # generator state by kind of device


def random_state(device: torch.device) -> RandomState:
    """Return the states of the CPU's and the device's global generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def restore_random_state(states: RandomState) -> None:
    """Restore the global generators of the available devices."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])


@contextmanager
def drawing_from(states: list[RandomState] | None, part: int, device: torch.device) -> Iterator[None]:
    """Draw, inside, from one of several states, which advances; the global generators are restored."""
    if states is None:
        yield
        return
    before = random_state(device)
    restore_random_state(states[part])
    try:
        yield
        states[part] = random_state(device)
    finally:
        restore_random_state(before)
