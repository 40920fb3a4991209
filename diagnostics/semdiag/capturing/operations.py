"""Below Python: every softmax that reaches torch's dispatcher, followed to the values that it weights.

Whatever a model's author wrote (``@``, einsum, a scripted function, ``out=``), the dispatcher sees one of a few
operations. A softmax is followed here from the product that its input came from to the product that its result
goes into, and is one of three: captured; attention-like (its result is multiplied with values) but not followed,
and in the audit; or another, which is counted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.axes import Axes, Axis, broadcast, chosen, fresh, merged, regrouped
from semdiag.capturing.overlapping import take_off_dispatch
from semdiag.capturing.recording import NOTHING, Recorder, is_plain, outside_all_modes
from semdiag.capturing.score_history import ScoreHistory
from semdiag.capturing.softmax_provenance import MECHANISM
from semdiag.capturing.weighted_values import UnfollowedError, Weighted, attention_of, fused_call

_SOFTMAXES = ("_softmax", "_safe_softmax", "softmax", "_log_softmax", "log_softmax")
_PRODUCTS = ("mm", "bmm", "baddbmm", "addmm", "mv")
_FUSED = ("_scaled_dot_product_", "_transformer_encoder_layer", "_native_multi_head", "flex_attention")
_OPAQUE = ("_flash_attention_forward", "_efficient_attention_forward", "_masked_softmax")
_REGROUPING = ("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten")
_COPIES = ("clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh")
_NOISE = ("bernoulli_", "bernoulli")


class _Plan(NamedTuple):
    """What is known of an operation before it runs: its name, and which of its arguments it writes to."""

    name: str
    writes: tuple[tuple[int, str], ...]


@dataclass(eq=False)
class _Softmax:
    """A softmax, from its input to the values that its result is multiplied with.

    Attributes:
        number: names it, and its axes.
        scores: its input, as it was.
        place: the axis it runs over; None where it is written out with exp, and not known before it is used.
        tag: the product of queries and keys that the input came from; None if it came from none.
        history: how the input came from the product, if that was seen in Python.
        heads: number of heads where the surrounding function says it and the tensors do not.
        module: where it ran.
        outside: whether no module of the model was running.
        reason: why it is not captured, once it has met values; None before.
        done: whether it is captured.
    """

    number: int
    scores: Tensor
    place: int | None
    tag: "_Scores | None"
    history: tuple[ScoreHistory, Callable[[], bool]] | None
    heads: int | None
    module: str
    outside: bool
    reason: str | None = None
    done: bool = False

    @property
    def of_a_product(self) -> bool:
        """Whether its input came from a product of two tensors that are made of the model's input."""
        return self.tag is not None and not any(self.tag.product.fixed)


class _Product(NamedTuple):
    """A product (N, M, D) x (N, D, K): M and K, and which of its factors are made of parameters alone."""

    number: int
    sizes: tuple[int, int]
    fixed: tuple[bool, bool]


class _Scores(NamedTuple):
    """A tensor that came from a product, and where the product's axes are in it."""

    product: _Product
    axes: Axes


class _Weights(NamedTuple):
    """A tensor that came from a softmax.

    Attributes:
        softmax: which.
        axes: where the softmax's axes are in it; None if they cannot be told any more.
        exact: whether its entries are still the softmax's.
        dropout: probability with which they were dropped.
        spread: whether they have been multiplied with a tensor that has more axes.
    """

    softmax: _Softmax
    axes: Axes | None
    exact: bool = True
    dropout: float = 0.0
    spread: bool = False
    logarithm: bool = False


class _Store:
    """What is known of a storage. Tags belong to tensors in it, by their geometry."""

    __slots__ = ("fixed", "noise", "ref", "scores", "weights")

    def __init__(self, tensor: Tensor) -> None:
        self.ref: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # also keeps its address from being used again
        self.scores: dict[Any, _Scores] = {}
        self.weights: dict[Any, _Weights] = {}
        self.fixed = False
        self.noise: float | None = None


class OperationWatch(TorchDispatchMode):
    """Follows softmaxes below Python.

    Args:
        recorder: knows what runs and what is covered; gets the calls and the notes.

    Attributes:
        offered: the history of the scores that a function seen in Python is about to give to its softmax.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # true would import the compiler, which takes a second, at the first use
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._plans: dict[Any, _Plan] = {}
        self._stores: dict[int, _Store] = {}
        self._limit = 256
        self._open: list[_Softmax] = []
        self._held: Counter[int] = Counter()
        self._writes: Counter[int] = Counter()
        self._numbers = 0
        self.offered: tuple[ScoreHistory, Callable[[], bool]] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at it."""
        kwargs = kwargs or {}
        recorder = self._recorder
        if torch._C._current_graph_task_id() != -1:  # a backward pass
            return func(*args, **kwargs)
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = _plan(func)
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

    def _guarded(self, plan: _Plan, look: Any, *args: Any) -> Any:
        """Look; a failure of ours is noted and never the model's."""
        try:
            with torch._C.DisableTorchFunction():
                return look(*args)
        except Exception as error:  # whatever a tensor of an unknown kind raises
            self._recorder.skip(plan.name, f"could not be followed ({type(error).__name__}: {str(error)[:80]})")
            return None

    def writes(self, tensor: Tensor) -> int:
        """How many operations have written to a tensor's storage so far."""
        return self._writes[_address(tensor)]

    def settle(self) -> None:
        """Say of every softmax what became of it, and forget it."""
        for softmax in self._open:
            if softmax.reason is not None and not softmax.done:
                self._recorder.skip("softmax", softmax.reason, softmax.module)
            elif not softmax.done and softmax.place is not None and not softmax.outside:
                self._recorder.audit.others[softmax.module] += 1
        self._open.clear()
        self._held.clear()
        self._stores = {
            key: store for key, store in self._stores.items() if store.fixed and not store.ref.expired()
        }

    # ------------------------------------------------------------------------------------------- looking

    def _look(
        self, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> AttentionCall | None:
        name, recorder = plan.name, self._recorder
        if recorder.covered or recorder.foreign:
            return None
        if isinstance(result, Tensor) and not result.is_nested and not result.numel():
            if name in _SOFTMAXES and result.ndim > 2:
                recorder.skip("softmax", NOTHING)
            return None
        if name.startswith(_FUSED) or name in _OPAQUE:
            return self._fused(name, args, kwargs, result)
        given = list(_tensors((*args, *kwargs.values())))
        if name in ("exp", "exp_") and result.ndim > 1 and result.is_floating_point():
            self._exponential(given[0], result)
        if name in _SOFTMAXES:
            self._softmax(plan, given[0], args[1] if len(args) > 1 else kwargs.get("dim", -1), result)
        elif name in _PRODUCTS:
            return self._product(name, args, kwargs, result)
        elif name in _NOISE:
            self._store(result).noise = (
                float(args[1]) if len(args) > 1 and not isinstance(args[1], Tensor) else 0.5
            )
        else:
            self._carry(name, args, given, result)
        return None

    def _fused(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> AttentionCall | None:
        """A fused attention that was not seen in Python: in a scripted or compiled graph, or in C++."""
        recorder = self._recorder
        if not recorder.listening:
            recorder.skip(name, _OUTSIDE)
            return None
        with outside_all_modes("cpu"):
            call = fused_call(name, args, kwargs, result)
        if call is None:
            recorder.skip(name, "runs below Python: in a compiled, traced or exported graph, or in C++")
        return call

    def _softmax(self, plan: _Plan, scores: Tensor, place: int, result: Any) -> None:
        if not (isinstance(result, Tensor) and is_plain(scores)) or scores.layout != torch.strided:
            self._recorder.skip("softmax", f"of a {type(scores).__name__}: only plain tensors are captured")
            return
        history, self.offered = self.offered, None
        held = self._saved.pop(_address(scores), scores) if plan.writes else scores
        softmax = self._open_softmax(held, self._scores_of(scores), place % max(1, scores.ndim), history)
        logarithm = "log" in plan.name
        self._tag(result).weights[_geometry(result)] = _Weights(
            softmax, fresh(result.shape, softmax.number), logarithm=logarithm
        )

    def _open_softmax(
        self,
        scores: Tensor,
        tag: "_Scores | None",
        place: int | None,
        history: tuple[ScoreHistory, Callable[[], bool]] | None,
    ) -> _Softmax:
        self._numbers += 1
        softmax = _Softmax(
            number=self._numbers,
            scores=scores.detach(),
            place=place,
            tag=tag,
            history=history,
            heads=self._recorder.heads,
            module=self._recorder.module,
            outside=not self._recorder.running,
        )
        self._open.append(softmax)
        self._held[_address(scores)] += 1
        return softmax

    def _product(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> AttentionCall | None:
        added = name in ("baddbmm", "addmm")
        a, b = (*args, *kwargs.values())[1:3] if added else args[:2]
        if not (is_plain(a) and is_plain(b)):
            return None
        of_a, of_b = self._weights_of(a), self._weights_of(b)
        if of_a is not None and of_b is not None:
            for tag in (of_a, of_b):
                reason = "its weights are multiplied with other attention weights, not with values"
                if tag.softmax.place is not None or tag.softmax.of_a_product:
                    tag.softmax.reason = tag.softmax.reason or reason
            self._tag(result).weights[_geometry(result)] = of_a._replace(axes=None, exact=False)
            return None
        if of_a is not None:
            return self._weighted(of_a, a, b, result, left=True, added=added)
        if of_b is not None:
            return self._weighted(of_b, b, a, result, left=False, added=added)
        if b.ndim < 2:
            return None
        fixed = self._fixed(a), self._fixed(b)
        for tensor, other_fixed in ((a, fixed[1]), (b, fixed[0])):
            scores = self._scores_of(tensor)
            if scores is not None and other_fixed and not any(scores.product.fixed):  # heads are mixed
                axes = _remaining(scores.axes, result, tensor is a)
                if _has_both(axes, scores.product):
                    self._tag(result).scores[_geometry(result)] = scores._replace(axes=axes)
                    return None
        if all(fixed):
            self._tag(result).fixed = True
        else:
            self._numbers += 1
            product = _Product(self._numbers, (result.shape[-2], result.shape[-1]), fixed)
            axes = fresh(result.shape if result.ndim == 3 else (1, *result.shape), self._numbers)[-result.ndim :]
            self._tag(result).scores[_geometry(result)] = _Scores(product, axes)
        return None

    def _weighted(
        self, tag: _Weights, weights: Tensor, other: Tensor, result: Tensor, *, left: bool, added: bool
    ) -> AttentionCall | None:
        """Weights meet another tensor in a product."""
        softmax, axes = tag.softmax, tag.axes
        if softmax.done:
            return None
        constant = self._fixed(other)
        if axes is None:
            if not constant and (softmax.place is not None or softmax.of_a_product):
                softmax.reason = "its weights were moved or changed by operations that are not followed"
            return None
        summed = merged(axes[-1] if left or weights.ndim == 1 else axes[-2])
        place = softmax.place
        if place is None and len(summed) == 1 and summed[0].origin == softmax.number:
            place = summed[0].place
            if not softmax.of_a_product:
                return None  # an exponential of something else
        keys = [p for p in summed if p.origin == softmax.number and p.place == place]
        size = 0 if place is None else softmax.scores.shape[place]
        if not keys and size != 1:
            if constant:
                moved = _remaining(axes, result, left)
                self._tag(result).weights[_geometry(result)] = tag._replace(axes=moved, exact=False)
            elif softmax.place is not None or softmax.of_a_product:
                softmax.reason = (
                    softmax.reason or "its softmax does not run over the axis that is summed with values"
                )
            return None
        reason, fixed = None, _keys_fixed(softmax, place)
        if softmax.outside:
            reason = _OUTSIDE
        elif size != 1 and summed != (Axis(softmax.number, place or 0, size, 1),):
            reason = "its values meet only a part of its weights"
        elif fixed is None:
            reason = "its scores are not followed to a product of queries and keys"
        elif fixed:
            reason = "its keys are parameters (a codebook, a router, learned keys), not made of the input"
        elif constant:
            reason = "its values are parameters, not made of the input"
        elif added:
            reason = "something is added to its values in the same operation"
        if reason is None:
            try:
                with outside_all_modes(result.device.type):
                    call = attention_of(
                        Weighted(
                            scores=softmax.scores,
                            key=place or 0,
                            history=softmax.history[0] if softmax.history and softmax.history[1]() else None,
                            heads=softmax.heads,
                            number=softmax.number,
                            axes=axes,
                            weights=weights.detach() if not tag.exact else None,
                            dropout=tag.dropout,
                            left=left,
                        ),
                        weights.shape,
                        other.detach(),
                        result.detach(),
                        self._recorder.generator,
                    )
            except UnfollowedError as error:
                softmax.reason = softmax.reason or str(error)
                return None
            softmax.done = True
            self._held[_address(softmax.scores)] -= 1
            softmax.scores = softmax.scores[..., :0]
            softmax.history = None
            return replace(call, mechanism=MECHANISM, dropout=tag.dropout)
        softmax.reason = softmax.reason or reason
        return None

    def _carry(self, name: str, args: tuple[Any, ...], given: list[Tensor], result: Any) -> None:
        """Any other operation: what comes out of it is made of what went in."""
        if not given:
            return
        tagged = [t for t in given if self._known(t)]
        outs = [t for t in _tensors((result,)) if t.is_floating_point() and is_plain(t)]
        if not tagged:
            if outs and all(map(self._fixed, given)):
                for out in outs:
                    if out.untyped_storage().data_ptr() not in self._recorder.parameters:
                        self._tag(out).fixed = True
            return
        for source in tagged:
            scores, weights = self._scores_of(source), self._weights_of(source)
            for out in outs:
                if scores is not None and self._tells_more(scores, out):
                    axes, _ = _followed(name, args, scores.axes, source, out)
                    if axes is not None and _has_both(axes, scores.product):
                        self._tag(out).scores[_geometry(out)] = scores._replace(axes=axes)
                if weights is not None:
                    self._pass_on(name, args, weights, source, given, out)

    def _tells_more(self, tag: _Scores, out: Tensor) -> bool:
        known = self._scores_of(out)
        return known is None or (any(known.product.fixed) and not any(tag.product.fixed))

    def _exponential(self, source: Tensor, out: Tensor) -> None:
        """It may be a softmax that is written out: its sum divides it later, or is 1 already."""
        if not is_plain(source) or self._weights_of(source) is not None:  # of a log_softmax: no other softmax
            return
        held = self._saved.pop(_address(source), source)
        softmax = self._open_softmax(held, self._scores_of(source), None, None)
        axes = fresh(out.shape, softmax.number)
        _prove(softmax, axes, out)
        self._tag(out).weights[_geometry(out)] = _Weights(softmax, axes, exact=False)

    def _pass_on(
        self, name: str, args: tuple[Any, ...], tag: _Weights, source: Tensor, given: list[Tensor], out: Tensor
    ) -> None:
        if name in ("sum", "mean") and tag.axes is not None:
            self._summed(tag, args, source)
            return
        axes, exact = (None, False) if tag.axes is None else _followed(name, args, tag.axes, source, out)
        others = [t for t in given if t is not source]
        if tag.axes is None or axes is None:
            if tag.axes is None and any(t.shape == out.shape and t.is_floating_point() for t in others):
                return  # added to a stream that has other things in it
            axes = None
        if axes is not None and not _has_keys(axes, tag.softmax):
            if out.numel() * max(2, tag.softmax.scores.shape[tag.softmax.place or 0]) <= source.numel():
                return  # one weight of each row was chosen
            axes = None
        noise = next((self._store(t).noise for t in others if self._has_noise(t)), None)
        dropout, spread = tag.dropout, tag.spread
        if name in ("mul", "mul_") and noise is not None:
            exact, dropout = True, 1 - noise
        elif name == "native_dropout":
            exact, dropout = True, float(args[1])
        elif tag.logarithm and name == "exp" and tag.exact:
            exact, tag = True, tag._replace(logarithm=False)
        elif axes is not None and any(p.origin == -1 for pieces in axes for p in pieces):
            spread = spread or any(not self._fixed(t) for t in others)
        if axes is not None and name in ("div", "div_", "mul", "mul_"):
            _prove(tag.softmax, axes, out)
        known = self._tag(out).weights.get(_geometry(out))
        if known is None or known.softmax is tag.softmax:
            self._tag(out).weights[_geometry(out)] = tag._replace(
                axes=axes, exact=exact and tag.exact, dropout=dropout, spread=spread
            )

    def _summed(self, tag: _Weights, args: tuple[Any, ...], source: Tensor) -> None:
        """Weights times values, element by element, and summed over the keys."""
        softmax, axes = tag.softmax, tag.axes
        dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else range(source.ndim)
        over = [
            p for d in dims for p in (axes or ((),) * source.ndim)[d] if p[:2] == (softmax.number, softmax.place)
        ]
        if tag.spread and over and not softmax.done and not _keys_fixed(softmax, over[0].place):
            softmax.reason = softmax.reason or "its values are multiplied and summed one by one, not in a product"

    # ------------------------------------------------------------------------------------------- bookkeeping

    def _before_write(self, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operation is about to write to its arguments: keep what is still needed as it was."""
        self._saved = {}
        noise = plan.name == "mul_" and any(map(self._has_noise, _tensors(args[1:])))
        for index, name in plan.writes:
            for tensor in _tensors((args[index] if index < len(args) else kwargs.get(name),)):
                address = _address(tensor)
                self._writes[address] += 1
                if self._held[address] > 0:
                    for softmax in self._open:
                        if not softmax.done and _address(softmax.scores) == address:
                            with outside_all_modes(tensor.device.type):
                                softmax.scores = softmax.scores.clone()
                    del self._held[address]
                store = self._stores.get(address)
                if plan.name in _SOFTMAXES or (plan.name == "exp_" and store is not None):
                    source = next(_tensors(args))
                    if _address(source) == address:
                        with outside_all_modes(tensor.device.type):
                            self._saved[address] = source.detach().clone()
                if store is None:
                    continue
                store.fixed = False
                if not noise:
                    store.weights = {key: tag._replace(exact=False) for key, tag in store.weights.items()}

    _saved: dict[int, Tensor] = {}  # noqa: RUF012  # inputs that a softmax is about to overwrite

    def _fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of parameters alone, by operations that are no products."""
        if not is_plain(tensor):
            return isinstance(tensor, torch.nn.Parameter)
        storage = tensor.untyped_storage()
        address = storage._cdata
        if storage.data_ptr() in self._recorder.parameters:
            return not self._writes[address]
        store = self._stores.get(address)
        return store is not None and store.fixed

    def _known(self, tensor: Tensor) -> bool:
        store = self._stores.get(_address(tensor))
        if store is None or not (store.scores or store.weights):
            return False
        key = _geometry(tensor)
        return key in store.scores or key in store.weights

    def _has_noise(self, tensor: Tensor) -> bool:
        store = self._stores.get(_address(tensor))
        return store is not None and store.noise is not None

    def _scores_of(self, tensor: Tensor) -> _Scores | None:
        store = self._stores.get(_address(tensor))
        return None if store is None or not store.scores else store.scores.get(_geometry(tensor))

    def _weights_of(self, tensor: Tensor) -> _Weights | None:
        store = self._stores.get(_address(tensor))
        return None if store is None or not store.weights else store.weights.get(_geometry(tensor))

    def _store(self, tensor: Tensor) -> _Store:
        address = _address(tensor)
        store = self._stores.get(address)
        if store is None:
            if len(self._stores) >= self._limit:
                self._stores = {key: s for key, s in self._stores.items() if not s.ref.expired()}
                self._limit = max(256, 2 * len(self._stores))
            store = self._stores[address] = _Store(tensor)
        return store

    _tag = _store


_OUTSIDE = "runs outside of the model's modules: call the module itself inside the context"


def _plan(func: Any) -> _Plan:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return _Plan(func.__name__.partition(".")[0], ())
    writes = tuple(
        (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    return _Plan(schema.name.partition("::")[2], writes)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (v for v in value if isinstance(v, Tensor))


def _address(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and their like have none
        return -1


def _geometry(tensor: Tensor) -> Any:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _remaining(axes: Axes, result: Tensor, left: bool) -> Axes:
    """The axes of a product of which one factor is known; those of the other factor are nobody's."""
    new = (Axis(-1, 0, result.shape[-1 if left else -2], 1),)
    if left:
        return (*axes[:-1], new)
    return (*axes[:-2], new, axes[-1])


def _has_keys(axes: Axes, softmax: _Softmax) -> bool:
    """Whether the axis that a softmax runs over is still there, if it has more than one entry."""
    there = {p.place for pieces in axes for p in pieces if p.origin == softmax.number}
    place = softmax.place
    return bool(there) if place is None else place in there or softmax.scores.shape[place] == 1


def _prove(softmax: _Softmax, axes: Axes, weights: Tensor) -> None:
    """Find the axis of a softmax that is written out, if weights sum to one along one."""
    if softmax.place is not None or not weights.numel():
        return
    with outside_all_modes(weights.device.type):
        for d, pieces in enumerate(axes):
            if (
                merged(pieces) == (Axis(softmax.number, pieces[0].place, weights.shape[d], 1),)
                if pieces
                else False
            ):
                total = weights.detach().float().sum(d)
                off = (total - 1).abs() > 16 * torch.finfo(weights.dtype).eps
                between = (weights > 1e-3) & (weights < 0.999)  # zeros and ones are more likely those of a mask
                if bool(between.any()) and not bool((off & ~total.isnan()).any()):
                    softmax.place = pieces[0].place


def _keys_fixed(softmax: _Softmax, place: int | None) -> bool | None:
    """Whether the keys are made of parameters alone; None if the scores come from no product over that axis."""
    if softmax.tag is None or place is None:
        return None
    product, axes = softmax.tag
    sides = [p.place for p in axes[place] if p.origin == product.number and p.place > 0]
    if not sides:
        return all(product.fixed) if not axes[place] else None
    return product.fixed[sides[0] - 1]


def _has_both(axes: Axes, product: _Product) -> bool:
    """Whether both sides of a product are still there, where they have more than one entry."""
    there = {p.place for pieces in axes for p in pieces if p.origin == product.number}
    return all(place in there or size == 1 for place, size in enumerate(product.sizes, start=1))


def _followed(
    name: str, args: tuple[Any, ...], axes: Axes, source: Tensor, out: Tensor
) -> tuple[Axes | None, bool]:
    """The axes after an operation, and whether entries are what they were."""
    if name in _REGROUPING:
        found = regrouped(axes, out.shape)
        return found, found is not None
    if name in _COPIES or out is source:
        return axes, name in _COPIES
    if name == "permute":
        return tuple(axes[d] for d in args[1]), True
    if name in ("transpose", "t"):
        if len(axes) < 2:
            return axes, True
        i, j = (args[1], args[2]) if name == "transpose" else (0, 1)
        order = list(range(len(axes)))
        order[i], order[j] = order[j], order[i]
        return tuple(axes[d] for d in order), True
    found = broadcast(axes, source.shape, out.shape)
    if found is not None:
        exact = name == "expand" or (name in ("slice", "narrow") and out.shape == source.shape)
        return found, exact
    return chosen(axes, source.shape, out.shape), False
