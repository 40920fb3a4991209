"""Combine the monitors of several processes: each look joins what all ranks saw."""

import hashlib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from semdiag_models import InputError

PATIENCE = timedelta(minutes=10)  # how long a look waits for the other ranks


@dataclass(frozen=True)
class Look:
    """What one rank saw of one step."""

    step: int  # its number
    rows: list[dict[str, Any]]  # of the table of layers
    heads: list[dict[str, Any]]  # of the table of heads
    parts: dict[str, str]  # by module, a fingerprint of the part of its weights that the rank holds


class Ranks:
    """This process among those of torch.distributed; they communicate in a group of their own, on the CPU."""

    def __init__(self, ranks: str) -> None:
        if ranks not in ("all", "own"):
            raise InputError(f'ranks must be "all" or "own". Got {ranks!r}.')
        self._together, self._wanted = ranks == "all" and _several(), ranks == "all"
        self.rank = dist.get_rank() if self._together else 0
        self._group: Any = None
        self._parts: dict[str, str] = {}

    @property
    def reports(self) -> bool:
        """Whether this process reports what all of them would report alike."""
        return self.rank == 0 or self._group is None

    def open(self, settings: Mapping[str, Any]) -> None:
        """Connect to the other ranks."""
        if self._wanted and not self._together and _several():
            warnings.warn(
                "The monitor was made before torch.distributed was initialised, so it sees its own process only. "
                "Make it after init_process_group.",
                stacklevel=3,
            )
        if not self._together or self._group is not None:
            return
        try:
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
            others = self._gathered(dict(settings))
        except (RuntimeError, ValueError) as error:
            self.leave()
            raise InputError(
                f"A monitor joins all ranks, but {_why(error)} when it started. Start it in every process, with "
                'gloo, or give it ranks="own".'
            ) from None
        for rank, other in enumerate(others):
            if unlike := [name for name in settings if settings[name] != other[name]]:
                self.leave()
                (name, *_) = unlike
                raise InputError(
                    f"Monitors of all ranks look together: {name} is {settings[name]!r} in rank {self.rank} and "
                    f'{other[name]!r} in rank {rank}. Give all the same value, or ranks="own".'
                )

    def together(self, look: Look) -> list[Look]:
        """Return what every rank saw of a step, in rank order; if they cannot be reached, what this one saw."""
        if self._group is None:
            return [look]
        try:
            looks: list[Look] = self._gathered(look)
        except (RuntimeError, ValueError) as error:
            self._go_on_alone(look.step, _why(error))
            return [look]
        steps = [other.step for other in looks]
        if len(set(steps)) > 1:
            numbers = ", ".join(map(str, steps))
            self._go_on_alone(look.step, f"the ranks look at different steps ({numbers})")
            return [look]
        return looks

    def fail(self, step: int) -> None:
        """Tell the others that this rank's forward pass failed."""
        if self._group is not None:
            self._go_on_alone(step, "its forward pass failed")

    def part(self, model: nn.Module, name: str) -> None:
        """Note which part of a module's weights this rank holds when it first attends."""
        if self._group is not None and name not in self._parts:
            self._parts[name] = _fingerprint(model, name)

    @property
    def parts(self) -> dict[str, str]:
        """What :meth:`part` noted, by module."""
        return dict(self._parts)

    def leave(self) -> None:
        """Close the group, which other ranks notice at once."""
        if self._group is not None:
            with suppress(Exception):  # training may have closed all groups
                dist.destroy_process_group(self._group)
        self._group = None

    def _gathered(self, own: Any) -> list[Any]:
        size = dist.get_world_size(self._group) if dist.is_initialized() else -1
        if size < 1:
            raise RuntimeError("the training has closed its groups")
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, own, group=self._group)
        return gathered

    def _go_on_alone(self, step: int, why: str) -> None:
        self.leave()
        warnings.warn(
            f"The monitor of rank {self.rank} looks at its own rank only from step {step} on: {why}.",
            stacklevel=4,
        )


def _several() -> bool:
    """Return whether there are other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _why(error: Exception) -> str:
    """Return the reason why a collective operation failed, in words."""
    text = str(error)
    if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return "another rank has ended or stopped its monitor"
    if "imed out" in text or "imeout" in text:
        return f"not every rank arrived within {PATIENCE.total_seconds():g} s"
    return f"the ranks could not be reached ({' '.join(text.split())[:120]})"


def _fingerprint(model: nn.Module, name: str) -> str:
    """Return a text that is equal in ranks with the same weights of a module, and almost never in others."""
    modules = {known.replace("_orig_mod", "").strip("."): module for known, module in model.named_modules()}
    digest = hashlib.sha256()
    while True:  # a module without weights takes those around it
        seen = _weights(modules[name]) if name in modules else []
        if seen or not name:
            break
        name = name.rpartition(".")[0]
    for weight in seen:
        digest.update(repr(weight.tolist()).encode())  # numpy() would keep FSDP from freeing the weight
    return digest.hexdigest()[:16]


def _weights(module: nn.Module) -> list[torch.Tensor]:
    """Return a few values of each parameter, as this rank holds them while the module runs."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    samples, left = [], [module]
    while left:
        each = left.pop()
        for parameter in each.parameters(recurse=False):
            own = parameter.detach()
            values = (own.to_local() if isinstance(own, DTensor) else own).reshape(-1)
            if len(values):  # training may have freed some
                samples.append(values[:: max(1, len(values) // 16)][:16])
        # Inner modules that FSDP wraps separately are freed again when attention runs.
        left += [
            inner for inner in each.children() if not isinstance(inner, FSDPModule | FullyShardedDataParallel)
        ]
    return samples
