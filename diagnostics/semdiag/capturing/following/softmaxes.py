"""Softmaxes, also those that are written out with exp: what went into them, and what became of them."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from semdiag.capturing.following.axes import Axes, Axis, fresh, merged
from semdiag.capturing.following.tags import History, Scores, Softmax, Tags, Weights, address, tensors
from semdiag.capturing.recording import Recorder, is_plain, outside_all_modes

NO_VALUES = (
    "it was masked like attention, but its weights were not seen to meet values: what is no attention must not be "
    "masked, and a mask cannot know it beforehand. Run the model without it, or write it as log_softmax(…).exp()"
)
IN_THREADS = (
    "the forward pass runs in several threads, and its weights may meet values in another, where they are not "
    "followed: it may hide attention"
)
SOFTMAXES = ("_softmax", "_safe_softmax", "softmax", "_log_softmax", "log_softmax")
EXPONENTIALS = ("exp", "exp_", "exp2", "exp2_", "expm1", "expm1_", "pow", "pow_")


class Softmaxes:
    """The softmaxes of a forward, until it is known what became of them.

    Args:
        recorder: knows what runs; gets the notes.
        tags: of tensors.

    Attributes:
        offered: the history of the scores that a function seen in Python is about to give to its softmax.
        masked: whether a mask has been put into them.
    """

    def __init__(self, recorder: Recorder, tags: Tags) -> None:
        self._recorder, self._tags = recorder, tags
        self._open: list[Softmax] = []
        self._held: Counter[int] = Counter()
        self._saved: dict[int, Tensor] = {}  # inputs that a softmax is about to overwrite
        self.offered: History | None = None
        self.masked = False

    def ran(self, name: str, scores: Tensor, place: int, result: object, overwritten: bool) -> None:
        """A softmax has run.

        Args:
            name: of the operation.
            scores: its input.
            place: the axis it runs over.
            result: what it returned.
            overwritten: whether it may have written to its input, which :meth:`before_write` kept then.
        """
        if not (isinstance(result, Tensor) and is_plain(scores)) or scores.layout != torch.strided:
            self._recorder.skip("softmax", f"of a {type(scores).__name__}: only plain tensors are captured")
            return
        history, self.offered = self.offered, None
        softmax = self._opened(scores, place % max(1, scores.ndim), history, overwritten)
        softmax.masked, self.masked = self.masked, False
        axes = fresh(result.shape, softmax.number)
        if softmax.one_key:
            self._tags.marks.add("one key")
        self._tags.tag_weights(result, Weights(softmax, axes, logarithm="log" in name))

    def exponential(self, name: str, args: Sequence[object], out: Tensor, overwritten: bool) -> None:
        """It may be a softmax that is written out: its sum divides it later, or is 1 already.

        Args:
            name: of the operation.
            args: its arguments.
            out: what it returned.
            overwritten: whether it may have written to its input, which :meth:`before_write` kept then.
        """
        source, unit = _exponent(name, args), _unit(name, args, out.dtype)
        if not is_plain(source) or not unit or source.shape != out.shape:
            return
        weights = self._tags.weights(source)
        if weights is not None and weights.softmax.suspect:  # of a log_softmax: no other softmax
            return
        softmax = self._opened(source, None, None, overwritten)
        softmax.unit = unit
        axes = fresh(out.shape, softmax.number)
        prove(softmax, axes, out)
        self._tags.tag_weights(out, Weights(softmax, axes, exact=False))

    def _opened(self, scores: Tensor, place: int | None, history: History | None, overwritten: bool) -> Softmax:
        tag: Scores | None = self._tags.scores(scores)
        if overwritten:
            scores = self._saved.pop(address(scores), scores)
        softmax = Softmax(
            number=self._tags.number(),
            scores=scores.detach(),
            place=place,
            tag=tag,
            history=history,
            heads=self._recorder.heads,
            module=self._recorder.module,
            outside=not self._recorder.running,
        )
        self._open.append(softmax)
        self._held[address(scores)] += 1
        return softmax

    def before_write(self, name: str, args: Sequence[object], written: Sequence[Tensor]) -> None:
        """An operation is about to write to tensors: keep what is still needed as it was."""
        self._saved = {}
        noise = name == "mul_" and any(self._tags.noise(t) is not None for t in tensors(args[1:]))
        for tensor in written:
            place = address(tensor)
            known = self._tags.written(tensor, noise)
            if self._held.get(place, 0) > 0:
                for softmax in self._open:
                    if not softmax.done and address(softmax.scores) == place:
                        with outside_all_modes(tensor.device.type):
                            softmax.scores = softmax.scores.clone()
                        self._held[address(softmax.scores)] += 1
                self._held[place] = 0
            if name in SOFTMAXES or (name in EXPONENTIALS and known):
                source = _exponent(name, args)
                if isinstance(source, Tensor) and address(source) == place:
                    with outside_all_modes(tensor.device.type):
                        self._saved[place] = source.detach().clone()

    def captured(self, softmax: Softmax) -> None:
        """A softmax has been described: nothing of it needs to be kept."""
        softmax.done = True
        self._held[address(softmax.scores)] -= 1
        softmax.scores = softmax.scores.new_zeros(()).expand(softmax.scores.shape)  # its shape alone
        softmax.history = None

    def settle(self) -> None:
        """Say of every softmax what became of it, and forget it."""
        for softmax in self._open:
            if softmax.reason is not None and not softmax.done:
                self._recorder.skip("softmax", softmax.reason, softmax.module)
            elif softmax.masked and not softmax.done:
                self._recorder.skip("softmax", NO_VALUES, softmax.module)
            elif softmax.done or softmax.place is None or softmax.outside:
                continue
            elif self._recorder.shared and not softmax.keys_fixed(softmax.place):
                self._recorder.skip("softmax", IN_THREADS, softmax.module)
            else:
                self._recorder.audit.others[softmax.module] += 1
        self._open.clear()
        self._held.clear()


def _exponent(name: str, args: Sequence[object]) -> object:
    """What a softmax or an exponential is taken of."""
    return args[1] if name.startswith("pow") else next(tensors(args))


def _unit(name: str, args: Sequence[object], dtype: torch.dtype) -> float:
    """The logarithm of the base of an exponential: what it is taken of, times this, are scores.

    Args:
        name: of the operation.
        args: its arguments.
        dtype: of its result, to which torch rounds a base.

    Returns:
        The logarithm; 0 if the base is no positive number.
    """
    if not name.startswith("pow"):
        return math.log(2) if name.startswith("exp2") else 1.0
    base = args[0].detach() if isinstance(args[0], Tensor) else args[0]
    if isinstance(base, Tensor) and (not is_plain(base) or base.numel() != 1):
        return 0.0
    with outside_all_modes("cpu"):
        number = float(torch.as_tensor(base, dtype=dtype))
    return math.log(number) if 0 < number < math.inf else 0.0


def prove(softmax: Softmax, axes: Axes, weights: Tensor) -> None:
    """Find the axis of a softmax that is written out, if weights sum to one along one.

    Args:
        softmax: of which the axis may not be known.
        axes: of its axes in the weights.
        weights: that it may have made.
    """
    if softmax.place is not None or not weights.numel():
        return
    with outside_all_modes(weights.device.type):
        for d, pieces in enumerate(axes):
            if not pieces or merged(pieces) != (Axis(softmax.number, pieces[0].place, weights.shape[d], 1),):
                continue
            if sums_to_one(weights, d):
                softmax.place = pieces[0].place


def sums_to_one(weights: Tensor, place: int) -> bool:
    """Whether weights sum to one along an axis, up to rounding, and are not all zeros and ones, as of a mask."""
    dtype = torch.promote_types(weights.dtype, torch.float32)
    off = (weights.detach().sum(place, dtype=dtype) - 1).abs()
    wrong = (off > 16 * torch.finfo(weights.dtype).eps) & ~off.isnan()
    between = (weights > 1e-3) & (weights < 0.999)
    return bool(between.any()) and not bool(wrong.any())
