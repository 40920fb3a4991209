"""The states of the global random generators, and several streams of random numbers side by side."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

RandomState = dict[str, Tensor]  # state of the generator of each kind of device

_streams: list[RandomState] | None = None  # those of the seeds in a stacked batch, while one is run


def random_state(device: torch.device) -> RandomState:
    """Return the states of the CPU's and the device's global generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def restore_random_state(states: RandomState) -> None:
    """Set the global generators of the devices that are there.

    Args:
        states: from :func:`random_state`.

    Raises:
        RuntimeError: if a state is damaged.
        TypeError: if it is not a tensor of bytes.
    """
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])


@contextmanager
def streams(states: list[RandomState]) -> Iterator[None]:
    """Let :func:`on_each_stream` draw for every part of a stacked batch from a random state of its own.

    Args:
        states: one a part; each entry is replaced by the state after the draws.
    """
    global _streams
    if _streams is not None:
        raise RuntimeError("Streams of random numbers cannot be nested.")
    _streams = states
    try:
        yield
    finally:
        _streams = None


@contextmanager
def stream(states: list[RandomState], part: int, device: torch.device) -> Iterator[None]:
    """Draw from one state, advance it, and leave the global generators as they were.

    Args:
        states: those of all parts.
        part: which one.
        device: where the draws are made.
    """
    global _streams
    before, active = random_state(device), _streams
    restore_random_state(states[part])
    _streams = None
    try:
        yield
        states[part] = random_state(device)
    finally:
        _streams = active
        restore_random_state(before)


def on_each_stream(draw: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Call a random function; within :func:`streams`, once for each part of the batch, from its own state.

    Args:
        draw: takes the tensors and returns one; the first dimension of all is the batch.
        tensors: the batch; None is passed on. The first is not None.

    Returns:
        What ``draw`` returns; of several parts, put together again.
    """
    if _streams is None:
        return draw(*tensors)
    n, results = len(_streams), []
    pieces = [[None] * n if t is None else t.chunk(n) for t in tensors]
    for part, piece in enumerate(zip(*pieces, strict=True)):
        first = piece[0]
        assert first is not None
        with stream(_streams, part, first.device):
            results.append(draw(*piece))
    return torch.cat(results)
