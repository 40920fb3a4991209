"""A model's own selections: what its routers and indexers choose on given inputs."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch
from semdiag.capturing.factories import in_evaluation_mode
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.selections.number_formats import NumberFormat
from semdiag.measuring.calls.running import placed
from semdiag.measuring.token_tables import token_ids
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
    """What one selection of a model chose, in all batches."""

    module: str  # that selects
    layer: int | None  # the first number in its name; None: it has none
    parts: list[OwnRows] = field(default_factory=list)  # of each batch


@dataclass
class OwnSelections:
    """A model's own selections."""

    selections: list[OwnSelection]  # in the order in which they ran
    # number of selections whose rows are not tokens, by module and shape
    others: Counter[tuple[str, tuple[int, ...]]]
    maps: list[SampleMap] = field(default_factory=list)  # of the first sample


def own_selections(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    kind: NumberFormat,
    device: torch.device,
    dtype: torch.dtype,
    saving: Saving | None = None,
) -> OwnSelections:
    """Run a model and return what it selects."""
    model = placed(in_evaluation_mode(loaded.module), device, dtype)
    collector = _Collector(loaded.path, kind, model, saving)
    with torch.no_grad():
        for batch in batches:
            moved = batching.moved(batch, device, dtype)
            with collector.watching(model, moved):
                _run(loaded, moved, collector)
    entries = collector.of_parts()
    if not entries:
        raise InputError(
            f"{loaded.path} selects nothing for its tokens: while it ran, no topk, argmax or sort of scores was "
            "seen in it whose rows are its tokens. This is for models with routers or indexers; what a selection "
            f"would cost a model without: semdiag k-sweep {loaded.path} --rerun"
        )
    return OwnSelections(entries, collector.others, collector.maps)


class _Collector:
    """Collects a model's selections."""

    def __init__(self, path: str, kind: NumberFormat, model: nn.Module, saving: Saving | None) -> None:
        self.tokens = Tokens(0, frozenset(), {})
        self.others: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.maps: list[SampleMap] = []
        self.failure: Exception | None = None  # ours, not the model's
        self._path, self._kind, self._causal, self._saving = path, kind, causal_modules(model), saving
        self._found: dict[tuple[str, int, str, int], OwnSelection] = {}
        self._ids: Tensor | None = None
        self._first = True

    @contextlib.contextmanager
    def watching(self, model: nn.Module, batch: Batch) -> Iterator[None]:
        """Take what the model selects while it runs on a batch."""
        self.tokens = tokens_of(model, batch)
        self._ids = next(iter(token_ids(batch).values()), None)
        with watch_selections(model, self.consume):
            yield
        self._first = False

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


def _run(loaded: LoadedModel, batch: Batch, collector: _Collector) -> None:
    """Run an external model on a batch; exceptions of semdiag's own code are raised as they are."""
    try:
        batching.call(loaded.module, batch)
    except InputError:
        raise
    except Exception as error:  # whatever the model raises
        if error is collector.failure:
            raise
        message = " ".join(str(error).split())[:200]
        raise InputError(
            f"{loaded.path} cannot be run on these inputs ({type(error).__name__}: {message})."
        ) from error
