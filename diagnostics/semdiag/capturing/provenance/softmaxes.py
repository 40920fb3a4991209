"""Trace scores from the product of queries and keys to the softmax, and softmaxes until they meet values."""

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from semdiag.capturing.attention_call import Args, AttentionCall, Kwargs
from semdiag.capturing.provenance.score_history import ScoreHistory, UntraceableError, scores_alone
from semdiag.capturing.provenance.tags import (
    Axes,
    AxisPiece,
    History,
    InputShapes,
    ScoresTag,
    Softmax,
    Tags,
    WeightsTag,
    address,
    join_pieces,
    own_axes,
    read_axes,
    tensors,
)
from semdiag.capturing.recording import Recorder, is_plain, outside_all_modes

NO_VALUES = (
    "a mask was applied to it as to attention, but its weights never met values: a mask cannot tell beforehand "
    "that this is no attention. Run the model without it, or write it as log_softmax(…).exp()"
)
NO_SOFTMAX = (
    "a product of two tensors made of the input is multiplied with a third, with no softmax between: it may be "
    "attention of another kind (sigmoid, ReLU, SiLU, linear)"
)
IN_THREADS = (
    "the forward pass runs in several threads, and its weights may meet values in another one, where they are not "
    "followed: it may hide attention"
)
SOFTMAXES = ("_softmax", "_safe_softmax", "softmax", "_log_softmax", "log_softmax")
EXPONENTIALS = ("exp", "exp_", "exp2", "exp2_", "expm1", "expm1_", "pow", "pow_")


class Softmaxes:
    """Softmaxes of one forward pass whose outcome is still unknown."""

    def __init__(self, recorder: Recorder, tags: Tags) -> None:
        self._recorder = recorder
        self._tags = tags
        self._open: list[Softmax] = []
        self._saved: dict[int, Tensor] = {}  # inputs that a softmax is about to overwrite
        self.offered: History | None = None
        self.masked = False
        self.without: dict[int, tuple[str, str]] = {}

    def observe(self, name: str, scores: Tensor, axis: int, result: object, overwritten: bool) -> None:
        """Start to trace a softmax that has run."""
        if not (isinstance(result, Tensor) and is_plain(scores)) or scores.layout != torch.strided:
            self._recorder.skip("softmax", f"of a {type(scores).__name__}: only plain tensors are captured")
            return
        history = self.offered
        self.offered = None
        softmax = self._start(scores, axis % max(1, scores.ndim), history, overwritten)
        softmax.masked = self.masked
        self.masked = False
        axes = own_axes(result.shape, softmax.number)
        if softmax.one_key:
            self._tags.marks.add("one key")
        self._tags.tag_weights(result, WeightsTag(softmax, axes, logarithm="log" in name))

    def observe_exponential(self, name: str, args: Sequence[object], out: Tensor, overwritten: bool) -> None:
        """Start to trace an exponential, which may be a softmax whose sum divides later, or is 1 already."""
        source = _exponent(name, args)
        unit = _unit(name, args, out.dtype)
        if not is_plain(source) or not unit or source.shape != out.shape:
            return
        weights = self._tags.weights(source)
        if weights is not None and weights.softmax.suspect:  # exp of log_softmax: the same softmax
            return
        softmax = self._start(source, None, None, overwritten)
        softmax.unit = unit
        axes = own_axes(out.shape, softmax.number)
        find_axis(softmax, axes, out)
        self._tags.tag_weights(out, WeightsTag(softmax, axes, exact=False))

    def _start(self, scores: Tensor, axis: int | None, history: History | None, overwritten: bool) -> Softmax:
        tag: ScoresTag | None = self._tags.scores(scores)
        if overwritten:
            scores = self._saved.pop(address(scores), scores)
        number = self._tags.number()
        recorder = self._recorder
        place = recorder.heads, recorder.module, not recorder.running
        self._open.append(Softmax(number, scores.detach(), axis, tag, history, *place))
        return self._open[-1]

    def before_write(
        self, name: str, args: Sequence[object], written: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        """Save what is still needed of tensors that an operation is about to overwrite."""
        self._saved = {}
        noise = name == "mul_" and any(self._tags.marked(t, "noise") is not None for t in tensors(args[1:]))
        for tensor in written:
            constant = all(map(self._tags.constant, inputs))
            tagged = self._tags.written(tensor, noise, self._only_updates(tensor, inputs), constant)
            self._copy_scores(tensor)
            if name in SOFTMAXES or (name in EXPONENTIALS and tagged):
                self._save_exponent(_exponent(name, args), tensor)

    def _only_updates(self, tensor: Tensor, inputs: Sequence[Tensor]) -> bool:
        """Return whether a write only updates parameters, from others or as an optimiser steps between passes."""
        if not is_plain(tensor):
            return False
        idle = not self._recorder.running
        if idle and tensor.untyped_storage().data_ptr() in self._recorder.trained:
            return True
        return all(map(self._tags.fixed, inputs))

    def _copy_scores(self, tensor: Tensor) -> None:
        """Copy the scores of open softmaxes that lie in a tensor's storage."""
        storage = address(tensor)
        for softmax in self._open:
            if not softmax.done and address(softmax.scores) == storage:
                with outside_all_modes(tensor.device.type):
                    softmax.scores = softmax.scores.clone()

    def _save_exponent(self, source: object, tensor: Tensor) -> None:
        """Save the input of a softmax or an exponential, if it lies in a tensor's storage."""
        storage = address(tensor)
        if isinstance(source, Tensor) and address(source) == storage:
            with outside_all_modes(tensor.device.type):
                self._saved[storage] = source.detach().clone()

    def release(self, softmax: Softmax) -> None:
        """Mark a softmax as captured, and free its memory."""
        softmax.done = True
        if softmax.tag is not None:
            self.without.pop(softmax.tag.number, None)
        softmax.scores = softmax.scores.new_zeros(()).expand(softmax.scores.shape)  # only its shape
        softmax.history = None

    def settle(self) -> None:
        """Note the outcome of every softmax, then forget all of them."""
        for softmax in self._open:
            if not softmax.done and (softmax.reason or softmax.masked):
                self._recorder.skip("softmax", softmax.reason or NO_VALUES, softmax.module)
            elif softmax.done or softmax.axis is None or softmax.outside:
                continue
            elif self._recorder.shared and not softmax.keys_fixed(softmax.axis):
                self._recorder.skip("softmax", IN_THREADS, softmax.module)
            else:
                self._recorder.audit.others[softmax.module] += 1
        for operation, module in self.without.values():
            self._recorder.skip(operation, NO_SOFTMAX, module)
        self._open.clear()
        self.without.clear()


def _exponent(name: str, args: Sequence[object]) -> object:
    return args[1] if name.startswith("pow") else next(tensors(args))


def _unit(name: str, args: Sequence[object], dtype: torch.dtype) -> float:
    """Return ln of an exponential's base, the factor from its argument to the scores."""
    if not name.startswith("pow"):
        return math.log(2) if name.startswith("exp2") else 1.0
    base = args[0].detach() if isinstance(args[0], Tensor) else args[0]
    if isinstance(base, Tensor) and (not is_plain(base) or base.numel() != 1):
        return 0.0
    with outside_all_modes("cpu"):
        number = float(torch.as_tensor(base, dtype=dtype))
    return math.log(number) if 0 < number < math.inf else 0.0


def find_axis(softmax: Softmax, axes: Axes, weights: Tensor) -> None:
    """Find the axis of a softmax that is written out, along which the weights sum to one."""
    if softmax.axis is not None or not weights.numel():
        return
    with outside_all_modes(weights.device.type):
        between = bool(((weights > 1e-3) & (weights < 0.999)).any())  # a mask's entries are all 0 or 1
        for d, pieces in enumerate(axes):
            full_axis = pieces and (AxisPiece(softmax.number, pieces[0].axis, weights.shape[d], 1),)
            if pieces and join_pieces(pieces) == full_axis and between:
                total = weights.detach().sum(d, dtype=torch.promote_types(weights.dtype, torch.float32))
                if not bool(((total - 1).abs() > 16 * torch.finfo(weights.dtype).eps).any()):
                    softmax.axis = pieces[0].axis


def product_factors(name: str, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor, float, Tensor | None] | None:
    """Return q (…, Lq, D) and k (…, Lk, D) of a product, its factor, and a term added to it or None."""
    if name == "einsum":
        return _einsum(args)
    alpha = 1.0
    added = None
    named = [kwargs[key] for key in ("input", "batch1", "other", "mat2", "batch2", "tensor2") if key in kwargs]
    factors = [*args, *named]
    if name == "baddbmm":
        alpha = float(kwargs.get("alpha", 1))
        beta = kwargs.get("beta", 1)
        term = factors.pop(0)
        added = None if beta == 0 else term * beta
    factors = factors[:2]
    if len(factors) < 2 or not all(_usable(x) for x in factors):
        return None
    a, b = factors
    return a, b.transpose(-2, -1), alpha, added


def _usable(x: object) -> bool:
    return is_plain(x) and x.ndim >= 2 and x.is_floating_point() and x.layout == torch.strided


def _einsum(args: Args) -> tuple[Tensor, Tensor, float, None] | None:
    """Return the factors of "…id,…jd->…ij", with the letters of each factor in any order."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if not isinstance(args[0], str) or len(operands) != 2 or not all(map(_usable, operands)):
        return None
    left, _, out = args[0].replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    summed = (set(first) & set(second)) - set(out)
    if "." in left or len(out) < 2 or len(set(out)) < len(out) or len(summed) != 1:
        return None
    batch = out[:-2]
    i = out[-2]
    j = out[-1]
    sides = (first, [*batch, i, *summed]), (second, [*batch, j, *summed])
    if any(sorted(letters) != sorted(axes) for letters, axes in sides):  # one operand is summed over a letter
        return None
    orders = [[letters.index(axis) for axis in axes] for letters, axes in sides]
    return operands[0].permute(orders[0]), operands[1].permute(orders[1]), 1.0, None


MECHANISM = "softmax provenance"


class SoftmaxProvenance:
    """Traces score tensors from the product that makes them to the softmax that consumes them."""

    def __init__(self, writes: Callable[[Tensor], int], product: Callable[[Tensor], ScoresTag | None]) -> None:
        self._writes = writes
        self._product_of = product
        self._scores: MutableMapping[Tensor, tuple[ScoreHistory, list[tuple[Tensor, int]]]] = WeakIdKeyDictionary()

    def close(self) -> None:
        """Forget everything."""
        self._scores.clear()

    def before(self, args: Args, kwargs: Kwargs) -> None:
        """Forget invalid tags of operands before an operation runs."""
        if not self._scores:
            return
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and x in self._scores and self.history(x) is None:
                del self._scores[x]

    def history(self, tensor: Tensor) -> tuple[ScoreHistory, Callable[[], bool]] | None:
        """Return the history of scores, and a check that it is still valid; None if unknown."""
        history, stamps = self._scores.get(tensor, (None, []))
        if history is None or any(self._writes(x) != count for x, count in stamps):
            return None
        writes = self._writes
        made = stamps[:-1]
        return history, lambda: all(writes(x) == count for x, count in made)

    def masked(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs, bool]:
        """Return a softmax's arguments with -inf as the scores of keys that the recorder's mask drops."""
        scores: Tensor = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        key = scores.ndim - 1
        tag = self._product_of(scores)
        if dim not in (-1, key) or tag is None or tag.keys_fixed(key) is not False:
            return args, kwargs, False
        history, stamps = self._true_history(scores, recorder.generator)
        if history is None and not tag.whole(key, scores.shape[-1]):  # a sink may be among the keys
            return args, kwargs, False
        with outside_all_modes(scores.device.type):
            arrangement = _arrangement(scores, tag, history, recorder.shapes)
            s = arrangement.arranged(scores.detach())
            call = _before_softmax(s, arrangement.usual(history), recorder.heads)
        kept_keys = recorder.kept(replace(call, module=recorder.outside(nn.Softmax), mechanism=MECHANISM))
        if kept_keys is None:
            return args, kwargs, scores.shape[-1] > 1
        kept_keys = arrangement.restored(kept_keys, scores.shape)
        remaining = scores.masked_fill(~kept_keys, -torch.inf)
        if history is not None:
            filled = history.filled(-torch.inf, scores.dtype, kept_keys)
            self._keep(remaining, replace(filled, checked=True), stamps)
        return ((remaining, *args[1:]), kwargs, True) if args else (args, {**kwargs, "input": remaining}, True)

    def _true_history(
        self, scores: Tensor, generator: torch.Generator
    ) -> tuple[ScoreHistory | None, list[tuple[Tensor, int]]]:
        """Return the history of a softmax's input and what it is made of; None where the input is another."""
        if self.history(scores) is None:
            return None, []
        history, stamps = self._scores[scores]
        with outside_all_modes(scores.device.type):
            values = scores.detach()
            history = history.split(values)
            return (history, stamps[:-1]) if history.agrees(values, generator) else (None, [])

    def follow(self, name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Observe an operation that has just run: it makes scores, or changes them, or ends their history."""
        try:
            if name in _PRODUCTS:
                self._product(name, args, kwargs, result)
                return
            scores = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x in self._scores)
            if self._scores and (tensor := next(scores, None)) is not None:
                history, stamps = self._scores[tensor]
                target = tensor if name == "__setitem__" else result
                self._scores.pop(target, None)
                with outside_all_modes(tensor.device.type):
                    self._keep(target, _changed(history, tensor, name, args, kwargs, target), stamps[:-1])
        except UntraceableError:
            return
        except Exception:
            self._scores.clear()  # they may be out of date
            raise

    def _keep(self, tensor: Tensor, history: ScoreHistory, stamps: list[tuple[Tensor, int]]) -> None:
        made = [x for x in (history.q, history.k, history.bias, history.allowed) if x is not None]
        stamped = {id(x) for x, _ in stamps}
        stamps = [*stamps, *((x, self._writes(x)) for x in made if id(x) not in stamped)]
        detached = tensor.detach()  # shares the storage; the tag must not keep the tensor itself alive
        self._scores[tensor] = history, [*stamps, (detached, self._writes(detached))]

    def _product(self, name: str, args: Args, kwargs: Kwargs, result: Tensor) -> None:
        with outside_all_modes(result.device.type):
            product = product_factors(name, args, kwargs)
            if product is None:
                return
            q, k, alpha, added = product
            eps = torch.finfo(result.dtype).eps
            history = ScoreHistory(q.detach(), k.detach(), result.shape[:-2], scale=alpha, eps=eps)
            self._keep(result, history if added is None else history.plus(added, result.dtype), [])


class _Arrangement(NamedTuple):
    """How the axes of scores become (…, queries, keys)."""

    order: list[int]  # the axes of the scores, the keys' last
    single_query: bool  # whether each query has keys of its own, so that an axis of length 1 is added for it

    def arranged(self, scores: Tensor) -> Tensor:
        """Return scores with queries and keys last."""
        s = scores.permute(self.order)
        return s[..., None, :] if self.single_query else s

    def restored(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Return values for the arranged scores in the order of the scores' axes."""
        sizes = [shape[d] for d in self.order]
        return values.reshape(sizes).permute([self.order.index(d) for d in range(len(shape))])

    def usual(self, history: ScoreHistory | None) -> ScoreHistory | None:
        """Return the history of scores whose axes stay in order; None for others, to which it does not apply."""
        return history if self.order == sorted(self.order) else None


def _arrangement(
    scores: Tensor, tag: ScoresTag, history: ScoreHistory | None, inputs: InputShapes
) -> _Arrangement:
    """Find which axes of a softmax's input are queries and keys; the keys' is the last."""
    key = scores.ndim - 1
    q = None if history is None else history.q
    roles, _ = read_axes(scores.shape, key, tag.rows(key), inputs, q, tag.axes)
    if roles.query is None and history is not None:
        return _Arrangement([*range(key + 1)], False)
    return _Arrangement([*roles.order, key], roles.query is None)


def _before_softmax(scores: Tensor, history: ScoreHistory | None, heads: int | None) -> AttentionCall:
    """Return a call before its softmax runs: its values and its output are stand-ins."""
    if history is None:
        history = scores_alone(scores, (*scores.shape[:-2], scores.shape[-1]))
    heads = heads or (scores.shape[1] if scores.ndim == 4 else None)
    return history.call(history.k, history.q.expand(*history.lead, *history.q.shape[-2:]), heads, scores)


def _changed(
    history: ScoreHistory, scores: Tensor, name: str, args: Args, kwargs: Kwargs, result: Tensor
) -> ScoreHistory:
    """Return the history of scores that an operation changed."""
    if name in _VIEWS:
        return history.viewed(result)
    if result.shape[-2:] != scores.shape[-2:]:
        raise UntraceableError
    history = replace(history, lead=result.shape[:-2])  # another operand may bring axes
    operation = name.rstrip("_")
    is_method = bool(args) and args[0] is scores
    arguments = dict(zip(_argument_names(name, is_method), args, strict=False)) | kwargs
    if operation in _FILLING:
        return _filled(history, scores, operation, arguments, result.dtype)
    if operation == "tanh":
        return history.bent()
    if name == "nan_to_num" or (operation == "dropout" and not _drops(arguments)):
        return history
    return _combined(history, scores, operation, arguments, result.dtype)


def _combined(
    history: ScoreHistory, scores: Tensor, operation: str, arguments: Kwargs, dtype: torch.dtype
) -> ScoreHistory:
    """Return the history of scores that were multiplied, divided, added to or subtracted from."""
    first = arguments.get("input") is scores
    operand: Any = arguments.get("other") if first else arguments.get("input")
    unscaled = arguments.get("alpha", 1) == 1
    match operation:
        case "mul" | "multiply":
            return history.times(operand)
        case "div" | "divide" | "true_divide" if first and arguments.get("rounding_mode") is None:
            return history.times(1 / operand)
        case "add" if unscaled:
            return history.plus(operand, dtype)
        case "sub" | "subtract" if first and unscaled:
            return history.plus(-1.0 * operand, dtype)
    raise UntraceableError


def _filled(
    history: ScoreHistory, scores: Tensor, operation: str, arguments: Kwargs, dtype: torch.dtype
) -> ScoreHistory:
    """Return the history of scores of which some were overwritten."""
    first = arguments.get("input") is scores
    if operation == "masked_fill" and first:
        return history.filled(arguments["value"], dtype, ~arguments["mask"].bool())
    if operation == "__setitem" and first:
        return history.filled(arguments["value"], dtype)
    if operation == "where" and "other" in arguments:
        chosen = arguments["condition"].bool()
        if first:
            return history.filled(arguments["other"], dtype, chosen)
        return history.filled(arguments.get("input"), dtype, ~chosen)
    raise UntraceableError


def _drops(arguments: Kwargs) -> bool:
    """Return whether dropout changes the scores."""
    return bool(arguments.get("training", True) and arguments.get("p", 0.5))


def _argument_names(name: str, is_method: bool) -> tuple[str, ...]:
    """Return the names of an operation's arguments; ``is_method``: the scores are the first."""
    match name.rstrip("_"):
        case "where":
            return ("input", "condition", "other") if is_method else ("condition", "input", "other")
        case "masked_fill":
            return "input", "mask", "value"
        case "__setitem":
            return "input", "index", "value"
        case "dropout":
            return "input", "p", "training"
    return "input", "other"


_PRODUCTS = ("matmul", "bmm", "__matmul__", "einsum", "baddbmm")
_VIEWS = (
    *("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "clone", "detach"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16"),
)
_CHANGES = (
    *("mul", "mul_", "multiply", "div", "div_", "divide", "true_divide", "add", "add_", "sub", "sub_", "subtract"),
    *("masked_fill", "masked_fill_", "__setitem__", "where", "tanh", "dropout", "nan_to_num"),
)
_FILLING = ("masked_fill", "__setitem", "where")
FOLLOWED = frozenset((*_PRODUCTS, *_VIEWS, *_CHANGES))

MERGED = (
    "its output is rescaled by a sum of exponentials of scores: if this merges blocks of keys, each of its "
    "calls is one block, and its rows are not those of the whole attention"
)
UNMASKED_SUM = (
    "its output depends on a sum of exponentials of its scores (a sink by hand, blocks of keys merged by "
    "logsumexp), which the mask does not reach"
)
SUMS = ("logsumexp", "sum")
_WEIGHING = frozenset(("mul", "div", "bmm", "mm", "baddbmm", "addcmul", "addcdiv", "lerp"))
_SPREADING = frozenset(("expand", "repeat", "stack", "cat", "constant_pad_nd"))


class MergedBlocks:
    """Follows tensors computed from attention's outputs and from its sums of exponentials, one per row."""

    def __init__(self, recorder: Recorder, tags: Tags) -> None:
        self._recorder = recorder
        self._tags = tags

    @property
    def follows(self) -> bool:
        """Whether an operation matters: under a mask, outputs are followed before there are sums."""
        return "sums" in self._tags.marks or (self._recorder.masking and "output" in self._tags.marks)

    def mark_output(self, output: Tensor, sums: object = None) -> None:
        """Mark the output of a captured attention."""
        with torch._C.DisableTorchFunction():
            for tensor, kind in ((output, "output"), (sums, "sums")):
                if is_plain(tensor):
                    self._tags.mark(tensor, kind, self._recorder.module)

    def observe(self, name: str, product: bool, args: Sequence[Any], inputs: list[Tensor], result: object) -> None:
        """Observe an operation that has run."""
        if name in SUMS and self._are_sums(name, args, inputs[0]):
            for out in tensors((result,)):
                self._tags.mark(out, "sums", self._recorder.module)
        if not self.follows:
            return
        sums = self._marked(inputs, "sums")
        outputs = self._marked(inputs, "output")
        if any(t is not s for s, _ in sums for t, _ in outputs):
            self._note_merged(name.removesuffix("_"), sums, outputs[0][1])
        if not product or any(map(self._tags.fixed, inputs)):
            self._pass_on(name.removesuffix("_"), "sums", sums, result)
            self._pass_on(name.removesuffix("_"), "output", outputs, result)

    def _marked(self, inputs: list[Tensor], kind: str) -> list[tuple[Tensor, str]]:
        """Return the inputs with a mark, and the modules that the marks name."""
        return [(t, module) for t in inputs if (module := self._tags.marked(t, kind)) is not None]

    def _note_merged(self, name: str, sums: list[tuple[Tensor, str]], module: str) -> None:
        """Note that an output meets sums of exponentials."""
        if self._recorder.masking and any(s.numel() > 1 for s, _ in sums):
            self._recorder.skip(name, UNMASKED_SUM, module)
        elif name in _WEIGHING:
            self._recorder.remark(MERGED, module)

    def _pass_on(self, name: str, kind: str, sources: list[tuple[Tensor, str]], result: object) -> None:
        """Mark an operation's results as its inputs are."""
        for source, module in sources:
            for out in tensors((result,)):
                if is_plain(out) and (name in _SPREADING or out.numel() <= source.numel()):
                    self._tags.mark(out, kind, module)

    def _are_sums(self, name: str, args: Sequence[Any], source: Tensor) -> bool:
        """Return whether an operation sums exponentials of scores that depend on the input on both sides."""
        scores, weights = self._tags.of(source)
        if name == "logsumexp":
            return scores is not None and not any(scores.fixed)
        if weights is None or weights.axes is None or weights.softmax.axis is not None or weights.spread:
            return False  # no exponentials, or divided already
        dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        pieces = join_pieces(weights.axes[dims[0]]) if len(dims) == 1 else ()
        return weights.softmax.of_a_product and any(p.origin == weights.softmax.number for p in pieces)
