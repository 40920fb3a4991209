"""Which parameters of a model that a user's function builds were never loaded, and which weights nobody took."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

Place = tuple[int, str]  # a module's id, and the name of its parameter


@dataclass
class Weights:
    """What calls of ``load_state_dict`` left out. It fills while the function runs.

    Attributes:
        unexpected: names of weights that no module took.
    """

    unexpected: list[str] = field(default_factory=list)
    _missed: set[Place] = field(default_factory=set)
    _loaded: set[Place] = field(default_factory=set)
    _modules: list[nn.Module] = field(default_factory=list)  # kept, so that no id is used twice

    def add(self, module: nn.Module, names: set[str], missing: list[str], unexpected: list[str]) -> None:
        """Count one call.

        Args:
            module: that loaded.
            names: in the dictionary.
            missing: names that the dictionary lacks.
            unexpected: names that the module lacks.
        """
        self._modules.append(module)
        self.unexpected += unexpected
        self._missed |= {_place(module, name) for name in missing}
        self._loaded |= {_place(module, name) for name in names - set(unexpected)}

    def not_loaded(self, model: nn.Module) -> list[str]:
        """Names of a model's parameters and buffers that calls missed, and none loaded.

        Args:
            model: that was built.
        """
        missed = self._missed - self._loaded
        names = {}
        for prefix, part in model.named_modules():
            for name in (*part._parameters, *part._buffers):
                names[id(part), name] = f"{prefix}.{name}".removeprefix(".")
        return [name for place, name in names.items() if place in missed]

    def said(self, model: nn.Module) -> str:
        """What was left out, in words; empty if nothing was.

        Args:
            model: that was built.
        """
        lost = self.not_loaded(model)
        whole = sum(1 for part in model.modules() for _ in (*part.parameters(False), *part.buffers(False)))
        parts = [f"{len(lost)} of its {whole} parameters and buffers were not loaded ({_few(lost)})"] * bool(lost)
        unexpected = list(dict.fromkeys(self.unexpected))
        parts += [f"{len(unexpected)} weights fit nothing in it ({_few(unexpected)})"] * bool(unexpected and lost)
        return "; ".join(parts)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + ", …" * (len(names) > 3)


def _place(module: nn.Module, name: str) -> Place:
    owner, _, leaf = name.rpartition(".")
    try:
        return id(module.get_submodule(owner)), leaf
    except AttributeError:  # a name that is no path: made by the module's own hooks
        return id(module), name


@contextmanager
def watched_weights() -> Iterator[Weights]:
    """Watch every ``load_state_dict`` inside the context.

    Example:
        >>> import torch
        >>> with watched_weights() as weights:
        ...     model = nn.Linear(1, 1)
        ...     _ = model.load_state_dict({"module.weight": torch.zeros(1, 1)}, strict=False)
        >>> weights.not_loaded(model), weights.unexpected
        (['weight', 'bias'], ['module.weight'])
    """
    weights, original = Weights(), nn.Module.load_state_dict

    def load(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        names = {str(name) for name in state_dict}
        found = original(self, state_dict, *args, **kwargs)
        weights.add(self, names, list(found.missing_keys), list(found.unexpected_keys))
        return found

    nn.Module.load_state_dict = load  # type: ignore[method-assign]
    try:
        yield weights
    finally:
        nn.Module.load_state_dict = original  # type: ignore[method-assign]
