"""Trace softmaxes, including those written out with exp: their input, and what becomes of them."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from semdiag.capturing.provenance.axes import Axes, AxisPiece, merged, own_axes
from semdiag.capturing.provenance.tags import History, Scores, Softmax, Tags, Weights, address, tensors
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
    """The softmaxes of one forward pass whose outcome is not known yet."""

    def __init__(self, recorder: Recorder, tags: Tags) -> None:
        self._recorder, self._tags = recorder, tags
        self._open: list[Softmax] = []
        self._inputs_in_use: Counter[int] = Counter()
        self._saved: dict[int, Tensor] = {}  # inputs that a softmax is about to overwrite
        self.offered: History | None = None
        self.masked = False
        self.without: dict[int, tuple[str, str]] = {}

    def observe(self, name: str, scores: Tensor, axis: int, result: object, overwritten: bool) -> None:
        """Start to trace a softmax that has run."""
        if not (isinstance(result, Tensor) and is_plain(scores)) or scores.layout != torch.strided:
            self._recorder.skip("softmax", f"of a {type(scores).__name__}: only plain tensors are captured")
            return
        history, self.offered = self.offered, None
        softmax = self._start(scores, axis % max(1, scores.ndim), history, overwritten)
        softmax.masked, self.masked = self.masked, False
        axes = own_axes(result.shape, softmax.number)
        if softmax.one_key:
            self._tags.marks.add("one key")
        self._tags.tag_weights(result, Weights(softmax, axes, logarithm="log" in name))

    def observe_exponential(self, name: str, args: Sequence[object], out: Tensor, overwritten: bool) -> None:
        """Start to trace an exponential: it may be a softmax whose sum divides later, or is 1 already."""
        source, unit = _exponent(name, args), _unit(name, args, out.dtype)
        if not is_plain(source) or not unit or source.shape != out.shape:
            return
        weights = self._tags.weights(source)
        if weights is not None and weights.softmax.suspect:  # exp of log_softmax: the same softmax
            return
        softmax = self._start(source, None, None, overwritten)
        softmax.unit = unit
        axes = own_axes(out.shape, softmax.number)
        find_axis(softmax, axes, out)
        self._tags.tag_weights(out, Weights(softmax, axes, exact=False))

    def _start(self, scores: Tensor, axis: int | None, history: History | None, overwritten: bool) -> Softmax:
        tag: Scores | None = self._tags.scores(scores)
        if overwritten:
            scores = self._saved.pop(address(scores), scores)
        softmax = Softmax(
            number=self._tags.number(),
            scores=scores.detach(),
            axis=axis,
            tag=tag,
            history=history,
            heads=self._recorder.heads,
            module=self._recorder.module,
            outside=not self._recorder.running,
        )
        self._open.append(softmax)
        self._inputs_in_use[address(scores)] += 1
        return softmax

    def before_write(self, name: str, args: Sequence[object], written: Sequence[Tensor]) -> None:
        """Save what is still needed of tensors that an operation is about to overwrite."""
        self._saved = {}
        noise = name == "mul_" and any(self._tags.noise(t) is not None for t in tensors(args[1:]))
        for tensor in written:
            storage = address(tensor)
            known = self._tags.written(tensor, noise)
            if self._inputs_in_use.get(storage, 0) > 0:
                for softmax in self._open:
                    if not softmax.done and address(softmax.scores) == storage:
                        with outside_all_modes(tensor.device.type):
                            softmax.scores = softmax.scores.clone()
                        self._inputs_in_use[address(softmax.scores)] += 1
                self._inputs_in_use[storage] = 0
            if name in SOFTMAXES or (name in EXPONENTIALS and known):
                source = _exponent(name, args)
                if isinstance(source, Tensor) and address(source) == storage:
                    with outside_all_modes(tensor.device.type):
                        self._saved[storage] = source.detach().clone()

    def release(self, softmax: Softmax) -> None:
        """Mark a softmax as captured and free what was held for it."""
        softmax.done = True
        if softmax.tag is not None:
            self.without.pop(softmax.tag.product.number, None)
        self._inputs_in_use[address(softmax.scores)] -= 1
        softmax.scores = softmax.scores.new_zeros(()).expand(softmax.scores.shape)  # its shape alone
        softmax.history = None

    def settle(self) -> None:
        """Note the outcome of every softmax, then forget them all."""
        for softmax in self._open:
            if softmax.reason is not None and not softmax.done:
                self._recorder.skip("softmax", softmax.reason, softmax.module)
            elif softmax.masked and not softmax.done:
                self._recorder.skip("softmax", NO_VALUES, softmax.module)
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
        self._inputs_in_use.clear()


def _exponent(name: str, args: Sequence[object]) -> object:
    """Return the argument of a softmax or an exponential."""
    return args[1] if name.startswith("pow") else next(tensors(args))


def _unit(name: str, args: Sequence[object], dtype: torch.dtype) -> float:
    """Return ln of an exponential's base: its argument times this are the scores."""
    if not name.startswith("pow"):
        return math.log(2) if name.startswith("exp2") else 1.0
    base = args[0].detach() if isinstance(args[0], Tensor) else args[0]
    if isinstance(base, Tensor) and (not is_plain(base) or base.numel() != 1):
        return 0.0
    with outside_all_modes("cpu"):
        number = float(torch.as_tensor(base, dtype=dtype))
    return math.log(number) if 0 < number < math.inf else 0.0


def find_axis(softmax: Softmax, axes: Axes, weights: Tensor) -> None:
    """Find the axis of a softmax that is written out: the one along which the weights sum to one."""
    if softmax.axis is not None or not weights.numel():
        return
    with outside_all_modes(weights.device.type):
        for d, pieces in enumerate(axes):
            if not pieces or merged(pieces) != (AxisPiece(softmax.number, pieces[0].axis, weights.shape[d], 1),):
                continue
            if sums_to_one(weights, d):
                softmax.axis = pieces[0].axis


def sums_to_one(weights: Tensor, axis: int) -> bool:
    """Return whether weights sum to one along an axis, up to rounding, and are not all 0 or 1, as in a mask."""
    dtype = torch.promote_types(weights.dtype, torch.float32)
    off = (weights.detach().sum(axis, dtype=dtype) - 1).abs()
    wrong = (off > 16 * torch.finfo(weights.dtype).eps) & ~off.isnan()
    between = (weights > 1e-3) & (weights < 0.999)
    return bool(between.any()) and not bool(wrong.any())
