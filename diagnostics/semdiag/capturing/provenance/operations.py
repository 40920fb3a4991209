"""Watch torch's dispatcher: trace every softmax to the values that it weights."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.amp import is_autocast_available
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.overlapping import take_off_dispatch
from semdiag.capturing.provenance.foreign_operators import (
    MAY_BE_ATTENTION,
    MAY_BE_KERNEL,
    may_attend,
    python_kernel,
)
from semdiag.capturing.provenance.higher_order import MAY_HIDE, has_known_bodies, may_hide, under_modes
from semdiag.capturing.provenance.merged_blocks import SUMS, MergedBlocks
from semdiag.capturing.provenance.operation_plans import (
    COMPOSITE,
    Plan,
    composite_on,
    has_kernel,
    is_looked_for,
    key_of,
    plan_of,
)
from semdiag.capturing.provenance.products import OUTSIDE, Products
from semdiag.capturing.provenance.propagation import propagate
from semdiag.capturing.provenance.softmaxes import SOFTMAXES, Softmaxes
from semdiag.capturing.provenance.tags import History, Scores, Tags, tensors
from semdiag.capturing.provenance.weighted_values import fused_call
from semdiag.capturing.recording import NOTHING, Recorder, in_backward, outside_all_modes

_SPARSE = ("_sparse_softmax", "_sparse_log_softmax")
_STORED = (torch.strided, torch.jagged)  # layouts whose storage lets us trace entries


class OperationWatch(TorchDispatchMode):
    """Traces softmaxes below Python."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # true would import the compiler at first use: a second
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
        """Whether this watch applies a mask."""
        return self._recorder.masking

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at it."""
        kwargs = kwargs or {}
        recorder = self._recorder
        if in_backward():
            return func(*args, **kwargs)
        plan = plan_of(func)
        if plan.runs_others and (run := self._runner(func, plan, args, kwargs)) is not None:
            return run()
        before, recorder.in_function = recorder.in_function, True  # the operator is also a Python function
        try:
            if plan.writes:
                self._guarded(plan, self._before_write, plan, args, kwargs)
            result = func(*args, **kwargs)
            call = self._guarded(plan, self._look, plan, args, kwargs, result)
        finally:
            recorder.in_function = before
        if call is not None:
            try:
                recorder.record(call)
            except Exception as error:
                recorder.failed(plan.name, error)
        return result

    def __exit__(self, *exception: Any) -> None:
        """Leave, even if modes that were entered later are still active."""
        take_off_dispatch(self)

    def writes(self, tensor: Tensor) -> int:
        """Return how many operations have written to a tensor's storage so far."""
        return self._tags.writes(tensor)

    def product(self, scores: Tensor) -> Scores | None:
        """Return the product that scores came from; None if there is none."""
        return self._tags.scores(scores)

    def offer(self, history: History | None, masked: bool = False) -> None:
        """Announce the scores' history before a function seen in Python passes them to its softmax."""
        self._softmaxes.offered, self._softmaxes.masked = history, masked

    def mark_output(self, output: Tensor, sums: object = None) -> None:
        """Mark the output of attention that was captured in Python: see :class:`MergedBlocks`."""
        with torch._C.DisableTorchFunction():
            self._merged.mark_output(output, sums)

    def settle(self) -> None:
        """Note the outcome of every softmax, then forget them all."""
        self._softmaxes.settle()
        self._tags.forget()

    def _runner(
        self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """Return a function that runs an operation so that we see the operations it calls; None if impossible."""
        if plan.composite and (device := composite_on(func, args, kwargs)) is not None:
            return lambda: self._run_kernel(func, COMPOSITE, device, args, kwargs)
        if plan.kind == "higher order":
            return lambda: self._run_higher_order(func, plan, args, kwargs)
        if plan.kind == "foreign" and (kernel := python_kernel(func, args, kwargs)) is not None:
            return lambda: self._run_in_python(func, plan, kernel, args, kwargs)
        return None

    def _run_in_python(
        self, func: Any, plan: Plan, kernel: tuple[Any, str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator with a Python kernel; if no attention was seen in it, look at it as a whole."""
        seen, result = self._attention_count(), self._run_kernel(func, *kernel, args, kwargs)
        if self._attention_count() == seen:
            self._guarded(plan, self._look, plan, args, kwargs, result)
        return result

    def _attention_count(self) -> int:
        """Return how many attention operations were captured or skipped so far."""
        audit = self._recorder.audit
        return audit.captured.total() + audit.skipped.total()

    def _run_higher_order(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator that was not seen in Python; known bodies run under this mode."""
        if has_known_bodies(func):
            args, kwargs = under_modes((args, kwargs), [self])
            return func(*args, **kwargs)
        seen, result = self._attention_count(), func(*args, **kwargs)
        recorder = self._recorder
        if not recorder.listening or recorder.foreign or self._attention_count() != seen:
            return result
        if self._guarded(plan, may_hide, func, (args, kwargs), self._tags.fixed, is_looked_for):
            recorder.skip(plan.name, MAY_HIDE)
        return result

    def _run_kernel(self, func: Any, key: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a composite or a Python kernel under this mode, so that we see the operations it calls."""
        with self, torch._C.DisableTorchFunction():
            included = torch._C._dispatch_tls_local_include_set()
            excluded = torch._C._dispatch_tls_local_exclude_set()
            # Torch 2.9 fails unless the parts dispatch through this key; 2.13 does not need it.
            excluded = excluded.remove(torch._C.DispatchKey.PythonTLSSnapshot)
            if torch.is_inference_mode_enabled():  # matmul asks views about gradients
                excluded = excluded.remove(torch._C.DispatchKey.ADInplaceOrView)
            with enable_reentrant_dispatch():  # restores what was on when the composite was called
                cast = is_autocast_available(device) and torch.is_autocast_enabled(device)
                if cast and not has_kernel(func, autocast := f"Autocast{key_of(device)}"):
                    excluded = excluded.remove(getattr(torch._C.DispatchKey, autocast))
                with torch._C._ForceDispatchKeyGuard(included, excluded):
                    return func._op_dk(key, *args, **kwargs)

    def _guarded(self, plan: Plan, look: Callable[..., Any], *args: Any) -> Any:
        """Call one of our functions; its failure is noted and never reaches the model."""
        try:
            with torch._C.DisableTorchFunction():
                return look(*args)
        except Exception as error:  # tensor subclasses may raise anything
            self._recorder.skip(plan.name, f"could not be followed ({type(error).__name__}: {str(error)[:80]})")
            return None

    def _before_write(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        written = (args[index] if index < len(args) else kwargs.get(name) for index, name in plan.writes)
        self._softmaxes.before_write(plan.name, args, [*tensors(written)])

    def _look(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> AttentionCall | None:
        """Handle an operation that has run, by its kind; return the attention that it completes, if any."""
        recorder, tags, name = self._recorder, self._tags, plan.name
        if recorder.covered or recorder.foreign:
            return None
        if isinstance(result, Tensor) and not result.is_nested and not result.numel():
            if plan.kind == "softmax" and result.ndim > 2:
                recorder.skip("softmax", NOTHING)
            return None
        given = [*tensors((*args, *kwargs.values()) if kwargs else args)]
        if any(t.layout not in _STORED for t in (given if result is None else (*given, *tensors((result,))))):
            self._skip_without_storage(name, given)
            return None
        if name in SUMS or "sums" in tags.marks:
            self._merged.observe(name, plan.kind == "product", args, given, result)
        if name == "mul" and len(given) == 2 and "one key" in tags.marks:
            call = self._products.observe_entrywise(given, result)
            if call is not None:
                self._merged.mark_output(result)
                return call
        look = self._LOOKS.get(plan.kind)
        if look is not None:
            return look(self, plan, args, kwargs, given, result)
        propagate(tags, name, args, given, result)
        return None

    def _product(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> AttentionCall | None:
        """Handle a matrix product: it may make scores, or multiply weights with values."""
        call = self._products.observe(plan.name, args, kwargs, result)
        if call is not None:
            self._merged.mark_output(result)
        return call

    def _noise(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> None:
        """Handle noise: it may be dropout that is written out."""
        kept = float(args[1]) if len(args) > 1 and not isinstance(args[1], Tensor) else 0.5
        self._tags.tag_noise(result, kept)

    def _softmax(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> None:
        """Start to trace a softmax."""
        axis = args[1] if len(args) > 1 else kwargs.get("dim", -1)
        self._softmaxes.observe(plan.name, given[0], axis, result, bool(plan.writes))

    def _exponential(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> None:
        """Handle an exponential: it may be a softmax that is written out."""
        if result.ndim > 1 and result.is_floating_point():
            self._softmaxes.observe_exponential(plan.name, args, result, bool(plan.writes))
        propagate(self._tags, plan.name, args, given, result)

    def _foreign(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> None:
        """Handle an unknown operator: it may be attention, but cannot be inspected."""
        recorder = self._recorder
        if recorder.running:
            written = [args[index] if index < len(args) else kwargs.get(name) for index, name in plan.writes]
            made = tensors((result, *written))
            if may_attend(plan.name, recorder.module, given, made, self._tags.fixed, plan.named):
                recorder.skip(plan.full, MAY_BE_ATTENTION if plan.kind == "foreign" else MAY_BE_KERNEL)
        propagate(self._tags, plan.name, args, given, result)

    def _fused(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> AttentionCall | None:
        """Capture fused attention that was not seen in Python: in a scripted or compiled graph, or in C++."""
        recorder = self._recorder
        if not recorder.listening:
            recorder.skip(plan.name, OUTSIDE)
            return None
        with outside_all_modes("cpu"):
            call = fused_call(plan.name, args, kwargs, result)
        if call is None:
            recorder.skip(plan.name, "runs below Python: in a compiled, traced or exported graph, or in C++")
        else:
            self._merged.mark_output(*result[:2])
        return call

    _LOOKS: ClassVar[dict[str, Callable[..., AttentionCall | None]]] = {
        "product": _product,
        "noise": _noise,
        "softmax": _softmax,
        "exponential": _exponential,
        "foreign": _foreign,
        "suspect": _foreign,
        "fused": _fused,
    }

    def _skip_without_storage(self, name: str, given: Sequence[Tensor]) -> None:
        """Note attention in sparse or oneDNN tensors, whose entries cannot be traced."""
        if name in _SPARSE or name in SOFTMAXES:
            self._recorder.skip("softmax", "of a sparse or oneDNN tensor: only dense ones are followed")
            return
        for tensor in given:
            scores, weights = self._tags.of(tensor)
            if weights is not None or (scores is not None and not any(scores.product.fixed)):
                self._recorder.skip(name, "attention's scores or weights meet a sparse tensor, or become one")
                return
