"""Higher-order operators (torch.cond, while_loop, scan, map, …), which call Python functions below all modes."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves, tree_map

from semdiag.capturing.recording import is_plain

MODES_SUPPORTED = hasattr(TorchDispatchMode, "supports_higher_order_operators")  # from torch 2.9 on
MAY_HIDE = "a higher-order operator whose body cannot be inspected: it may hide attention"
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_OPEN = ("map_impl", "scan", "while_loop", "while_loop_stack_output")  # their kernels run under dispatch modes
_CLOSED = ("cond", "invoke_subgraph", "hints_wrapper", "strict_mode")  # theirs do not; they only call a body
_HARMLESS = ("print", "inline_asm_elementwise", "_export_tracepoint", "flex_attention", "flex_attention_backward")


def run_as_written(
    func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any], ours: type[TorchDispatchMode]
) -> Callable[[], Any] | None:
    """Return a function that runs an operator's bodies in place: under all modes, with gradients."""
    name, kernel = func.__name__, func.py_kernels.get(_EXPLICIT)
    stack = _get_current_dispatch_mode_stack()
    plain = all(is_plain(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    traced = not all(isinstance(mode, ours) for mode in stack) or torch._C._are_functorch_transforms_active()
    if kernel is None or isinstance(kernel, torch._C.DispatchKey) or traced or not plain:
        return None
    if name == "scan":  # its kernel calls this one, and refuses modes
        from torch._higher_order_ops.scan import generic_scan

        def scan(combine: Any, init: Any, xs: Any, additional_inputs: Any) -> Any:
            body = _first_unseen(combine) if _runs_once_more() else combine
            return generic_scan(body, init, xs, additional_inputs=additional_inputs)  # type: ignore[no-untyped-call]

        kernel = scan
    if name in _OPEN:
        return lambda: kernel(*args, **kwargs)
    if name not in _CLOSED:
        return None

    def run() -> Any:
        given, named = under_modes((args, kwargs), stack)
        with _disable_current_modes():
            return kernel(*given, **named)

    return run


def register_mode(operator: HigherOrderOperator, mode: type[TorchDispatchMode]) -> None:
    """Make a higher-order operator dispatch to a mode, for torch versions that do not ask the mode."""
    if not MODES_SUPPORTED and mode not in operator.python_key_table:

        def rule(own: TorchDispatchMode, *args: Any, **kwargs: Any) -> Any:
            return own.__torch_dispatch__(operator, (), args, kwargs)  # type: ignore[no-untyped-call]

        operator.py_impl(mode)(rule)


def has_known_bodies(func: object) -> bool:
    """Return whether this is a higher-order operator whose arguments contain its bodies as functions."""
    return isinstance(func, HigherOrderOperator) and func.__name__ in (*_OPEN, *_CLOSED)


def under_modes(arguments: Any, modes: Sequence[TorchDispatchMode]) -> Any:
    """Wrap the functions among a higher-order operator's arguments so that they run under ``modes``."""
    return tree_map(lambda x: _under(x, modes) if _is_body(x) else x, arguments)


@cache
def _runs_once_more() -> bool:
    """Return whether this torch's scan runs its body once more than it has steps, to learn its shapes."""
    from torch._higher_order_ops.scan import generic_scan

    runs = []

    def body(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        runs.append(x)
        return carry, carry + x

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        generic_scan(body, [torch.zeros(1)], [torch.zeros(1, 1)])  # type: ignore[no-untyped-call]
    return len(runs) > 1


def _first_unseen(body: Callable[..., Any]) -> Callable[..., Any]:
    """Hide a body's first run from all modes."""
    runs = 0

    def run(*args: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs > 1:
            return body(*args)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return body(*args)

    return run


def _is_body(x: object) -> bool:
    return callable(x) and not isinstance(x, Tensor | OpOverload | type)


def _under(body: Callable[..., Any], modes: Sequence[TorchDispatchMode]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        for mode in modes:
            _push_mode(mode)
        try:
            return body(*args, **kwargs)
        finally:
            for _ in modes:
                _pop_mode()

    if getattr(body, "_boxed_call", False):  # takes its operands as a list
        run._boxed_call = True  # type: ignore[attr-defined]
    return run


def may_hide(
    func: HigherOrderOperator, arguments: Any, fixed: Callable[[Tensor], bool], looked_for: Callable[[Any], bool]
) -> bool:
    """Return whether a higher-order operator whose bodies were not seen may compute attention."""
    if func.__name__ in _HARMLESS:
        return False
    leaves = tree_leaves(arguments)
    operators = [x for x in leaves if isinstance(x, OpOverload)]
    if operators and not any(map(looked_for, operators)):
        return False
    return _takes_inputs(leaves, fixed)


def _takes_inputs(leaves: Iterable[object], fixed: Callable[[Tensor], bool]) -> bool:
    return any(isinstance(x, Tensor) and is_plain(x) and x.is_floating_point() and not fixed(x) for x in leaves)
