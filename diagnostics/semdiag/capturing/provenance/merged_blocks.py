"""Attention computed in blocks of keys whose outputs are merged by their log-sum-exp."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from semdiag.capturing.audit import Remark
from semdiag.capturing.provenance.axes import merged
from semdiag.capturing.provenance.tags import Tags, tensors
from semdiag.capturing.recording import Recorder, is_plain

MERGED = (
    "its output is rescaled by a sum of exponentials of scores: if this merges blocks of keys, each of its "
    "calls is one block, and its rows are not those of the whole attention"
)
SUMS = ("logsumexp", "sum")
_WEIGHING = frozenset(("mul", "div", "bmm", "mm", "baddbmm", "addcmul", "addcdiv", "lerp"))
_SPREADING = frozenset(("expand", "repeat", "stack", "cat"))


class MergedBlocks:
    """Follows what is computed from attention's outputs and from its sums of exponentials, one per row."""

    def __init__(self, recorder: Recorder, tags: Tags) -> None:
        self._recorder, self._tags = recorder, tags

    def mark_output(self, output: Tensor, sums: object = None) -> None:
        """Mark what a captured attention returned."""
        if is_plain(output):
            self._tags.mark(output, "output", self._recorder.module)
        if is_plain(sums):
            self._tags.mark(sums, "sums", self._recorder.module)

    def observe(self, name: str, product: bool, args: Sequence[Any], given: list[Tensor], result: object) -> None:
        """Look at an operation that has run."""
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
        """Return whether an operation sums exponentials of scores that depend on the input on both sides."""
        scores, weights = self._tags.of(source)
        if name == "logsumexp":
            return scores is not None and not any(scores.product.fixed)
        if weights is None or weights.axes is None or weights.softmax.axis is not None or weights.spread:
            return False  # no exponentials, or divided already
        dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        pieces = merged(weights.axes[dims[0]]) if len(dims) == 1 else ()
        return weights.softmax.of_a_product and any(p.origin == weights.softmax.number for p in pieces)
