"""Trace scores in Python: from the product of queries and keys to the softmax."""

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from semdiag.capturing.fully_masked import with_full_rows_read
from semdiag.capturing.provenance.axis_roles import read_axes
from semdiag.capturing.provenance.product_factors import product_factors
from semdiag.capturing.provenance.score_history import ScoreHistory, UntraceableError, scores_alone
from semdiag.capturing.provenance.tags import Scores
from semdiag.capturing.provenance.weighted_values import WeightedProduct
from semdiag.capturing.recording import Recorder, outside_all_modes

MECHANISM = "softmax provenance"


class SoftmaxProvenance:
    """Traces score tensors from the product that makes them to the softmax that consumes them."""

    def __init__(self, writes: Callable[[Tensor], int], product: Callable[[Tensor], Scores | None]) -> None:
        self._writes, self._product_of = writes, product
        self._scores: MutableMapping[Tensor, tuple[ScoreHistory, list[tuple[Tensor, int]]]] = WeakIdKeyDictionary()

    def close(self) -> None:
        """Forget everything."""
        self._scores.clear()

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forget operands' tags that are no longer valid, before an operation runs."""
        if not self._scores:
            return
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and x in self._scores and self.history(x) is None:
                del self._scores[x]

    def history(self, tensor: Tensor) -> tuple[ScoreHistory, Callable[[], bool]] | None:
        """Return how scores were made, and a check that this is still valid; None if unknown."""
        history, stamps = self._scores.get(tensor, (None, []))
        if history is None or any(self._writes(x) != count for x, count in stamps):
            return None
        writes, made = self._writes, stamps[:-1]
        return history, lambda: all(writes(x) == count for x, count in made)

    def masked(
        self, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """Return a softmax's arguments with the scores of keys that the recorder's mask drops at -inf."""
        scores: Tensor = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        tag = self._product_of(scores)
        if dim not in (-1, scores.ndim - 1) or tag is None or tag.keys_fixed(scores.ndim - 1) is not False:
            return args, kwargs, False
        history, stamps = (None, []) if self.history(scores) is None else self._scores[scores]
        if history is None and not tag.whole(scores.ndim - 1, scores.shape[-1]):  # a sink may be among the keys
            return args, kwargs, False
        with outside_all_modes(scores.device.type):
            order, own = self._order(recorder, scores, tag, history)
            s = scores.detach().permute(order)
            s = s[..., None, :] if own else s
            usual = history if order == sorted(order) else None
            read = scores_alone(s, (*s.shape[:-2], s.shape[-1])) if usual is None else usual.split(s)
            heads = recorder.heads or (s.shape[1] if s.ndim == 4 else None)
            read, allowed, full = with_full_rows_read(read, s)
            call = read.call(read.k, read.q.expand(*read.lead, *read.q.shape[-2:]), allowed, heads, full)
        kept = recorder.kept(replace(call, module=recorder.outside(nn.Softmax), mechanism=MECHANISM))
        if kept is None:
            return args, kwargs, scores.shape[-1] > 1
        kept = kept.reshape(s.shape)
        kept = (kept[..., 0, :] if own else kept).permute([order.index(d) for d in range(scores.ndim)])
        left = scores.masked_fill(~kept, -torch.inf)
        if history is not None:
            self._keep(left, history.filled(-torch.inf, scores.dtype, kept), stamps[:-1])
        return ((left, *args[1:]), kwargs, True) if args else (args, {**kwargs, "input": left}, True)

    def _order(
        self, recorder: Recorder, scores: Tensor, tag: Scores, history: ScoreHistory | None
    ) -> tuple[list[int], bool]:
        """Return the order samples, heads, queries, keys of the axes of scores, as read once they meet values."""
        key = scores.ndim - 1
        weighted = WeightedProduct(
            scores=scores,
            key=key,
            history=history,
            product=tag.axes,
            heads=recorder.heads,
            number=tag.product.number,
            axes=tag.axes,
            weights=None,
            dropout=0.0,
            left=True,
            input_shapes=recorder.shapes,
        )
        roles, _ = read_axes(weighted, tag.rows(key))
        if roles.query is not None:
            return [*roles.lead, roles.query, key], False
        return ([*range(key + 1)], False) if history is not None else ([*roles.lead, key], True)

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Look at an operation that has just run."""
        try:
            if name in _PRODUCTS:
                self._product(name, args, kwargs, result)
            else:
                self._step(name, args, kwargs, result)
        except UntraceableError:
            return

    def _keep(self, tensor: Tensor, history: ScoreHistory, stamps: list[tuple[Tensor, int]]) -> None:
        made = [x for x in (history.q, history.k, history.bias, history.allowed) if x is not None]
        known = {id(x) for x, _ in stamps}
        stamps = [*stamps, *((x, self._writes(x)) for x in made if id(x) not in known)]
        detached = tensor.detach()  # shares the storage; the tag must not keep the tensor itself alive
        self._scores[tensor] = (
            history,
            [*(s for s in stamps if s[0] is not None), (detached, self._writes(detached))],
        )

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        with outside_all_modes(result.device.type):
            product = product_factors(name, args, kwargs)
            if product is None:
                return
            eps = torch.finfo(result.dtype).eps
            history = ScoreHistory(
                product.q.detach(), product.k.detach(), result.shape[:-2], scale=product.alpha, eps=eps
            )
            self._keep(result, history if product.added is None else history.plus(product.added, result.dtype), [])

    def _step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Carry tags through an operation on scores, or drop them."""
        if not self._scores:
            return
        for tensor in (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)):
            history, stamps = self._scores.get(tensor, (None, []))
            if history is None:
                continue
            target = tensor if name == "__setitem__" else result
            self._scores.pop(target, None)
            with outside_all_modes(tensor.device.type):
                self._keep(target, _STEPS[name](history, tensor, args, kwargs, target), stamps[:-1])
            return


def _dropped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    return float(given.get("p", 0.5)) if given.get("training", True) else 0.0


_Step = Callable[[ScoreHistory, Tensor, tuple[Any, ...], dict[str, Any], Tensor], ScoreHistory]


def _other(history_of: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the operand that is not the scores, on either side."""
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
    return h.plus(_other(x, args, kwargs), r.dtype)


def _minus(h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor) -> ScoreHistory:
    if kwargs.get("alpha", 1) != 1 or args[0] is not x or r.shape != x.shape:
        raise UntraceableError
    return h.plus(-1.0 * _other(x, args, kwargs), r.dtype)


def _filled(h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor) -> ScoreHistory:
    if args[0] is not x or r.shape != x.shape:
        raise UntraceableError
    value = args[2] if len(args) > 2 else kwargs["value"]
    return h.filled(value, r.dtype, ~(args[1] if len(args) > 1 else kwargs["mask"]))


def _assigned(
    h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor
) -> ScoreHistory:
    if args[0] is not x:
        raise UntraceableError
    return h.filled(args[2], r.dtype)


def _chosen(h: ScoreHistory, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], r: Tensor) -> ScoreHistory:
    if len(args) != 3 or args[0] is x or r.shape != x.shape:
        raise UntraceableError
    return h.filled(args[2], r.dtype, args[0]) if args[1] is x else h.filled(args[1], r.dtype, ~args[0])


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
FOLLOWED = frozenset((*_PRODUCTS, *_STEPS))
