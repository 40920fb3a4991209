"""Capturing attention written by hand: a product of queries and keys that a softmax consumes, times values."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from semdiag.capturing.products import product_factors, weighted_layout
from semdiag.capturing.recording import Recorder, outside_all_modes
from semdiag.capturing.score_history import ScoreHistory, UntraceableError, as_number, reshaped

MECHANISM = "softmax provenance"


@dataclass(frozen=True, eq=False)
class _Weights:
    """What is known about a tensor of attention weights; ``heads`` as the softmax saw them, if it did."""

    number: int
    heads: int | None
    history: ScoreHistory
    allowed: Tensor | None
    module: str
    dropout: float = 0.0


class SoftmaxProvenance:
    """Follows score tensors from the product that makes them to the product that consumes their softmax.

    Tensors are tagged in a table beside them, weakly: nothing is attached to them. A tensor that goes
    through an operation that is not understood loses its tag.

    Args:
        recorder: gets the calls.
        everything: whether a softmax over an untagged tensor is noted in the audit.
    """

    def __init__(self, recorder: Recorder, everything: bool) -> None:
        self._recorder = recorder
        self._everything = everything
        self._scores: MutableMapping[Tensor, ScoreHistory] = WeakIdKeyDictionary()
        self._weights: MutableMapping[Tensor, _Weights] = WeakIdKeyDictionary()
        self._waiting: dict[int, str] = {}  # softmaxes whose weights have not met their values yet
        self._softmaxes = 0

    def close(self) -> None:
        """Note what was begun and not finished; forget everything."""
        for module in self._waiting.values():
            self._recorder.skip("softmax", "of a product, but its weights meet no values in a known way", module)
        self._waiting.clear()
        self._scores.clear()
        self._weights.clear()

    def follows(self, name: str) -> bool:
        """Whether an operation of this name can matter."""
        return name in _FOLLOWED

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Look at an operation that has just run.

        Args:
            name: of the torch function.
            args: its arguments.
            kwargs: its named arguments.
            result: what it returned.
        """
        if name in _PRODUCTS:
            self._product(name, args, kwargs, result)
        elif name in _SOFTMAX:
            self._softmax(args, kwargs, result)
        elif name in _STEPS:
            self._step(name, args, kwargs, result)

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        with outside_all_modes(result.device.type):
            found = product_factors(name, args, kwargs, self._recorder.parameters)
            if found is None:
                return
            weights = self._weights.get(found.first)
            if weights is not None:
                layout = weighted_layout(found, result)
                if layout is not None:
                    self._finish(weights, *layout)
            elif found.q is not None and found.k is not None:
                tag = ScoreHistory(found.q.detach(), found.k.detach(), result.shape[:-2], scale=found.alpha)
                try:
                    self._scores[result] = tag if found.added is None else tag.plus(found.added)
                except UntraceableError:
                    return

    def _softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        scores: Tensor = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        history = self._scores.get(scores)
        if history is None or dim not in (-1, scores.ndim - 1):
            if self._everything:
                self._recorder.skip("softmax", "not over the keys of a product of queries and keys")
            return
        with outside_all_modes(scores.device.type):
            allowed = history.allowed
            if history.floor is not None:
                left = scores.detach() > history.floor
                allowed = left if allowed is None else left & allowed
        self._softmaxes += 1
        heads = self._recorder.heads or (scores.shape[1] if scores.ndim == 4 else None)
        self._weights[result] = _Weights(self._softmaxes, heads, history, allowed, self._recorder.module)
        self._waiting[self._softmaxes] = self._recorder.module

    def _finish(self, weights: _Weights, v: Tensor, mixed: Tensor) -> None:
        self._waiting.pop(weights.number, None)
        module = self._recorder.module or weights.module
        call = weights.history.call(v.detach(), mixed.detach(), weights.allowed, weights.heads)
        self._recorder.record(replace(call, module=module, mechanism=MECHANISM, dropout=weights.dropout))

    def _step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation on scores or on weights: carry the tag on, or lose it."""
        operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        for tensor in operands:
            weights, history = self._weights.get(tensor), self._scores.get(tensor)
            if weights is None and history is None:
                continue
            target = tensor if name == "__setitem__" else result
            try:
                if weights is not None:
                    self._weights[target] = _next_weights(weights, name, args, kwargs, target)
                elif history is not None:
                    with outside_all_modes(tensor.device.type):
                        self._scores[target] = _STEPS[name](history, tensor, args, kwargs, target)
            except UntraceableError:
                self._scores.pop(target, None)
                self._weights.pop(target, None)
            return


def _next_weights(
    weights: _Weights, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> _Weights:
    if name == "dropout":
        return replace(weights, dropout=_dropped(args, kwargs))
    if name in _VIEWS:
        old, new = weights.history.lead, result.shape[:-2]
        history = weights.history.viewed(result)
        allowed = weights.allowed
        return replace(weights, history=history, allowed=None if allowed is None else reshaped(allowed, old, new))
    if name in ("masked_fill", "masked_fill_", "nan_to_num") and (
        name == "nan_to_num" or as_number(args[2] if len(args) > 2 else kwargs["value"]) == 0
    ):
        return weights
    raise UntraceableError


def _dropped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    return float(given.get("p", 0.5)) if given.get("training", True) else 0.0


_Step = Callable[[ScoreHistory, Tensor, tuple[Any, ...], dict[str, Any], Tensor], ScoreHistory]


def _other(history_of: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operand that is not the scores; the scores may stand on either side."""
    second = args[1] if len(args) > 1 else kwargs.get("other")
    return args[0] if second is history_of else second


def _times(
    h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> ScoreHistory:
    return h.times(_other(x, args, kwargs))


def _divided(h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor) -> ScoreHistory:
    if args[0] is not x or kwargs.get("rounding_mode") is not None:
        raise UntraceableError
    divisor = _other(x, args, kwargs)
    return h.times(1 / divisor)


def _plus(h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor) -> ScoreHistory:
    if kwargs.get("alpha", 1) != 1 or r.shape != x.shape:
        raise UntraceableError
    return h.plus(_other(x, args, kwargs))


def _minus(h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor) -> ScoreHistory:
    if kwargs.get("alpha", 1) != 1 or args[0] is not x or r.shape != x.shape:
        raise UntraceableError
    return h.plus(-_other(x, args, kwargs))


def _filled(h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor) -> ScoreHistory:
    if args[0] is not x or r.shape != x.shape:
        raise UntraceableError
    value = args[2] if len(args) > 2 else kwargs["value"]
    return h.filled(value, ~(args[1] if len(args) > 1 else kwargs["mask"]))


def _assigned(
    h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor
) -> ScoreHistory:
    if args[0] is not x:
        raise UntraceableError
    return h.filled(args[2])


def _chosen(h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor) -> ScoreHistory:
    if len(args) != 3 or args[0] is x or r.shape != x.shape:
        raise UntraceableError
    return h.filled(args[2], args[0]) if args[1] is x else h.filled(args[1], ~args[0])


def _viewed(h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor) -> ScoreHistory:
    return h.viewed(r)


def _bent(h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor) -> ScoreHistory:
    return h.bent()


def _undropped(
    h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor
) -> ScoreHistory:
    if _dropped(args, kwargs):
        raise UntraceableError
    return h


_PRODUCTS = ("matmul", "bmm", "__matmul__", "einsum", "baddbmm")
_VIEWS = (
    *("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "clone", "detach"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16"),
)
_SOFTMAX = ("softmax", "_softmax")
_STEPS: dict[str, _Step] = {
    **dict.fromkeys(("mul", "mul_", "multiply"), _times),
    **dict.fromkeys(("div", "div_", "divide", "true_divide"), _divided),
    **dict.fromkeys(("add", "add_"), _plus),
    **dict.fromkeys(("sub", "sub_", "subtract"), _minus),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _filled),
    "__setitem__": _assigned,
    **dict.fromkeys(_VIEWS, _viewed),
    "where": _chosen,
    "tanh": _bent,
    "dropout": _undropped,
    "nan_to_num": lambda h, x, args, kwargs, r: h,
}
_FOLLOWED = frozenset((*_PRODUCTS, *_SOFTMAX, *_STEPS))
