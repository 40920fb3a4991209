"""Private parts of torch and transformers that watches and masks rely on, each with a probe."""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import cache
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import FunctionMeta
from torch.nn.modules import module as of_all_modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from semdiag.capturing import patches, recording
from semdiag.capturing.adapters.fused import CachedKeys, cached_keys, watched_caches
from semdiag.capturing.audit import Remark
from semdiag.capturing.provenance.operations import OperationWatch, plan_of, python_kernel
from semdiag.capturing.provenance.tags import address


class _Running(threading.local):
    names: tuple[str, ...] = ()
    begun: type | None = None


_RUNNING = _Running()


def own_backward() -> str | None:
    """Return the name of the outermost running ``autograd.Function`` that needs gradients; None if none runs."""
    return _RUNNING.names[0] if _RUNNING.names else None


def checkpointed() -> bool:
    """Return whether torch.utils.checkpoint runs this forward pass and will run it again."""
    if not torch.is_grad_enabled() and own_backward() is None:
        return False
    frame = sys._getframe(1)
    home = vars(torch.utils.checkpoint)
    while frame is not None and frame.f_globals is not home:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _recorded_attribute(original: Callable[..., Any], cls: type, name: str) -> Any:
    """Return an attribute of a Function; for ``apply``, one whose ``forward`` is recorded."""
    attribute = original(cls, name)
    if name == "_backward_cls":
        _RUNNING.begun = cls if torch.is_grad_enabled() else None
    if name != "forward" or _RUNNING.begun is not cls:
        return attribute
    _RUNNING.begun = None

    @functools.wraps(attribute)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # else a function mode sees every property access
            tracked = any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values()))
        before = _RUNNING.names
        if tracked:
            _RUNNING.names = (*before, cls.__name__)
        try:
            return attribute(*args, **kwargs)
        finally:
            _RUNNING.names = before

    return forward


OWN_GRADIENTS = patches.SharedChange(
    lambda: patches.replaced(FunctionMeta, "__getattribute__", _recorded_attribute)
)


def _own_gradients() -> bool:
    """Return whether a Function is seen while it runs with gradients, and only then."""
    outermost: list[str | None] = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            outermost.append(own_backward())
            return x.clone()

    x = torch.zeros(1, device="cpu", requires_grad=True)
    with OWN_GRADIENTS.held():
        Identity.apply(x)
        with torch.no_grad():
            Identity.apply(x)
    return [*outermost, own_backward()] == ["Identity", None, None]


def _checkpoints() -> bool:
    """Return whether both kinds of activation checkpoints are seen from inside, and only from there."""
    # The wrapper imports a compiler.
    run = inspect.unwrap(torch.utils.checkpoint.checkpoint)
    inside_one = [checkpointed()]
    x = torch.zeros(1, device="cpu", requires_grad=True)

    def inside(x: Tensor) -> Tensor:
        inside_one.append(checkpointed())
        return x.clone()

    # The other kind imports a compiler, which takes seconds.
    kinds = (True, False) if "torch._dynamo" in sys.modules else (True,)
    with OWN_GRADIENTS.held():
        for reentrant in kinds:
            run(inside, x, use_reentrant=reentrant, preserve_rng_state=False)
    return inside_one == [False, *[True] * len(kinds)] and run.__globals__ is vars(torch.utils.checkpoint)


def _backward_passes() -> bool:
    """Return whether a backward pass is recognised, and nothing else."""
    running = [recording.in_backward()]
    x = torch.zeros(1, device="cpu", requires_grad=True)
    y = x.clone()
    y.register_hook(lambda grad: running.append(recording.in_backward()))  # type: ignore[no-untyped-call]
    torch.autograd.grad(y.sum(), x)
    return [*running, recording.in_backward()] == [False, True, False]


def _transforms() -> bool:
    """Return whether tensors under torch.func transforms are recognised, with what holds their values."""
    x = torch.zeros(1, device="cpu")
    places: list[tuple[bool, bool, bool]] = []

    def noted(row: Tensor) -> Tensor:
        place = recording.untransformed(row).untyped_storage().data_ptr()
        places.append((recording.in_transform(row), recording.in_vmap(), place == x.untyped_storage().data_ptr()))
        return row.sum()

    torch.vmap(noted)(x)
    torch.func.vjp(noted, x)  # torch.func.grad would import the compiler
    noted(x)
    return places == [(True, True, True), (True, False, True), (False, False, True)]


class _Kinds(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # true would import the compiler
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(plan_of(func).kind)
        return func(*args, **(kwargs or {}))


class _Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def _operators() -> bool:
    x = torch.zeros(1, 1, 2, 2, device="cpu")
    runs: dict[str, tuple[Callable[[], Any], ...]] = {
        "softmax": (lambda: x.softmax(-1), lambda: x.log_softmax(-1)),
        "product": (lambda: x @ x, lambda: x[0] @ x[0], lambda: x[0, 0] @ x[0, 0], lambda: x[0, 0] @ x[0, 0, 0]),
        "exponential": (lambda: x.exp(), lambda: x.clone().exp_(), lambda: 2**x, lambda: x.exp2()),
        "fused": (lambda: F.scaled_dot_product_attention(x, x, x),),
    }
    return all(_runs_as(kind, run) for kind, spellings in runs.items() for run in spellings)


def _runs_as(kind: str, run: Callable[[], Any]) -> bool:
    with _Kinds() as mode, torch.no_grad():
        run()
    return kind in mode.seen or (kind == "fused" and "softmax" in mode.seen)


def _composites() -> bool:
    """Return whether the parts of an operator are seen in inference mode, where autograd does not split it."""
    kinds: set[str] = set()
    watch: Any = OperationWatch(recording.Recorder(recording.Watched(nn.Identity(), lambda call: None)))
    watch._look = lambda plan, *args: kinds.add(plan.kind)
    with watch, torch.inference_mode():
        x = torch.zeros(1, 1, 2, 2, device="cpu")
        torch.matmul(x, x).softmax(-1)
    return {"product", "softmax"} <= kinds


@cache
def _library() -> Any:
    """Return what holds an operator of ours; without it, the operator is gone."""
    library: Any = torch.library.Library("semdiag", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("identity(Tensor x) -> Tensor")
    library.impl("identity", lambda x: x.clone(), "CPU")
    return library


def _python_kernels() -> bool:
    x = torch.zeros(1, device="cpu")
    _library()
    ours = torch.ops.semdiag.identity.default
    theirs = torch.ops.aten.exp.default
    return python_kernel(ours, (x,), {}) is not None and python_kernel(theirs, (x,), {}) is None


def _functions() -> bool:
    x = torch.zeros(1, 1, 2, device="cpu")
    w = torch.zeros(6, 2, device="cpu")
    b = torch.zeros(6, device="cpu")
    with torch.no_grad(), _Names() as mode:
        F.scaled_dot_product_attention(x, x, x)
        (x @ x.mT).softmax(-1)
        F.softmax(x, -1)
        torch.bmm(x, x.mT)
        F.multi_head_attention_forward(x, x, x, 2, 1, w, b, None, None, False, 0.0, w[:2], b[:2])
    needed = {"scaled_dot_product_attention", "softmax", "bmm", "multi_head_attention_forward"}
    return needed <= {*mode.seen} and bool({"matmul", "__matmul__"} & {*mode.seen})


def _modes() -> bool:
    """Return whether modes that end in another order leave torch's state unchanged."""
    module = sys.modules[TorchDispatchMode.__module__]

    def state() -> list[object]:
        return [*(x for _, x in sorted(vars(module).items()) if isinstance(x, bool)), patches.modes_here()]

    before = state()
    modes: tuple[_Kinds | _Names, ...] = (_Kinds(), _Kinds(), _Names(), _Names())
    for mode in modes:
        mode.__enter__()  # type: ignore[no-untyped-call]
    left = [mode for mode in patches.modes_here() if mode not in modes[::2]]
    for mode in modes[::2]:
        patches.take_off(mode)
    torch.zeros(1, device="cpu").exp()
    removed = patches.modes_here() == left
    for mode in modes[:0:-2]:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    return removed and [bool(mode.seen) for mode in modes] == [False, True, False, True] and state() == before


def _without_all_modes() -> bool:
    """Return whether everyone's modes can be switched off for a while."""
    with _Kinds() as kinds, _Names() as names:
        with recording.outside_all_modes("cpu"):
            torch.zeros(1, device="cpu").exp()
        unseen = not kinds.seen and "exp" not in names.seen
        torch.zeros(1, device="cpu").exp()
    return unseen and bool(kinds.seen)


def _hooks() -> bool:
    """Return whether hooks stand in the tables of a module, and of all, under the numbers of their handles."""
    module = nn.Identity()
    tables = []
    handles = []
    with ExitStack() as undo:
        for owner, name, kwargs in (
            (module, "_forward", {"with_kwargs": True}),
            (of_all_modules, "_global_forward", {}),
        ):
            added = "" if owner is module else "module_"
            for kind, more in (("pre_hook", kwargs), ("hook", {"always_call": True})):
                handle = getattr(owner, f"register_{added}forward_{kind}")(lambda *arguments: None, **more)
                undo.callback(handle.remove)
                handles.append(handle)
                tables.append(getattr(owner, f"{name}_{kind}s"))
            tables[-1].move_to_end(handles[-1].id, last=False)
        always = handles[1].id in module._forward_hooks_always_called
        always = always and handles[3].id in of_all_modules._global_forward_hooks_always_called
        named = handles[0].id in module._forward_pre_hooks_with_kwargs
        return always and named and all(handle.id in table for handle, table in zip(handles, tables, strict=True))


def _storages() -> bool:
    x = torch.zeros(2, device="cpu")
    y = torch.zeros(2, device="cpu")
    return address(x) == address(x[1:]) != address(y)


def _threads() -> bool:
    """Return whether watches reach other threads, and threads of pools do not keep them."""
    followed = list[bool]()

    def work() -> None:
        followed.append(patches.is_followed())

    with ThreadPoolExecutor(1) as pool:
        with patches.followed(lambda: nullcontext):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            pool.submit(work).result()
        pool.submit(work).result()
        every = (threading.Thread(target=ThreadPool.__init__), *pool._threads)
        return all(map(patches.is_of_pool, every)) and followed == [True, True, False]


def _caches() -> bool:
    """Return whether a cache tells the number of tokens before its keys."""
    keys = torch.zeros(1, 1, 2, 1, device="cpu")
    cache = sys.modules["transformers.cache_utils"].DynamicCache()
    with watched_caches():
        cache.update(keys, keys, 0)
        after = cache.update(keys, keys, 0)[0]
        return cached_keys(after, 0, 2) == CachedKeys(4, 2, 0, 0)


def _interface() -> bool:
    module = sys.modules.get("transformers.modeling_utils")
    functions = getattr(module, "ALL_ATTENTION_FUNCTIONS", None)
    look_up: Any = getattr(functions, "get_interface", None)
    return look_up is not None and look_up("eager", _interface) is _interface and callable(look_up("sdpa", None))


_TORCH: dict[str, Callable[[], bool]] = {
    "autograd.Function": _own_gradients,
    "torch.utils.checkpoint": _checkpoints,
    "torch's number of the running backward pass": _backward_passes,
    "torch's mark of transformed tensors": _transforms,
    "names of torch's operators": _operators,
    "torch's parts of composite operators": _composites,
    "torch's list of kernels in Python": _python_kernels,
    "names of torch's functions": _functions,
    "torch's stacks of modes": _modes,
    "torch's switches of modes": _without_all_modes,
    "torch's tables of hooks": _hooks,
    "addresses of torch's storages": _storages,
    "Python's threads and pools": _threads,
}
_TRANSFORMERS = {"AttentionInterface.get_interface": _interface, "Cache.update of transformers": _caches}
PROBES = _TORCH | _TRANSFORMERS
# Without these, nothing of a model can be watched.
FOUNDATIONS = frozenset(("torch's switches of modes", "torch's tables of hooks"))
_OLDER = "a class that looks up its attention without AttentionInterface.get_interface"


def broken_parts(model: nn.Module) -> list[str]:
    """Return the private parts, among those that concern a model, that behave differently than semdiag expects."""
    broken = [*_failed((*_TORCH,), str(torch.__version__))]
    classes: set[Any] = {type(part) for part in model.modules()}
    if any(kind.__module__.startswith("transformers.") for each in classes for kind in each.__mro__):
        broken += _failed((*_TRANSFORMERS,), f"{torch.__version__} {_version()}")
        broken += [f"{_OLDER} ({kind.__name__})" for kind in classes if not _looks_up(kind)][:1]
    return broken


def remarks_on_parts(broken: Iterable[str]) -> list[Remark]:
    """Return a remark on each broken part."""
    return [
        Remark("", f"{_said(part)}: what is measured may be wrong or incomplete", "private-part")
        for part in broken
    ]


def mask_refusal(broken: Iterable[str]) -> str:
    """Return the reason why a mask is refused."""
    remedy = "Install a version of torch and transformers that works."
    return f"{'; '.join(map(_said, broken))}: masks or their gradients could be wrong. {remedy}"


def _said(part: str) -> str:
    versions = f"torch {torch.__version__}, transformers {_version()}"
    return f"{part} behaves otherwise than semdiag knows ({versions})"


def _version() -> str:
    return getattr(sys.modules.get("transformers"), "__version__", "not loaded")


@cache
def _failed(names: tuple[str, ...], versions: str) -> tuple[str, ...]:
    return tuple(name for name in names if not works(PROBES[name]))


def works(probe: Callable[[], bool]) -> bool:
    """Return the result of a probe, without anything that the caller has switched on."""
    cast = torch.autocast("cpu", enabled=False)
    try:
        with patches.without_modes(), torch.inference_mode(False), torch.enable_grad(), cast:
            return probe()
    except Exception:  # of the probe, or of what it is run without
        return False


@cache
def _looks_up(kind: Any) -> bool:
    """Return whether a class that names transformers' attention functions looks them up where we see it."""
    code = getattr(inspect.unwrap(getattr(kind, "forward", _interface)), "__code__", None)
    names = () if code is None else code.co_names
    return "ALL_ATTENTION_FUNCTIONS" not in names or "get_interface" in names
