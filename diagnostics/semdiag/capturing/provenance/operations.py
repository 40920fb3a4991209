"""Watch torch's dispatcher: classify its operations, and trace every softmax to the values that it weights."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.amp import is_autocast_available
from torch.overrides import enable_reentrant_dispatch
from torch.utils import _python_dispatch as dispatch
from torch.utils._pytree import tree_leaves, tree_map

from semdiag.capturing.adapters.fused import fused_call
from semdiag.capturing.attention_call import Args, AttentionCall, Kwargs
from semdiag.capturing.patches import take_off
from semdiag.capturing.provenance.products import OUTSIDE, PRODUCTS, Products
from semdiag.capturing.provenance.propagation import float_outputs, propagate
from semdiag.capturing.provenance.softmaxes import EXPONENTIALS, SOFTMAXES, SUMS, MergedBlocks, Softmaxes
from semdiag.capturing.provenance.tags import Tags, tensors
from semdiag.capturing.recording import NOTHING, Once, Recorder, in_backward, is_plain, outside_all_modes

MAY_HIDE = "a higher-order operator whose body cannot be inspected: it may hide attention"
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_OPEN = ("map_impl", "scan", "while_loop", "while_loop_stack_output")  # their kernels run under dispatch modes
_CLOSED = ("cond", "invoke_subgraph", "hints_wrapper", "strict_mode")  # these only call a body, under no mode
_HARMLESS = ("print", "inline_asm_elementwise", "_export_tracepoint", "flex_attention", "flex_attention_backward")


def run_as_written(
    func: HigherOrderOperator, args: Args, kwargs: Kwargs, ours: type[dispatch.TorchDispatchMode]
) -> Callable[[], Any] | None:
    """Return a function that runs an operator's bodies in place: under all modes, with gradients."""
    name = func.__name__
    kernel = func.py_kernels.get(_EXPLICIT)
    stack = dispatch._get_current_dispatch_mode_stack()
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
        wrapped_args, wrapped_kwargs = under_modes((args, kwargs), stack)
        with dispatch._disable_current_modes():
            return kernel(*wrapped_args, **wrapped_kwargs)

    return run


def register_mode(operator: HigherOrderOperator, mode: type[dispatch.TorchDispatchMode]) -> None:
    """Make a higher-order operator dispatch to a mode, for torch before 2.9, which does not ask the mode."""
    mode_decides = hasattr(dispatch.TorchDispatchMode, "supports_higher_order_operators")
    if not mode_decides and mode not in operator.python_key_table:

        def rule(active: dispatch.TorchDispatchMode, *args: Any, **kwargs: Any) -> Any:
            return active.__torch_dispatch__(operator, (), args, kwargs)  # type: ignore[no-untyped-call]

        operator.py_impl(mode)(rule)


def under_modes(arguments: Any, modes: Sequence[dispatch.TorchDispatchMode]) -> Any:
    """Wrap the functions among a higher-order operator's arguments so that they run under ``modes``."""

    def wrapped(body: Any) -> Any:
        if not callable(body) or isinstance(body, Tensor | OpOverload | type):
            return body

        def run(*args: Any, **kwargs: Any) -> Any:
            for mode in modes:
                dispatch._push_mode(mode)
            try:
                return body(*args, **kwargs)
            finally:
                for _ in modes:
                    dispatch._pop_mode()

        if getattr(body, "_boxed_call", False):  # takes its operands as a list
            run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return tree_map(wrapped, arguments)


@cache
def _runs_once_more() -> bool:
    """Return whether this torch's scan runs its body once more than it has steps, to learn its shapes."""
    from torch._higher_order_ops.scan import generic_scan

    runs = []

    def body(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        runs.append(x)
        return carry, carry + x

    with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        generic_scan(body, [torch.zeros(1)], [torch.zeros(1, 1)])  # type: ignore[no-untyped-call]
    return len(runs) > 1


def _first_unseen(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a body whose first run is hidden from all modes."""
    runs = iter([False])  # whether a run is seen

    def run(*args: Any) -> Any:
        if next(runs, True):
            return body(*args)
        with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return body(*args)

    return run


MAY_BE_ATTENTION = "a custom operator, which may be attention: it cannot be inspected"
MAY_BE_KERNEL = "a kernel of torch that is unknown here and may be attention: it cannot be inspected"
_KNOWN = re.compile(
    "aten|prims?|debugprims|rngprims|_native|_?quantized|quantization|sparse|mkl|mkldnn|mkldnn_prepacked|onednn|_?c10d.*"
    "|symm_mem|_dtensor|profiler|debug_mode_ops|static_runtime|inductor.*|export|torchvision|torchaudio|semdiag"
)
_ATTENTION = re.compile("attn|attention", re.IGNORECASE)
_NAMED = ({"q", "k", "v"}, {"query", "key", "value"}, {"queries", "keys", "values"})


def is_foreign(namespace: str) -> bool:
    """Return whether operators of a namespace are neither torch's nor ours."""
    return _KNOWN.fullmatch(namespace) is None


def python_kernel(func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, str] | None:
    """Return the dispatch key and device of an operator with a kernel in Python."""
    device = _plain_device(tree_leaves((args, kwargs)))
    if device is None:
        return None
    name = func.name()
    keys = (key_of(device), "CompositeExplicitAutograd")
    key = next((k for k in keys if torch._C._dispatch_has_kernel_for_dispatch_key(name, k)), "")
    is_python = f"{name.replace('::', '/', 1)}/{key}" in torch.library._impls
    return (getattr(torch._C.DispatchKey, key), device) if is_python else None


def may_attend(
    plan: "OperationPlan",
    module: str,
    inputs: Iterable[Tensor],
    out: Iterable[Tensor],
    fixed: Callable[[Tensor], bool],
) -> bool:
    """Return whether an operator of which only inputs and outputs are seen may be attention."""
    moving = [t for t in inputs if is_plain(t) and t.is_floating_point() and not fixed(t)]
    made = [t for t in out if is_plain(t) and t.is_floating_point()]
    if not moving or not made:
        return False
    if _ATTENTION.search(plan.name):
        return True
    if len(moving) < 3:
        return plan.named and len(moving) == 1
    least_axes = 3 if plan.named or _ATTENTION.search(module.rpartition(".")[2]) else 4
    return _shaped_as_attention(moving, made, least_axes)


def _shaped_as_attention(inputs: Sequence[Tensor], outputs: Sequence[Tensor], least_axes: int) -> bool:
    """Return whether the first inputs have shapes of queries, keys and values, and an output its shape."""
    q, k, v = (tuple(t.shape) for t in inputs[:3])
    if not (len(q) == len(k) == len(v) >= least_axes and q[-1] == k[-1] and k[:-1] == v[:-1]):
        return False
    shapes = [tuple(t.shape) for t in outputs]
    mixed = (*q[:-1], v[-1])
    return mixed in shapes and shapes.count(k) == (k == mixed)


COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_FUSED = ("_scaled_dot_product_", "_transformer_encoder_layer", "_native_multi_head", "flex_attention")
_NOISE = ("bernoulli_", "bernoulli")
_OPAQUE = ("_flash_attention_forward", "_efficient_attention_forward", "_masked_softmax")
_NAMES = (SOFTMAXES, "softmax"), (PRODUCTS, "product"), (EXPONENTIALS, "exponential"), (_NOISE, "noise")
_KINDS = {name: kind for names, kind in _NAMES for name in names}


class OperationPlan(NamedTuple):
    """Facts about an operation before it runs."""

    name: str  # without namespace and overload
    kind: str
    writes: tuple[tuple[int, str], ...]  # position and name of the arguments that it writes to
    composite: bool  # whether it only calls other operations
    runs_others: bool  # whether it may call operations that can be watched
    full: str  # name with the namespace
    named: bool  # whether its schema names queries, keys and values, which makes it suspect


def written(plan: OperationPlan, args: Args, kwargs: Kwargs) -> list[Any]:
    """Return the arguments that an operation writes to."""
    return [args[index] if index < len(args) else kwargs.get(name) for index, name in plan.writes]


@lru_cache(4096)
def plan_of(func: Any) -> OperationPlan:
    """Return the plan of an operation."""
    schema = getattr(func, "_schema", None)
    arguments = [] if schema is None else enumerate(schema.arguments)
    full = func.__name__.partition(".")[0] if schema is None else schema.name
    namespace, _, name = full.rpartition("::")
    writes = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    kind = _kind_of(func, name)
    named = False
    if kind == "other" and schema is not None:
        named = not is_foreign(namespace) and _names_attention(schema)
        if is_foreign(namespace):
            kind = "foreign"
        elif named or _may_fit(func):
            kind = "suspect"
    composite = schema is not None and has_kernel(func, COMPOSITE.name)
    return OperationPlan(
        name, kind, writes, composite, composite or kind in ("higher order", "foreign"), full, named
    )


def _kind_of(func: Any, name: str) -> str:
    """Return an operation's kind by its name."""
    if name.startswith(_FUSED) or name in _OPAQUE:
        return "fused"
    if isinstance(func, HigherOrderOperator):
        return "higher order"
    return _KINDS.get(name, "other")


def _names_attention(schema: Any) -> bool:
    """Return whether a schema names queries, keys and values."""
    names = {argument.name for argument in schema.arguments}
    return any(three <= names for three in _NAMED) or ("qkv" in names and len(schema.returns) == 1)


def _may_fit(func: Any) -> bool:
    """Return whether an unknown operator of torch's may be attention: by name, or as it reads three tensors."""
    schema = func._schema
    read = [a for a in schema.arguments if "Tensor" in str(a.type) and not a.is_out]
    three = len(read) >= 3 and torch.Tag.pointwise not in func.tags
    return three or _ATTENTION.search(schema.name) is not None


def _plain_device(values: Iterable[object]) -> str | None:
    """Return the device of the first tensor; None if there is none, or any is not plain."""
    with torch._C.DisableTorchFunction():  # a function mode would see every property access
        operands = [x for x in values if isinstance(x, Tensor)]
        plain = operands and all(is_plain(t) and t.layout == torch.strided for t in operands)
        return operands[0].device.type if plain else None


def key_of(device: str) -> str:
    """Return the name of a device's dispatch key."""
    return str(torch._C._dispatch_key_for_device(device))


def has_kernel(func: Any, key: str) -> bool:
    """Return whether an operation has its own kernel for a dispatch key."""
    name = func.name()  # some of torch's Python operators are unknown to the dispatcher
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


_SPARSE = ("_sparse_softmax", "_sparse_log_softmax")
_STORED = (torch.strided, torch.jagged)  # layouts in whose storage entries can be traced


def _are_stored(values: Iterable[Tensor]) -> bool:
    """Return whether the entries of all tensors can be traced."""
    return all(t.layout in _STORED for t in values)


class OperationWatch(dispatch.TorchDispatchMode):
    """Traces softmaxes below Python, at torch's dispatcher."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # true would import the compiler at first use, which takes a second
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.tags = Tags(recorder.parameters, recorder.constants)
        self.softmaxes = Softmaxes(recorder, self.tags)
        self._products = Products(recorder, self.tags, self.softmaxes)
        self.merged = MergedBlocks(recorder, self.tags)

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        once = Once(func)
        try:
            return self._watched(once, args, kwargs)
        except Exception as error:
            if once.begun is not once.ended or not self.recorder.forgives(error, func.__name__):
                raise
        return once.result if once.ended else func(*args, **kwargs)

    def _watched(self, func: Once, args: Args, kwargs: Kwargs) -> Any:
        recorder = self.recorder
        if in_backward():
            return func(*args, **kwargs)
        plan = plan_of(func.function)
        if plan.runs_others and (run := self._runner(func, plan, args, kwargs)) is not None:
            return run()
        before = recorder.in_function
        recorder.in_function = True  # the operator is also a Python function
        try:
            if plan.writes:
                inputs = tensors((*args, *kwargs.values()))
                changed = tensors(written(plan, args, kwargs))
                self._guarded(plan, self.softmaxes.before_write, plan.name, args, [*changed], [*inputs])
            result = func(*args, **kwargs)
            call = self._guarded(plan, self._look, plan, args, kwargs, result)
        finally:
            recorder.in_function = before
        if call is not None:
            with recorder.guarded(plan.name):
                recorder.record(call)
        return result

    def __exit__(self, *exception: Any) -> None:
        """Leave, even while modes that were entered later are active."""
        take_off(self)

    def settle(self) -> None:
        """Note the outcome of every softmax, then forget all of them."""
        self.softmaxes.settle()
        self.tags.forget()

    def _runner(self, once: Once, plan: OperationPlan, args: Args, kwargs: Kwargs) -> Callable[[], Any] | None:
        """Return a function that runs an operation so that we see the operations it calls; None if impossible."""
        func = once.function
        device = _plain_device(tensors((*args, *kwargs.values()))) if plan.composite else None
        if device is not None and not has_kernel(func, key_of(device)):
            return lambda: self._run_kernel(once, COMPOSITE, device, args, kwargs)
        if plan.kind == "higher order" and func.__name__ in (*_OPEN, *_CLOSED):  # known bodies run under this mode
            args, kwargs = under_modes((args, kwargs), [self])
            return lambda: once(*args, **kwargs)
        kernel = python_kernel(func, args, kwargs) if plan.kind == "foreign" else None
        if plan.kind != "higher order" and kernel is None:
            return None
        return lambda: self._run_inspected(once, plan, kernel, args, kwargs)

    def _run_inspected(
        self, once: Once, plan: OperationPlan, kernel: tuple[Any, str] | None, args: Args, kwargs: Kwargs
    ) -> Any:
        """Run an operator, in Python if it has a kernel; look at the result if no attention is seen in it."""
        audit = self.recorder.audit
        noted_before = audit.captured.total() + audit.skipped.total()
        result = once(*args, **kwargs) if kernel is None else self._run_kernel(once, *kernel, args, kwargs)
        if audit.captured.total() + audit.skipped.total() == noted_before:
            if kernel is not None:
                self._guarded(plan, self._look, plan, args, kwargs, result)
            elif self.recorder.listening and self._guarded(plan, self._may_hide, once.function, (args, kwargs)):
                self.recorder.skip(plan.name, MAY_HIDE)
        return result

    def _may_hide(self, func: HigherOrderOperator, arguments: Any) -> bool:
        """Return whether a higher-order operator whose bodies were not seen may compute attention."""
        leaves = tree_leaves(arguments)
        recorder = self.recorder
        kinds = {plan_of(x).kind for x in leaves if isinstance(x, OpOverload)}
        harmless = bool(kinds) and kinds.isdisjoint(("fused", "softmax", "foreign"))
        floats = (x for x in leaves if isinstance(x, Tensor) and is_plain(x) and x.is_floating_point())
        return not (
            harmless or func.__name__ in _HARMLESS or recorder.foreign or all(map(self.tags.fixed, floats))
        )

    def _run_kernel(self, once: Once, key: Any, device: str, args: Args, kwargs: Kwargs) -> Any:
        """Run a composite or a Python kernel under this mode, so that we see the operations it calls."""
        func = once.function
        with self, torch._C.DisableTorchFunction():
            included = torch._C._dispatch_tls_local_include_set()
            excluded = torch._C._dispatch_tls_local_exclude_set()
            # Torch 2.9 fails unless the parts dispatch through this key; 2.13 does not need it.
            excluded = excluded.remove(torch._C.DispatchKey.PythonTLSSnapshot)
            if torch.is_inference_mode_enabled():  # matmul asks views about gradients
                excluded = excluded.remove(torch._C.DispatchKey.ADInplaceOrView)
            with enable_reentrant_dispatch():  # restores the modes of the composite's call
                cast = is_autocast_available(device) and torch.is_autocast_enabled(device)
                if cast and not has_kernel(func, autocast := f"Autocast{key_of(device)}"):
                    excluded = excluded.remove(getattr(torch._C.DispatchKey, autocast))
                with torch._C._ForceDispatchKeyGuard(included, excluded):
                    return once.run(func._op_dk, key, *args, **kwargs)

    def _guarded(self, plan: OperationPlan, look: Callable[..., Any], *args: Any) -> Any:
        """Call one of our functions; note its failure, which never reaches the model."""
        try:
            with torch._C.DisableTorchFunction():
                return look(*args)
        except Exception as error:  # tensor subclasses may raise anything
            self.recorder.skip(plan.name, f"could not be followed ({type(error).__name__}: {str(error)[:80]})")
            return None

    def _look(self, plan: OperationPlan, args: Args, kwargs: Kwargs, result: Any) -> AttentionCall | None:
        """Handle an operation that has run, by its kind; return the attention that it completes, if any."""
        if self.recorder.covered or self.recorder.foreign or self._is_empty(plan, result):
            return None
        inputs = [*tensors((*args, *kwargs.values()) if kwargs else args)]
        if not _are_stored(inputs if result is None else (*inputs, *tensors((result,)))):
            self._skip_without_storage(plan.name, inputs)
            return None
        if plan.name in SUMS or self.merged.follows:
            self.merged.observe(plan.name, plan.kind == "product", args, inputs, result)
        if plan.name == "mul" and len(inputs) == 2 and "one key" in self.tags.marks:
            call = self._products.observe_entrywise(inputs, result)
            if call is not None:
                self.merged.mark_output(result)
                return call
        self._mark_constant(inputs, result)
        return self._observe(plan, args, kwargs, inputs, result)

    def _mark_constant(self, inputs: list[Tensor], result: Any) -> None:
        """Mark results that are made of constants; what a caller makes beside the running model is its input."""
        if self.recorder.running and all(map(self.tags.constant, inputs)):
            for out in float_outputs(result):
                self.tags.mark(out, "constant")

    def _is_empty(self, plan: OperationPlan, result: Any) -> bool:
        """Return whether a result has no entries; note a softmax's."""
        if not isinstance(result, Tensor) or result.is_nested or result.numel():
            return False
        if plan.kind == "softmax" and result.ndim > 2:
            self.recorder.skip("softmax", NOTHING)
        return True

    def _observe(
        self, plan: OperationPlan, args: Args, kwargs: Kwargs, inputs: list[Tensor], result: Any
    ) -> AttentionCall | None:
        """Handle an operation by its kind: the softmax, and the products before and behind it."""
        if plan.kind == "product":
            call = self._products.observe(plan.name, args, kwargs, result)
            if call is not None:
                self.merged.mark_output(result)
            return call
        if plan.kind == "fused":
            return self._fused(plan.name, args, kwargs, result)
        if plan.kind == "softmax":
            axis = args[1] if len(args) > 1 else kwargs.get("dim", -1)
            self.softmaxes.observe(plan.name, inputs[0], axis, result, bool(plan.writes))
        elif plan.kind == "noise":  # it may be dropout written out
            has_rate = len(args) > 1 and not isinstance(args[1], Tensor)
            self.tags.tag_noise(result, float(args[1]) if has_rate else 0.5)
        else:
            if plan.kind == "exponential" and result.ndim > 1 and result.is_floating_point():
                self.softmaxes.observe_exponential(plan.name, args, result, bool(plan.writes))
            elif plan.kind in ("foreign", "suspect") and self.recorder.running:
                self._note_unknown(plan, args, kwargs, inputs, result)
            propagate(self.tags, plan.name, args, inputs, result)
        return None

    def _note_unknown(
        self, plan: OperationPlan, args: Args, kwargs: Kwargs, inputs: list[Tensor], result: Any
    ) -> None:
        """Note an operator that cannot be inspected, if it may be attention."""
        made = tensors((result, *written(plan, args, kwargs)))
        if may_attend(plan, self.recorder.module, inputs, made, self.tags.fixed):
            self.recorder.skip(plan.full, MAY_BE_ATTENTION if plan.kind == "foreign" else MAY_BE_KERNEL)

    def _fused(self, name: str, args: Args, kwargs: Kwargs, result: Any) -> AttentionCall | None:
        """Capture fused attention that was not seen in Python: in a scripted or compiled graph, or in C++."""
        if not self.recorder.listening:
            self.recorder.skip(name, OUTSIDE)
            return None
        with outside_all_modes("cpu"):
            call = fused_call(name, args, kwargs, result)
        if call is None:
            self.recorder.skip(name, "runs below Python: in a compiled, traced or exported graph, or in C++")
        else:
            self.merged.mark_output(*result[:2])
        return call

    def _skip_without_storage(self, name: str, inputs: Sequence[Tensor]) -> None:
        """Note attention in sparse or oneDNN tensors, whose entries cannot be traced."""
        if name in _SPARSE or name in SOFTMAXES:
            self.recorder.skip("softmax", "of a sparse or oneDNN tensor: only dense ones are followed")
        elif any(w is not None or (s is not None and not any(s.fixed)) for s, w in map(self.tags.of, inputs)):
            self.recorder.skip(name, "attention's scores or weights meet a sparse tensor, or become one")
