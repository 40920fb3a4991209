"""The outputs of two models on the same batches: divergence of their distributions, losses, changes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from semdiag.capturing.batches import Batch
from semdiag.measuring.table import Table
from semdiag.questions.k_sweep.measure.answer_changes import output_change, position_terms
from semdiag.questions.k_sweep.measure.answers import Answers, Reader
from semdiag_models import InputError

COMPARED_OUTPUTS = Table(
    "compared_outputs",
    "One row per sample: what the model answers, beside its base. Sums over the sample's targets (loss_base and "
    "loss, nats) and over its positions with a distribution (predictions; changed; divergence KL(base || model), "
    "nats); output_change: norm of the change of its outputs relative to their norm in the base.",
    {
        **dict.fromkeys(("model", "base"), "str"),
        "sample": "int32",
        **dict.fromkeys(("targets", "predictions", "changed"), "int64"),
        **dict.fromkeys(("loss_base", "loss", "divergence", "output_change"), "float64"),
    },
)
_SUMS = ("targets", "predictions", "changed", "loss", "divergence")


class Outputs:
    """Compares the outputs of both models in float64, read as the base's are (:class:`Reader`)."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._reader: Reader | None = None
        self.rows: list[dict[str, Any]] = []
        self.reason = ""

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Return remarks on how outputs were compared, each with a code."""
        notes, reader = [], self._reader
        if self.reason:
            notes.append((f"outputs are not compared: {self.reason}", "outputs-not-compared"))
        elif reader is not None and reader.others:
            notes.append((f"of its outputs {reader.others}", "outputs-compared"))
        elif reader is not None and reader.reason:
            text = f"logits are compared as outputs, not as a distribution: {reader.reason}"
            notes.append((text, "logits-as-outputs"))
        elif reader is not None and reader.loss:
            text = f"the loss that is compared is the cross-entropy of logits and labels: {reader.loss}"
            notes.append((text, "loss-of-logits"))
        return notes

    def prepare(self, batch: Batch, labels: Tensor | None, run_base: Callable[[Batch], Any]) -> None:
        """Learn from the first batch how to read outputs."""
        if self._reader is None and not self.reason:
            try:
                self._reader = Reader(self._module, batch, labels, run_base)
                self._reader.output = None
            except (TypeError, InputError) as error:
                self.reason = str(error).removesuffix(".")

    def add(self, before: Any, after: Any, batch: Batch, labels: Tensor | None, first: int) -> None:
        """Compare the outputs of the two models on a batch."""
        if self._reader is None:
            return
        try:
            shapes = [self._reader.shape(output, batch) for output in (before, after)]
            if shapes[0] != shapes[1]:
                self._give_up(f"they are of the shapes {shapes[0]} and {shapes[1]}")
                return
            one, two = (self._reader.read(output, batch, labels) for output in (before, after))
        except (TypeError, InputError) as error:
            self._give_up(str(error).removesuffix("."))
            return
        for at in range(len(one.values)):
            self.rows.append({"sample": first + at, **_changes(_sample(one, at), _sample(two, at))})

    def _give_up(self, reason: str) -> None:
        self.reason, self.rows, self._reader = reason, [], None


def _sample(answers: Answers, at: int) -> Answers:
    """Return one sample's outputs in float64: a batch's logits over a vocabulary might not fit into memory."""
    part = slice(at, at + 1)
    return replace(
        answers,
        values=answers.values[part].double(),
        targets=None if answers.targets is None else answers.targets[part],
        counted=answers.counted[part],
    )


def _changes(before: Answers, after: Answers) -> dict[str, Any]:
    sums = {name: x.sum().item() for name, x in position_terms(before, after).items() if name in _SUMS}
    loss = position_terms(before, before)["loss"].sum().item()
    return sums | {"loss_base": loss, "output_change": output_change(before, after).item()}
