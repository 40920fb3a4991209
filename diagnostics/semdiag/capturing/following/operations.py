"""Below Python: every softmax that reaches torch's dispatcher, followed to the values that it weights.

Whatever a model's author wrote (``@``, einsum, a scripted function, ``out=``), the dispatcher sees one of a few
operations. A softmax is followed here from the product that its input came from to the product that its result
goes into, and is one of three: captured; attention-like (its result is multiplied with values) but not followed,
and in the audit; or another, which is counted.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.amp import is_autocast_available
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.following.bodies import MAY_HIDE, knows_bodies, may_hide, under
from semdiag.capturing.following.carrying import carry
from semdiag.capturing.following.merged_blocks import SUMS, MergedBlocks
from semdiag.capturing.following.own_operators import MAY_BE_ATTENTION, in_python, is_foreign, may_attend
from semdiag.capturing.following.products import OUTSIDE, PRODUCTS, Products
from semdiag.capturing.following.softmaxes import EXPONENTIALS, SOFTMAXES, Softmaxes
from semdiag.capturing.following.tags import History, Scores, Tags, tensors
from semdiag.capturing.following.weighted_values import fused_call
from semdiag.capturing.overlapping import take_off_dispatch
from semdiag.capturing.recording import NOTHING, Recorder, is_plain, outside_all_modes

_FUSED = ("_scaled_dot_product_", "_transformer_encoder_layer", "_native_multi_head", "flex_attention")
_OPAQUE = ("_flash_attention_forward", "_efficient_attention_forward", "_masked_softmax")
_NOISE = ("bernoulli_", "bernoulli")
_SPARSE = ("_sparse_softmax", "_sparse_log_softmax")
_STORED = (torch.strided, torch.jagged)  # layouts of tensors with a storage in which entries can be followed
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class _Plan(NamedTuple):
    """What is known of an operation before it runs.

    Attributes:
        name: without its namespace and overload.
        kind: of what is looked for in it.
        writes: position and name of the arguments that it writes to.
        composite: whether it can be nothing but a call of others.
        runs_others: whether it may call others that can be looked at.
        full: its name with its namespace.
    """

    name: str
    kind: str
    writes: tuple[tuple[int, str], ...]
    composite: bool
    runs_others: bool
    full: str


class OperationWatch(TorchDispatchMode):
    """Follows softmaxes below Python.

    Args:
        recorder: knows what runs and what is covered; gets the calls and the notes.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # true would import the compiler, which takes a second, at the first use
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._tags = Tags(recorder.parameters)
        self._softmaxes = Softmaxes(recorder, self._tags)
        self._products = Products(recorder, self._tags, self._softmaxes)
        self._merged = MergedBlocks(recorder, self._tags)

    @property
    def masking(self) -> bool:
        """Whether its watch has a mask."""
        return self._recorder.masking

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at it."""
        kwargs = kwargs or {}
        recorder = self._recorder
        if torch._C._current_graph_task_id() != -1:  # a backward pass
            return func(*args, **kwargs)
        plan = _plan(func)
        if plan.runs_others and (run := self._open(func, plan, args, kwargs)) is not None:
            return run()
        before, recorder.in_function = recorder.in_function, True  # the operator is a Python function, too
        try:
            if plan.writes:
                self._guarded(plan, self._before_write, plan, args, kwargs)
            result = func(*args, **kwargs)
            found = self._guarded(plan, self._look, plan, args, kwargs, result)
        finally:
            recorder.in_function = before
        if found is not None:
            try:
                recorder.record(found)
            except Exception as error:
                recorder.failed(plan.name, error)
        return result

    def __exit__(self, *exception: Any) -> None:
        """Leave, also if modes that were entered later last longer."""
        if not take_off_dispatch(self):
            super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def writes(self, tensor: Tensor) -> int:
        """How many operations have written to a tensor's storage so far."""
        return self._tags.writes(tensor)

    def product(self, scores: Tensor) -> Scores | None:
        """The product that scores came from; None if they came from none."""
        return self._tags.scores(scores)

    def offer(self, history: History | None, masked: bool = False) -> None:
        """Tell the history of the scores that a function seen in Python is about to give to its softmax.

        Args:
            history: of the scores.
            masked: whether a mask has been put into them.
        """
        self._softmaxes.offered, self._softmaxes.masked = history, masked

    def attended(self, output: Tensor, sums: object = None) -> None:
        """Tell what a captured attention that was seen in Python returned: see :class:`MergedBlocks`."""
        with torch._C.DisableTorchFunction():
            self._merged.attended(output, sums)

    def settle(self) -> None:
        """Say of every softmax what became of it, and forget it."""
        self._softmaxes.settle()
        self._tags.forget()

    def _open(
        self, func: Any, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """How to run an operation so that those that it calls are looked at; None if they cannot be."""
        if plan.composite and (device := _device(func, args, kwargs)) is not None:
            return lambda: self._in_parts(func, _COMPOSITE, device, args, kwargs)
        if plan.kind == "higher order":
            return lambda: self._higher_order(func, plan, args, kwargs)
        if plan.kind == "foreign" and (place := in_python(func, args, kwargs)) is not None:
            return lambda: self._python(func, plan, place, args, kwargs)
        return None

    def _python(
        self, func: Any, plan: _Plan, place: tuple[Any, str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator whose kernel is Python's; what that calls past the dispatcher may be attention still."""
        seen, result = self._seen(), self._in_parts(func, *place, args, kwargs)
        if self._seen() == seen:
            self._guarded(plan, self._look, plan, args, kwargs, result)
        return result

    def _seen(self) -> int:
        """How much of attention was seen so far."""
        audit = self._recorder.audit
        return audit.captured.total() + audit.skipped.total()

    def _higher_order(self, func: Any, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator that was not seen in Python; its bodies, if known, under this mode."""
        if knows_bodies(func):
            args, kwargs = under((args, kwargs), [self])
            return func(*args, **kwargs)
        seen, result = self._seen(), func(*args, **kwargs)
        recorder = self._recorder
        if not recorder.listening or recorder.foreign or self._seen() != seen:
            return result
        if self._guarded(plan, may_hide, func, (args, kwargs), self._tags.fixed, _is_looked_for):
            recorder.skip(plan.name, MAY_HIDE)
        return result

    def _in_parts(self, func: Any, key: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the kernel of an operation that calls others, so that those are looked at: a composite, or Python's.

        Autograd takes composites apart above this mode; of tensors without it (``inference_mode``) they come here.
        Autocast is above this mode, too, and casts the parts of composites that it does not cast as a whole.
        """
        with self, torch._C.DisableTorchFunction():
            included = torch._C._dispatch_tls_local_include_set()
            excluded = torch._C._dispatch_tls_local_exclude_set()
            # Torch 2.9 fails if the parts do not come by this key; 2.13 does without.
            excluded = excluded.remove(torch._C.DispatchKey.PythonTLSSnapshot)
            if torch.is_inference_mode_enabled():  # a view knows that what it views is trained: matmul asks it
                excluded = excluded.remove(torch._C.DispatchKey.ADInplaceOrView)
            with enable_reentrant_dispatch():  # what was on when the composite was called
                cast = is_autocast_available(device) and torch.is_autocast_enabled(device)
                if cast and not _has_kernel(func, autocast := f"Autocast{_key(device)}"):
                    excluded = excluded.remove(getattr(torch._C.DispatchKey, autocast))
                with torch._C._ForceDispatchKeyGuard(included, excluded):
                    return func._op_dk(key, *args, **kwargs)

    def _guarded(self, plan: _Plan, look: Callable[..., Any], *args: Any) -> Any:
        """Look; a failure of ours is noted and never the model's."""
        try:
            with torch._C.DisableTorchFunction():
                return look(*args)
        except Exception as error:  # whatever a tensor of an unknown kind raises
            self._recorder.skip(plan.name, f"could not be followed ({type(error).__name__}: {str(error)[:80]})")
            return None

    def _before_write(self, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        written = (args[index] if index < len(args) else kwargs.get(name) for index, name in plan.writes)
        self._softmaxes.before_write(plan.name, args, [*tensors(written)])

    def _look(
        self, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> AttentionCall | None:
        recorder, (name, kind, *_) = self._recorder, plan
        if recorder.covered or recorder.foreign:
            return None
        if isinstance(result, Tensor) and not result.is_nested and not result.numel():
            if kind == "softmax" and result.ndim > 2:
                recorder.skip("softmax", NOTHING)
            return None
        given = [*tensors((*args, *kwargs.values()) if kwargs else args)]
        if any(t.layout not in _STORED for t in (given if result is None else (*given, *tensors((result,))))):
            self._of_no_storage(name, given)
            return None
        if name in SUMS or "sums" in self._tags.marks:
            self._merged.ran(name, kind == "product", args, given, result)
        found = None
        if kind == "product":
            found = self._products.ran(name, args, kwargs, result)
        elif name == "mul" and len(given) == 2 and "one key" in self._tags.marks:
            found = self._products.of_one_key(given, result)
        if found is not None:
            self._merged.attended(result)
        if found is not None or kind == "product":
            return found
        if kind == "fused":
            return self._fused(name, args, kwargs, result)
        if kind == "noise":
            kept = float(args[1]) if len(args) > 1 and not isinstance(args[1], Tensor) else 0.5
            self._tags.tag_noise(result, kept)
            return None
        overwritten = bool(plan.writes)
        if kind == "softmax":
            place = args[1] if len(args) > 1 else kwargs.get("dim", -1)
            self._softmaxes.ran(name, given[0], place, result, overwritten)
            return None
        if kind == "exponential" and result.ndim > 1 and result.is_floating_point():
            self._softmaxes.exponential(name, args, result, overwritten)
        if kind == "foreign" and recorder.running:
            written = [args[index] if index < len(args) else kwargs.get(n) for index, n in plan.writes]
            if may_attend(name, recorder.module, given, tensors((result, *written)), self._tags.fixed):
                recorder.skip(plan.full, MAY_BE_ATTENTION)
        carry(self._tags, name, args, given, result)
        return None

    def _of_no_storage(self, name: str, given: Sequence[Tensor]) -> None:
        """An operation with a sparse tensor, or one of oneDNN's, in which nothing is followed: does it matter?"""
        if name in _SPARSE or name in SOFTMAXES:
            self._recorder.skip("softmax", "of a sparse tensor, or one of oneDNN's: only dense ones are followed")
            return
        for tensor in given:
            scores, weights = self._tags.of(tensor)
            if weights is not None or (scores is not None and not any(scores.product.fixed)):
                self._recorder.skip(name, "attention's scores or weights meet a sparse tensor, or become one")
                return

    def _fused(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> AttentionCall | None:
        """A fused attention that was not seen in Python: in a scripted or compiled graph, or in C++."""
        recorder = self._recorder
        if not recorder.listening:
            recorder.skip(name, OUTSIDE)
            return None
        with outside_all_modes("cpu"):
            call = fused_call(name, args, kwargs, result)
        if call is None:
            recorder.skip(name, "runs below Python: in a compiled, traced or exported graph, or in C++")
        else:
            self._merged.attended(*result[:2])
        return call


@lru_cache(4096)
def _plan(func: Any) -> _Plan:
    schema = getattr(func, "_schema", None)
    arguments = [] if schema is None else enumerate(schema.arguments)
    full = func.__name__.partition(".")[0] if schema is None else schema.name
    namespace, _, name = full.rpartition("::")
    writes = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    kind = "higher order" if isinstance(func, HigherOrderOperator) and not name.startswith(_FUSED) else _kind(name)
    if kind == "other" and schema is not None and is_foreign(namespace):
        kind = "foreign"
    composite = schema is not None and _has_kernel(func, _COMPOSITE.name)
    return _Plan(name, kind, writes, composite, composite or kind in ("higher order", "foreign"), full)


def _is_looked_for(func: Any) -> bool:
    return _plan(func).kind in ("fused", "softmax", "foreign")


def _device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Where an operation that can be a composite is one; None where it is none, or its tensors are not plain."""
    with torch._C.DisableTorchFunction():  # a function mode would see each property that is read
        given = [*tensors((*args, *kwargs.values()))]
        if not given or not all(is_plain(t) and t.layout == torch.strided for t in given):
            return None
        device = given[0].device.type
    return None if _has_kernel(func, _key(device)) else device


def _key(device: str) -> str:
    return str(torch._C._dispatch_key_for_device(device))


def _has_kernel(func: Any, key: str) -> bool:
    name = func.name()  # some are torch's own in Python, and the dispatcher does not know them
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _kind(name: str) -> str:
    if name.startswith(_FUSED) or name in _OPAQUE:
        return "fused"
    kinds = {"softmax": SOFTMAXES, "product": PRODUCTS, "exponential": EXPONENTIALS, "noise": _NOISE}
    return next((kind for kind, names in kinds.items() if name in names), "other")
