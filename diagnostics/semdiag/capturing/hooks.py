"""Hooks on a user's module, which may be copied or saved meanwhile."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.utils.hooks import RemovableHandle

_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class Hook:
    """A hook that does nothing in copies and saved files of its module, even where semdiag is not installed."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> None:
        """Run it."""
        self._run(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a function that takes anything and returns None."""
        return getattr, (nullcontext(RemovableHandle(OrderedDict())), "__exit__")


class Hooks:
    """Two hooks on a module, which its copies do not run; they can be removed however far they have got."""

    def __init__(
        self, module: nn.Module, before: Callable[..., None], after: Callable[..., None], prepend: bool = False
    ) -> None:
        def unless_removed(*arguments: Any) -> None:
            if len(arguments) == 3:  # torch omits keyword arguments if the hook was removed meanwhile
                before(*arguments)

        self._module, self._prepend = module, prepend
        self._before, self._after = Hook(unless_removed), Hook(after)

    def put_on(self) -> None:
        """Register both."""
        self._module.register_forward_pre_hook(self._before, prepend=self._prepend, with_kwargs=True)
        self._module.register_forward_hook(self._after, always_call=True)

    def remove(self) -> None:
        """Remove what is registered of them."""
        take_off(self._module, self._before, self._after)


def take_off(module: nn.Module | None, *hooks: object) -> None:
    """Remove hooks from a module, None: from all modules; nothing happens where they are not registered."""
    owner, prefix = (of_all_modules, "_global") if module is None else (module, "")
    tables = [getattr(owner, prefix + name, None) or {} for name in _TABLES]
    numbers = [n for table in tables for n, hook in table.items() if any(hook is own for own in hooks)]
    for table in tables:
        for number in numbers:
            table.pop(number, None)
