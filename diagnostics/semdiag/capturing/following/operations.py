"""Below Python: every softmax that reaches torch's dispatcher, followed to the values that it weights.

Whatever a model's author wrote (``@``, einsum, a scripted function, ``out=``), the dispatcher sees one of a few
operations. A softmax is followed here from the product that its input came from to the product that its result
goes into, and is one of three: captured; attention-like (its result is multiplied with values) but not followed,
and in the audit; or another, which is counted.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.amp import is_autocast_available
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.following.bodies import MAY_HIDE, knows_bodies, may_hide, under
from semdiag.capturing.following.carrying import carry
from semdiag.capturing.following.merged_blocks import SUMS, MergedBlocks
from semdiag.capturing.following.operation_plans import (
    COMPOSITE,
    Plan,
    composite_on,
    has_kernel,
    is_looked_for,
    key_of,
    plan_of,
)
from semdiag.capturing.following.own_operators import MAY_BE_ATTENTION, in_python, may_attend
from semdiag.capturing.following.products import OUTSIDE, Products
from semdiag.capturing.following.softmaxes import SOFTMAXES, Softmaxes
from semdiag.capturing.following.tags import History, Scores, Tags, tensors
from semdiag.capturing.following.weighted_values import fused_call
from semdiag.capturing.overlapping import take_off_dispatch
from semdiag.capturing.recording import NOTHING, Recorder, outside_all_modes

_SPARSE = ("_sparse_softmax", "_sparse_log_softmax")
_STORED = (torch.strided, torch.jagged)  # layouts of tensors with a storage in which entries can be followed


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
        plan = plan_of(func)
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
        self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """How to run an operation so that those that it calls are looked at; None if they cannot be."""
        if plan.composite and (device := composite_on(func, args, kwargs)) is not None:
            return lambda: self._in_parts(func, COMPOSITE, device, args, kwargs)
        if plan.kind == "higher order":
            return lambda: self._higher_order(func, plan, args, kwargs)
        if plan.kind == "foreign" and (place := in_python(func, args, kwargs)) is not None:
            return lambda: self._python(func, plan, place, args, kwargs)
        return None

    def _python(
        self, func: Any, plan: Plan, place: tuple[Any, str], args: tuple[Any, ...], kwargs: dict[str, Any]
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

    def _higher_order(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator that was not seen in Python; its bodies, if known, under this mode."""
        if knows_bodies(func):
            args, kwargs = under((args, kwargs), [self])
            return func(*args, **kwargs)
        seen, result = self._seen(), func(*args, **kwargs)
        recorder = self._recorder
        if not recorder.listening or recorder.foreign or self._seen() != seen:
            return result
        if self._guarded(plan, may_hide, func, (args, kwargs), self._tags.fixed, is_looked_for):
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
                if cast and not has_kernel(func, autocast := f"Autocast{key_of(device)}"):
                    excluded = excluded.remove(getattr(torch._C.DispatchKey, autocast))
                with torch._C._ForceDispatchKeyGuard(included, excluded):
                    return func._op_dk(key, *args, **kwargs)

    def _guarded(self, plan: Plan, look: Callable[..., Any], *args: Any) -> Any:
        """Look; a failure of ours is noted and never the model's."""
        try:
            with torch._C.DisableTorchFunction():
                return look(*args)
        except Exception as error:  # whatever a tensor of an unknown kind raises
            self._recorder.skip(plan.name, f"could not be followed ({type(error).__name__}: {str(error)[:80]})")
            return None

    def _before_write(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        written = (args[index] if index < len(args) else kwargs.get(name) for index, name in plan.writes)
        self._softmaxes.before_write(plan.name, args, [*tensors(written)])

    def _look(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> AttentionCall | None:
        """Look at an operation that has run, by its kind; return the attention that it completes, if it does."""
        recorder, tags, name = self._recorder, self._tags, plan.name
        if recorder.covered or recorder.foreign:
            return None
        if isinstance(result, Tensor) and not result.is_nested and not result.numel():
            if plan.kind == "softmax" and result.ndim > 2:
                recorder.skip("softmax", NOTHING)
            return None
        given = [*tensors((*args, *kwargs.values()) if kwargs else args)]
        if any(t.layout not in _STORED for t in (given if result is None else (*given, *tensors((result,))))):
            self._of_no_storage(name, given)
            return None
        if name in SUMS or "sums" in tags.marks:
            self._merged.ran(name, plan.kind == "product", args, given, result)
        if name == "mul" and len(given) == 2 and "one key" in tags.marks:
            found = self._products.of_one_key(given, result)
            if found is not None:
                self._merged.attended(result)
                return found
        look = self._LOOKS.get(plan.kind)
        if look is not None:
            return look(self, plan, args, kwargs, given, result)
        carry(tags, name, args, given, result)
        return None

    def _product(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> AttentionCall | None:
        """A product may make scores, or be that of weights and values."""
        found = self._products.ran(plan.name, args, kwargs, result)
        if found is not None:
            self._merged.attended(result)
        return found

    def _noise(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> None:
        """Noise may be dropout that is written out."""
        kept = float(args[1]) if len(args) > 1 and not isinstance(args[1], Tensor) else 0.5
        self._tags.tag_noise(result, kept)

    def _softmax(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> None:
        """A softmax is followed until it meets values."""
        place = args[1] if len(args) > 1 else kwargs.get("dim", -1)
        self._softmaxes.ran(plan.name, given[0], place, result, bool(plan.writes))

    def _exponential(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> None:
        """It may be a softmax that is written out."""
        if result.ndim > 1 and result.is_floating_point():
            self._softmaxes.exponential(plan.name, args, result, bool(plan.writes))
        carry(self._tags, plan.name, args, given, result)

    def _foreign(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> None:
        """An operator of another library may be attention, which cannot be seen."""
        recorder = self._recorder
        if recorder.running:
            written = [args[index] if index < len(args) else kwargs.get(name) for index, name in plan.writes]
            if may_attend(plan.name, recorder.module, given, tensors((result, *written)), self._tags.fixed):
                recorder.skip(plan.full, MAY_BE_ATTENTION)
        carry(self._tags, plan.name, args, given, result)

    def _fused(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> AttentionCall | None:
        """A fused attention that was not seen in Python: in a scripted or compiled graph, or in C++."""
        recorder = self._recorder
        if not recorder.listening:
            recorder.skip(plan.name, OUTSIDE)
            return None
        with outside_all_modes("cpu"):
            call = fused_call(plan.name, args, kwargs, result)
        if call is None:
            recorder.skip(plan.name, "runs below Python: in a compiled, traced or exported graph, or in C++")
        else:
            self._merged.attended(*result[:2])
        return call

    _LOOKS: ClassVar[dict[str, Callable[..., AttentionCall | None]]] = {
        "product": _product,
        "noise": _noise,
        "softmax": _softmax,
        "exponential": _exponential,
        "foreign": _foreign,
        "fused": _fused,
    }

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
