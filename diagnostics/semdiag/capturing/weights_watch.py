"""Which parameters of a model that a user's function builds were never loaded, and which weights nobody took."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

Place = tuple[int, str]  # a module's id, and the name of its parameter


@dataclass
class Weights:
    """What calls of ``load_state_dict`` left out. It fills while the function runs.

    Attributes:
        unexpected: names of weights that no module took.
    """

    unexpected: list[str] = field(default_factory=list)
    _missed: dict[Place, float] = field(default_factory=dict)  # with a sum that tells whether it was written later
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
        own = dict(module.named_parameters(remove_duplicate=False))
        self._missed |= {_place(module, name): _sum(own[name]) for name in missing if name in own}
        self._loaded |= {_place(module, name) for name in names - set(unexpected)}

    def not_loaded(self, model: nn.Module) -> list[str]:
        """Names of a model's parameters that calls missed, and that nothing wrote: no call, tie or copy.

        Args:
            model: that was built.
        """
        every = [
            ((id(part), name), f"{prefix}.{name}".removeprefix("."), parameter)
            for prefix, part in model.named_modules()
            for name, parameter in part.named_parameters(recurse=False)
        ]
        loaded = {id(parameter) for place, _, parameter in every if place in self._loaded}
        return [
            name
            for place, name, parameter in every
            if id(parameter) not in loaded and self._missed.get(place) == _sum(parameter)
        ]

    def said(self, model: nn.Module) -> str:
        """What was left out, in words; empty if nothing was.

        Args:
            model: that was built.
        """
        lost = self.not_loaded(model)
        if not lost:
            return ""
        said = f"{len(lost)} of its {len(list(model.parameters()))} parameters were not loaded ({_few(lost)})"
        unexpected = list(dict.fromkeys(self.unexpected))
        return said + f"; {len(unexpected)} weights fit nothing in it ({_few(unexpected)})" * bool(unexpected)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + ", …" * (len(names) > 3)


def _sum(parameter: Tensor) -> float:
    """A number that changes when the parameter is written; 0 of one that holds nothing yet."""
    return 0.0 if parameter.is_meta else float(parameter.detach().double().abs().sum())


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
