"""A model whose indexers may keep every key: what are its outputs without their selection?"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, Self

from torch import nn

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch
from semdiag.questions.compare.measure.outputs import Outputs
from semdiag.questions.selections.measure.dense import IndexedAttention, KeptAll, KeptAllWatch
from semdiag.questions.selections.measure.own_rows import Tokens

_K = "index_topk"  # what indexers of transformers call their k


class _Watching(Protocol):
    """An observer of the model, with the exception that its own code raised."""

    failure: Exception | None


class WithoutSelection:
    """Runs a model with the k of its indexers raised to the length, and compares its outputs.

    Args:
        model: on its device.
        indexers: modules that have a k, each with its own.

    Attributes:
        reason: why the model could not be run like that; empty if it could.
        outputs: of both runs; the model without selection is the base.
    """

    def __init__(self, model: nn.Module, indexers: Mapping[nn.Module, int]) -> None:
        self.reason, self.outputs = "", Outputs(model)
        self._model, self._indexers = model, indexers
        self._watch, self._samples = KeptAllWatch(frozenset()), 0

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Return one for a model; None if no module has a known k."""
        indexers = {module: k for module in model.modules() if type(k := getattr(module, _K, None)) is int}
        return cls(model, indexers) if indexers else None

    @property
    def layers(self) -> list[KeptAll]:
        """Return the layers whose keys indexers choose."""
        return [*self._watch.kept_all.values()]

    def watch(self, layers: Mapping[str, IndexedAttention]) -> KeptAllWatch:
        """Return the watch for the choices and the attention of these layers."""
        self._watch.modules |= frozenset(layers)
        return self._watch

    @contextmanager
    def raised(self, tokens: Tokens) -> Iterator[None]:
        """Raise every k to the length of the longest sequence, inside the context."""
        for module, k in self._indexers.items():
            setattr(module, _K, max((k, *tokens.lengths)))
        try:
            yield
        finally:
            for module, k in self._indexers.items():
                setattr(module, _K, k)

    def run(self, batch: Batch, watching: _Watching) -> Any:
        """Run the model on a batch; its exceptions become the reason, those of the observer are raised."""
        if self.reason:
            return None
        try:
            return batching.call(self._model, batch)
        except Exception as error:  # whatever the model raises
            if error is watching.failure:
                raise
            self.reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return None

    def compare(self, dense: Any, output: Any, batch: Batch) -> None:
        """Compare the outputs for a batch.

        Args:
            dense: without selection; None: it could not be run.
            output: of the model as it is.
            batch: on its device.
        """
        if self.reason:
            return
        self.outputs.prepare(batch, None, lambda given: batching.call(self._model, given))
        self.outputs.add(dense, output, batch, None, self._samples)
        self._samples += batching.samples_of(batch)
