"""Attention over blocks of keys, whose outputs are merged by their log-sum-exp: it looks like several attentions.

Over keys K₁ ∪ K₂, with l_b = log Σ_{j ∈ K_b} exp z_j and o_b the output over the block K_b, the output of the
whole is Σ_b exp(l_b − log Σ_c exp l_c) · o_b (ring attention, flash-decoding). Each o_b is attention, and is
captured as such; that its rows are not those of the whole is told where an o_b is multiplied with what is made of
an l_b.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from semdiag.capturing.audit import Remark
from semdiag.capturing.following.axes import merged
from semdiag.capturing.following.tags import Tags, tensors
from semdiag.capturing.recording import Recorder, is_plain

MERGED = (
    "what it returns is weighed by a sum of exponentials of scores: if blocks of keys are merged so, each of its "
    "calls is one block, and its rows are not those of the whole attention"
)
SUMS = ("logsumexp", "sum")
_WEIGHING = frozenset(("mul", "div", "bmm", "mm", "baddbmm", "addcmul", "addcdiv", "lerp"))
_SPREADING = frozenset(("expand", "repeat", "stack", "cat"))


class MergedBlocks:
    """Follows what is made of sums of exponentials of scores, one number a row, and of attention's outputs.

    Args:
        recorder: knows what runs; gets the remarks.
        tags: of tensors.
    """

    def __init__(self, recorder: Recorder, tags: Tags) -> None:
        self._recorder, self._tags = recorder, tags

    def attended(self, output: Tensor, sums: object = None) -> None:
        """An attention has been captured.

        Args:
            output: what it returned.
            sums: the logarithms of its rows' sums of exponentials, where it returned these, too.
        """
        if is_plain(output):
            self._tags.mark(output, "output", self._recorder.module)
        if is_plain(sums):
            self._tags.mark(sums, "sums", self._recorder.module)

    def ran(self, name: str, product: bool, args: Sequence[Any], given: list[Tensor], result: object) -> None:
        """An operation has run.

        Args:
            name: of the operation.
            product: whether it is a product.
            args: its arguments.
            given: tensors among them.
            result: what it returned.
        """
        if name in SUMS and self._are_sums(name, args, given[0]):
            for out in tensors((result,)):
                self._tags.mark(out, "sums", self._recorder.module)
        if "sums" not in self._tags.marks:
            return
        name = name.removesuffix("_")
        sums = [(t, m) for t in given if (m := self._tags.marked(t, "sums")) is not None]
        outputs = [(t, m) for t in given if (m := self._tags.marked(t, "output")) is not None]
        if name in _WEIGHING and any(t is not s for s, _ in sums for t, _ in outputs):
            self._recorder.audit.remarks[Remark(outputs[0][1], MERGED)] += 1
        if product:
            return
        for kind, known in (("sums", sums), ("output", outputs)):
            for source, module in known:
                for out in tensors((result,)):
                    if is_plain(out) and (name in _SPREADING or out.numel() <= source.numel()):
                        self._tags.mark(out, kind, module)

    def _are_sums(self, name: str, args: Sequence[Any], source: Tensor) -> bool:
        """Whether an operation sums exponentials of scores: of a product that the input made both factors of."""
        scores, weights = self._tags.of(source)
        if name == "logsumexp":
            return scores is not None and not any(scores.product.fixed)
        if weights is None or weights.axes is None or weights.softmax.place is not None or weights.spread:
            return False  # no exponentials, or divided already
        dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        pieces = merged(weights.axes[dims[0]]) if len(dims) == 1 else ()
        return weights.softmax.of_a_product and any(p.origin == weights.softmax.number for p in pieces)
