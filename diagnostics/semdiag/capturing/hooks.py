"""Hooks on a module of the user's, who may copy or save it meanwhile."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Handles = tuple[RemovableHandle, RemovableHandle]


class Hook:
    """A hook of a module in whose copies and files it does nothing, also where there is no semdiag.

    Args:
        run: what it does.
    """

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> None:
        """Do it."""
        self._run(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """What a copy has in its place: a function that takes anything and returns None.

        It brings a handle: whoever reads it numbers further hooks after it. Else a hook of the reader's could have
        the number of this one, and torch, which files by that number how a hook is called, would call it the same.
        """
        return getattr, (nullcontext(RemovableHandle(OrderedDict())), "__exit__")


def put_on(
    module: nn.Module, before: Callable[..., None], after: Callable[..., None], prepend: bool = False
) -> Handles:
    """Put hooks on a module, which its copies do not run.

    Args:
        module: of the user's.
        before: gets module, arguments and keyword arguments of each forward.
        after: gets module, arguments and output, None after an exception.
        prepend: whether ``before`` comes before hooks that are there.

    Returns:
        Handles that remove them.
    """

    def unless_removed(*arguments: Any) -> None:
        if len(arguments) == 3:  # torch gives no keyword arguments to a hook that was removed since the call began
            before(*arguments)

    return (
        module.register_forward_pre_hook(Hook(unless_removed), prepend=prepend, with_kwargs=True),
        module.register_forward_hook(Hook(after), always_call=True),
    )
