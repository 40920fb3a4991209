"""Find the device with a name, or one with float64, and the name of the processor."""

import platform
from pathlib import Path

import torch

from semdiag_models.errors import InputError, unknown_name
from semdiag_models.reading import LARGEST_JSON, read_bytes

BEST = "cuda", "mps", "cpu"  # of which auto takes the first that is there


def find_device(name: str) -> torch.device:
    """Return the device that the user named."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if torch.accelerator.is_available() and (other := torch.accelerator.current_accelerator()):
        there.setdefault(other.type, True)
    if name == "auto":
        return torch.device(next(device for device in BEST if there.get(device)))
    if name not in there:
        raise unknown_name("device", name, ["auto", *there])
    if not there[name]:
        raise InputError(f"No {name} device here. Use --device auto or --device cpu.")
    return torch.device(name)


def with_float64(device: torch.device | str) -> torch.device:
    """Return the device, or the CPU instead of MPS, which has no float64."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device


def processor() -> str:
    """Return the processor's name as the system reports it; like the thread count, it affects a run's rounding."""
    try:
        lines = read_bytes(Path("/proc/cpuinfo"), LARGEST_JSON).decode("utf-8", "replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (InputError, StopIteration):
        return platform.processor() or platform.machine()
