"""A model's own selections: what its routers and indexers choose on given inputs."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.capturing.batches import Batch
from semdiag.capturing.factories import in_evaluation_mode
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.selections.number_formats import NumberFormat
from semdiag.measuring.calls.running import placed
from semdiag.measuring.token_tables import token_ids
from semdiag.questions.selections.measure.dense import DenseWatch, IndexedAttention
from semdiag.questions.selections.measure.kept_all import WithoutSelection
from semdiag.questions.selections.measure.own_rows import (
    OwnRows,
    Place,
    Tokens,
    causal_modules,
    kind_of,
    own_rows,
    tokens_of,
)
from semdiag.questions.selections.measure.sample_map import SampleMap, sample_map
from semdiag.questions.selections.measure.saved import Saving
from semdiag.questions.selections.measure.stages import in_stages
from semdiag.questions.selections.measure.watch import Selected, watch_selections
from semdiag_models import InputError


@dataclass
class OwnSelection:
    """What one selection of a model chose, in all batches.

    Attributes:
        module: that selects.
        layer: the first number in its name; None: it has none.
        parts: of each batch.
    """

    module: str
    layer: int | None
    parts: list[OwnRows] = field(default_factory=list)


@dataclass
class OwnSelections:
    """A model's own selections.

    Attributes:
        selections: in the order in which they ran.
        others: number of selections whose rows are not tokens, by module and shape.
        dense: attention whose keys indexers chose, beside dense attention.
        without: the model without the selection of its indexers; None: no indexer's k can be raised.
        maps: of the first sample.
    """

    selections: list[OwnSelection]
    others: Counter[tuple[str, tuple[int, ...]]]
    dense: list[IndexedAttention] = field(default_factory=list)
    without: WithoutSelection | None = None
    maps: list[SampleMap] = field(default_factory=list)


def own_selections(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    kind: NumberFormat,
    device: torch.device,
    dtype: torch.dtype,
    saving: Saving | None = None,
) -> OwnSelections:
    """Run a model and return what it selects.

    A model with indexers runs a second time without a selection: every ``index_topk`` is raised to the length.

    Args:
        loaded: an external model; it is moved and converted.
        batches: its inputs.
        kind: the format of the certificate.
        device: where it runs.
        dtype: of the model.
        saving: gets what each selection chose.

    Raises:
        InputError: if the model cannot be run on the inputs, selects nothing, or a score is NaN.
    """
    model = placed(in_evaluation_mode(loaded.module), device, dtype)
    collector = _Collector(loaded.path, kind, model, DenseWatch(), saving)
    without = WithoutSelection.of(model)
    with torch.no_grad():
        for number, batch in enumerate(batches):
            moved = batching.moved(batch, device, dtype)
            with collector.watching(model, moved, attention=not number or collector.indexed):
                output = _run(loaded, moved, collector)
            if without is not None and collector.indexed:
                second = _Collector(loaded.path, kind, model, without.watch(collector.dense.layers))
                with without.raised(collector.tokens), second.watching(model, moved):
                    dense = without.run(moved, second)
                without.compare(dense, output, moved)
    entries = collector.of_parts()
    if not entries:
        raise InputError(
            f"{loaded.path} selects nothing for its tokens: while it ran, no topk, argmax or sort of scores was "
            "seen in it whose rows are its tokens. This is for models with routers or indexers; what a selection "
            f"would cost a model without: semdiag k-sweep {loaded.path} --rerun"
        )
    ran = without if without is not None and collector.indexed else None
    return OwnSelections(entries, collector.others, [*collector.dense.layers.values()], ran, collector.maps)


class _Collector:
    """Collects a model's selections."""

    def __init__(
        self, path: str, kind: NumberFormat, model: nn.Module, dense: DenseWatch, saving: Saving | None = None
    ) -> None:
        self.tokens, self.dense = Tokens(0, frozenset(), {}), dense
        self.others: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.maps: list[SampleMap] = []
        self.failure: Exception | None = None  # ours, not the model's
        self._path, self._kind, self._causal, self._saving = path, kind, causal_modules(model), saving
        self._found: dict[tuple[str, int, str, int], OwnSelection] = {}
        self._ids: Tensor | None = None
        self._first = True

    @property
    def indexed(self) -> bool:
        """Return whether keys or blocks of keys were chosen."""
        return any(kind != "experts" for _, _, kind, _ in self._found)

    @contextlib.contextmanager
    def watching(self, model: nn.Module, batch: Batch, attention: bool = True) -> Iterator[None]:
        """Take what the model selects while it runs on a batch, and what attends."""
        self.tokens = tokens_of(model, batch)
        self._ids = next(iter(token_ids(batch).values()), None)
        attends = watch_attention(model, self.attended) if attention else contextlib.nullcontext()
        with attends, watch_selections(model, self.consume):
            yield
        self.dense.forget()
        self._first = False

    def attended(self, call: AttentionCall) -> None:
        """Take a call of an attention layer."""
        try:
            self.dense.attended(call)
        except Exception as error:
            self.failure = error
            raise

    def consume(self, name: str, module: nn.Module, selected: list[Selected]) -> None:
        """Take what a module has selected."""
        text = f"{name} {type(module).__name__}".lower()
        try:
            for number, (chosen, group) in enumerate(in_stages(selected)):
                self._add(name, number, text, chosen, group)
        except InputError as error:
            self.failure = InputError(f"{self._path}: {name}: {error}")
            raise self.failure from None
        except Exception as error:
            self.failure = error
            raise

    def _add(self, name: str, number: int, text: str, chosen: Selected, group: Selected | None) -> None:
        shape = tuple(chosen.scores.shape)
        chooses = kind_of(text, shape, self.tokens)
        if not chooses:
            self.others[name, shape] += 1
            return
        place = Place(text, chooses, name in self._causal, self.tokens)
        rows, choices = own_rows(place, chosen, group, self._kind)
        layer = re.search(r"\d+", name)
        key = name, number, chooses, shape[-1] if chooses == "experts" else 0
        entry = OwnSelection(name, int(layer[0]) if layer else None)
        self._found.setdefault(key, entry).parts.append(rows)
        self.dense.chosen(name, choices)
        if chosen.positions or not name:  # positions in a table of other choices, or outside all parts
            return
        if self._first:
            self.maps.append(sample_map(name, choices))
        if self._saving is not None:
            self._saving.add(name, number, choices, None if self._ids is None else self._ids.cpu())

    def of_parts(self) -> list[OwnSelection]:
        """Return the selections of the model's parts: one outside, as for a loss, decides nothing in a layer."""
        inside = [entry for entry in self._found.values() if entry.module]
        for entry in self._found.values() if inside else ():
            if not entry.module:
                self.others["", (entry.parts[0].choices,)] += len(entry.parts)
        return inside or list(self._found.values())


def _run(loaded: LoadedModel, batch: Batch, collector: _Collector) -> Any:
    """Run an external model on a batch; exceptions of semdiag's own code are raised as they are."""
    try:
        return batching.call(loaded.module, batch)
    except InputError:
        raise
    except Exception as error:  # whatever the model raises
        if error is collector.failure:
            raise
        message = " ".join(str(error).split())[:200]
        raise InputError(
            f"{loaded.path} cannot be run on these inputs ({type(error).__name__}: {message})."
        ) from error
