"""The monitors of several processes: what all of them saw is put together once a look."""

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

PATIENCE = timedelta(minutes=10)  # for which a look waits for the other ranks


@dataclass(frozen=True)
class Look:
    """What one rank saw of one step.

    Attributes:
        step: its number.
        rows: of the table of layers.
        heads: of the table of heads.
        parts: by module, which part of its weights the rank holds.
    """

    step: int
    rows: list[dict[str, Any]]
    heads: list[dict[str, Any]]
    parts: dict[str, str]


class Ranks:
    """This process among those of torch.distributed, asked by a group of its own, on the CPU.

    Args:
        ranks: ``all``: a look is that of all ranks, where there are several; ``own``: of this one alone.

    Attributes:
        rank: of this process; 0 where it is alone.

    Raises:
        InputError: if ranks is neither.
    """

    def __init__(self, ranks: str) -> None:
        if ranks not in ("all", "own"):
            raise InputError(f'ranks is "all" or "own". Got {ranks!r}.')
        self._together, self._wanted = ranks == "all" and _several(), ranks == "all"
        self.rank = dist.get_rank() if self._together else 0
        self._group: Any = None
        self._parts: dict[str, str] = {}

    @property
    def speaks(self) -> bool:
        """Whether this process tells what all of them would tell alike."""
        return self.rank == 0 or self._group is None

    def open(self, settings: Mapping[str, Any]) -> None:
        """Meet the other ranks.

        Args:
            settings: in which their monitors must agree.

        Raises:
            InputError: if a rank starts no monitor, or one with other settings.
        """
        if self._wanted and not self._together and _several():
            warnings.warn(
                "The monitor was made before torch.distributed began: it looks at its own process alone. Make it "
                "behind init_process_group.",
                stacklevel=3,
            )
        if not self._together or self._group is not None:
            return
        try:
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
            told = self._gathered(dict(settings))
        except (RuntimeError, ValueError) as error:
            self.leave()
            raise InputError(
                f"A monitor looks at all ranks together, and {_why(error)} when it started. Start it in every "
                'process, with gloo, or give it ranks="own".'
            ) from None
        for rank, other in enumerate(told):
            if unlike := [name for name in settings if settings[name] != other[name]]:
                self.leave()
                (name, *_) = unlike
                raise InputError(
                    f"Monitors of all ranks look together: {name} is {settings[name]!r} in rank {self.rank} and "
                    f'{other[name]!r} in rank {rank}. Give all the same, or ranks="own".'
                )

    def together(self, look: Look) -> list[Look]:
        """What every rank saw of a step, in their order; where they cannot be asked, what this one saw.

        Every rank gets the same. It waits until all ranks have looked. A rank that has ended or does not come,
        or looks at another step, is told of in one warning, and from then on this one is alone.

        Args:
            look: of this rank.
        """
        if self._group is None:
            return [look]
        try:
            looks: list[Look] = self._gathered(look)
        except (RuntimeError, ValueError) as error:
            self._go_on_alone(look.step, _why(error))
            return [look]
        steps = [other.step for other in looks]
        if len(set(steps)) > 1:
            said = ", ".join(map(str, steps))
            self._go_on_alone(look.step, f"the ranks look at different steps ({said})")
            return [look]
        return looks

    def fail(self, step: int) -> None:
        """Tell the others that this rank's forward did not come to its end."""
        if self._group is not None:
            self._go_on_alone(step, "its forward failed")

    def part(self, model: nn.Module, name: str) -> None:
        """Note which part of a module's weights this rank holds when it first attends.

        Replicated weights, and those that FSDP has gathered, are the same in every rank; those of tensor parallel
        layers are not, and then the ranks' heads are different heads.

        Args:
            model: that is watched.
            name: of the module.
        """
        if self._group is not None and name not in self._parts:
            self._parts[name] = _fingerprint(model, name)

    @property
    def parts(self) -> dict[str, str]:
        """By module, what :meth:`part` noted."""
        return dict(self._parts)

    def leave(self) -> None:
        """Close the group, by which ranks that wait know at once."""
        if self._group is not None:
            with suppress(Exception):  # of a training that has closed all groups
                dist.destroy_process_group(self._group)
        self._group = None

    def _gathered(self, own: Any) -> list[Any]:
        size = dist.get_world_size(self._group) if dist.is_initialized() else -1
        if size < 1:
            raise RuntimeError("the training has closed its groups")
        found: list[Any] = [None] * size
        dist.all_gather_object(found, own, group=self._group)
        return found

    def _go_on_alone(self, step: int, why: str) -> None:
        self.leave()
        warnings.warn(
            f"The monitor of rank {self.rank} looks at its own rank alone from step {step} on: {why}.",
            stacklevel=4,
        )


def _several() -> bool:
    """Whether there are other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _why(error: Exception) -> str:
    """What a failed collective says of the other ranks."""
    said = str(error)
    if "closed by peer" in said or "reset by peer" in said or "Broken pipe" in said:
        return "another rank has ended or stopped its monitor"
    if "imed out" in said or "imeout" in said:
        return f"not every rank came within {PATIENCE.total_seconds():g} s"
    return f"the ranks could not be asked ({' '.join(said.split())[:120]})"


def _fingerprint(model: nn.Module, name: str) -> str:
    """A text that is the same in ranks that hold the same weights of a module, and hardly in others."""
    modules = {known.replace("_orig_mod", "").strip("."): module for known, module in model.named_modules()}
    found = hashlib.sha256()
    while True:  # of a module without weights, those around it
        seen = _weights(modules[name]) if name in modules else []
        if seen or not name:
            break
        name = name.rpartition(".")[0]
    for weight in seen:
        found.update(repr(weight.tolist()).encode())  # numpy() would keep FSDP from putting the weight away
    return found.hexdigest()[:16]


def _weights(module: nn.Module) -> list[torch.Tensor]:
    """A few values of each parameter, as this rank holds them while the module runs."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    found, left = [], [module]
    while left:
        each = left.pop()
        for parameter in each.parameters(recurse=False):
            own = parameter.detach()
            values = (own.to_local() if isinstance(own, DTensor) else own).reshape(-1)
            if len(values):  # none of those that a training has put away
                found.append(values[:: max(1, len(values) // 16)][:16])
        # Inside, what FSDP wraps by itself is put away again when attention runs.
        left += [
            inner for inner in each.children() if not isinstance(inner, FSDPModule | FullyShardedDataParallel)
        ]
    return found
