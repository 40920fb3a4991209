"""Find parameters that were never loaded, and weights that nothing took, in models that users' functions build."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

Place = tuple[int, str]  # id of a module, and name of its parameter


@dataclass
class Weights:
    """What calls of ``load_state_dict`` left out; filled while the function runs."""

    unexpected: list[str] = field(default_factory=list)  # names of weights that no module took
    _missed: dict[Place, float] = field(default_factory=dict)  # with a sum that shows whether it is written later
    _loaded: set[Place] = field(default_factory=set)
    _modules: list[nn.Module] = field(default_factory=list)  # kept alive, so that no id is reused

    def add(self, module: nn.Module, names: set[str], missing: list[str], unexpected: list[str]) -> None:
        """Record one call."""
        self._modules.append(module)
        self.unexpected += unexpected
        own = dict(module.named_parameters(remove_duplicate=False))
        self._missed |= {_place(module, name): _sum(own[name]) for name in missing if name in own}
        self._loaded |= {_place(module, name) for name in names - set(unexpected)}

    def not_loaded(self, model: nn.Module) -> list[str]:
        """Return the names of a model's parameters that no call loaded and nothing wrote: no tie, no copy."""
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

    def described(self, model: nn.Module) -> str:
        """Return what was left out, in words; empty if nothing was."""
        lost = self.not_loaded(model)
        if not lost:
            return ""
        described = f"{len(lost)} of its {len(list(model.parameters()))} parameters were not loaded ({_few(lost)})"
        unexpected = list(dict.fromkeys(self.unexpected))
        return described + f"; {len(unexpected)} weights fit nothing in it ({_few(unexpected)})" * bool(unexpected)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + ", …" * (len(names) > 3)


def _sum(parameter: Tensor) -> float:
    """Return a number that changes when the parameter is written; 0 for a meta parameter."""
    return 0.0 if parameter.is_meta else float(parameter.detach().double().abs().sum())


def _place(module: nn.Module, name: str) -> Place:
    owner, _, leaf = name.rpartition(".")
    try:
        return id(module.get_submodule(owner)), leaf
    except AttributeError:  # no path: the module's hooks made this name
        return id(module), name


@contextmanager
def watched_weights() -> Iterator[Weights]:
    """Watch every ``load_state_dict`` inside the context."""
    weights, original = Weights(), nn.Module.load_state_dict

    def load(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        names = {str(name) for name in state_dict}
        result = original(self, state_dict, *args, **kwargs)
        weights.add(self, names, list(result.missing_keys), list(result.unexpected_keys))
        return result

    nn.Module.load_state_dict = load  # type: ignore[method-assign]
    try:
        yield weights
    finally:
        nn.Module.load_state_dict = original  # type: ignore[method-assign]
