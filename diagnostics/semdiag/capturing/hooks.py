"""Hooks on a user's module, which may be copied or saved meanwhile."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Handles = tuple[RemovableHandle, RemovableHandle]


class Hook:
    """A hook that does nothing in copies and saved files of its module, even where semdiag is not installed.

    Args:
        run: what it does.
    """

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> None:
        """Run it."""
        self._run(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a function that takes anything and returns None.

        The pickle also holds a handle, so that hooks that the reader adds get higher numbers. Otherwise one of
        them could get the number of this hook, and torch, which stores calling conventions by that number, would
        call it like this one.
        """
        return getattr, (nullcontext(RemovableHandle(OrderedDict())), "__exit__")


def put_on(
    module: nn.Module, before: Callable[..., None], after: Callable[..., None], prepend: bool = False
) -> Handles:
    """Put hooks on a module; its copies do not run them.

    Args:
        module: the user's.
        before: gets module, arguments and keyword arguments of each forward pass.
        after: gets module, arguments and output, None after an exception.
        prepend: whether ``before`` runs before existing hooks.

    Returns:
        Handles that remove them.
    """

    def unless_removed(*arguments: Any) -> None:
        if len(arguments) == 3:  # torch omits keyword arguments if the hook was removed meanwhile
            before(*arguments)

    return (
        module.register_forward_pre_hook(Hook(unless_removed), prepend=prepend, with_kwargs=True),
        module.register_forward_hook(Hook(after), always_call=True),
    )
