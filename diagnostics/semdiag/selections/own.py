"""What a model chooses itself."""

import io
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel, in_evaluation_mode
from semdiag.mathematics.rounding import NumberFormat
from semdiag.measuring.calls.running import placed
from semdiag.measuring.training_runs import token_ids
from semdiag.selections.capture import (
    Choices,
    OwnRows,
    Selected,
    Tokens,
    block_rule,
    causal_modules,
    in_stages,
    joined_queries,
    own_rows,
    tokens_of,
    watch_selections,
)
from semdiag.selections.files import require_suffix, write_output
from semdiag.selections.localise import Indexer
from semdiag.selections.reused import ReusedChoices
from semdiag.selections.stages import StageRecorder, recorded_indexer, stage_arrays
from semdiag_files import InputError

_LARGEST = 2**32  # bytes of a file


class _Part(NamedTuple):
    """What one selection chose in a batch, for the tokens that are real, and their ids if known."""

    indices: Tensor  # (T, k)
    scores: Tensor  # (T, n)
    ids: Tensor | None  # (T,)


class Saving:
    """Collects what selections chose, and writes it to one file, module by module."""

    def __init__(self, path: Path) -> None:
        require_suffix(path, "--save", ".npz")
        self._path = path
        self._parts: dict[str, list[_Part]] = {}  # by module, in the order in which they chose
        self._indexers: dict[str, list[Indexer | None]] = {}  # one for each part
        self._size = 0

    def add(
        self, name: str, number: int, choices: Choices, ids: Tensor | None, indexer: Indexer | None = None
    ) -> None:
        """Take what a selection chose in a batch, and what its indexer computed before."""
        real = choices.real
        if choices.kind == "keys":
            indices, scores = _from_the_first(choices)
        else:
            indices = choices.indices
            scores = choices.order
        token_ids = ids.flatten()[real] if ids is not None and choices.shape == tuple(ids.shape) else None
        part = _Part(indices[real].int(), scores[real].float(), token_ids)
        self._size += part.scores.nbytes + part.indices.nbytes
        if self._size > _LARGEST:
            raise InputError(f"{self._path} would be larger than {_LARGEST / 2**30:g} GiB. Save fewer tokens.")
        full_name = f"{name}#{number}" if number else name
        self._parts.setdefault(full_name, []).append(part)
        self._indexers.setdefault(full_name, []).append(indexer)

    def reuse(self, layer: str, donor: str) -> None:
        """Write what an indexer chose as the choice of another layer, too, under the name of its own indexer."""
        if donor in self._parts:
            name = f"{layer}.indexer"
            self._parts[name] = self._parts[donor]
            self._indexers[name] = [None] * len(self._parts[donor])

    def write(self) -> None:
        """Write MODULE.indices (T, k) and MODULE.scores (T, n); where known, tokens and an indexer's stages."""
        arrays = {f"{name}.{role}": array for name in self._parts for role, array in self._arrays(name).items()}
        content = io.BytesIO()
        np.savez(content, **arrays)  # type: ignore[arg-type]
        write_output(self._path, content.getbuffer())

    def _arrays(self, name: str) -> dict[str, NDArray[np.generic]]:
        parts = self._parts[name]
        k = max(part.indices.shape[1] for part in parts)
        n = max(part.scores.shape[1] for part in parts)
        arrays = {
            "indices": torch.cat([_widened(part.indices, k, -1) for part in parts]).numpy(),
            "scores": torch.cat([_widened(part.scores, n, -torch.inf) for part in parts]).numpy(),
        }
        ids = [part.ids for part in parts if part.ids is not None]
        if len(ids) == len(parts):
            arrays["tokens"] = torch.cat(ids).numpy()
        return arrays | self._stages(name)

    def _stages(self, name: str) -> dict[str, NDArray[np.generic]]:
        """Return what a module's indexer computed; nothing unless all of it is known, and of one form."""
        indexers = [indexer for indexer in self._indexers[name] if indexer is not None]
        if len(indexers) < len(self._parts[name]) or len({indexer.form for indexer in indexers}) > 1:
            return {}
        sequences = [sequence for indexer in indexers for sequence in indexer.sequences]
        stages = stage_arrays(sequences, indexers[0].form)
        return {role: array.numpy() for role, array in stages.items()}


def _from_the_first(choices: Choices) -> tuple[Tensor, Tensor]:
    """Return indices and scores of keys counted from the first real one, as wide as the longest sequence."""
    first = choices.first[:, None]
    number = choices.order.shape[1]
    lengths = choices.real.view(*choices.shape).sum(-1)
    at = first + torch.arange(int(lengths.max()))
    scores = choices.order.gather(1, at.clamp(max=number - 1)).masked_fill(at >= number, -torch.inf)
    return (choices.indices - first).masked_fill(choices.indices < 0, -1), scores


def _widened(rows: Tensor, width: int, filler: float) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=filler)


@dataclass
class OwnSelection:
    """What one selection of a model chose, in all batches."""

    module: str  # that selects
    layer: int | None  # the first number in its name; None: it has none
    parts: list[OwnRows] = field(default_factory=list)  # rows of each batch
    samples: list[int] = field(default_factory=list)  # number of samples before each batch
    repeats: int = 0  # calls that chose what the call before chose, for other tokens
    last: tuple[Tensor, Tensor] | None = None  # indices of the call before, and which of its rows are real

    def take(self, rows: OwnRows, choices: Choices, sample: int, other_tokens: bool) -> None:
        """Take what was chosen for a batch, whose first sample has that number."""
        before = self.last
        self.last = choices.indices, choices.real
        self.parts.append(rows)
        self.samples.append(sample)
        if before is None or not other_tokens or before[0].shape != choices.indices.shape:
            return
        decides = bool((rows.margin < torch.inf).any())
        self.repeats += decides and bool((before[0] == choices.indices)[before[1] & choices.real].all())

    @property
    def faulty(self) -> pd.DataFrame:
        """Return the faulty rows of all batches."""
        every = [
            part.faulty.assign(sample=part.faulty["sample"] + start)
            for part, start in zip(self.parts, self.samples, strict=True)
        ]
        table = pd.concat(every, ignore_index=True)
        table.insert(0, "module", self.module)
        return table


def own_selections(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    kind: NumberFormat,
    device: torch.device,
    dtype: torch.dtype,
    saving: Saving | None = None,
) -> "OwnSelections":
    """Run a model and return what it selects."""
    model = placed(in_evaluation_mode(loaded.module), device, dtype)
    selections = OwnSelections(loaded.path, kind, model, saving)
    with torch.no_grad():
        for batch in batches:
            selections.run(model, batching.moved(batch, device, dtype))
    selections.finish()
    if not selections.selections:
        raise InputError(
            f"{loaded.path} selects nothing for its tokens: while it ran, no topk, argmax or sort of scores was "
            "seen in it whose rows are its tokens. This is for models with routers or indexers; what a selection "
            f"would cost a model without: semdiag k-sweep {loaded.path} --rerun"
        )
    return selections


class OwnSelections:
    """A model's own selections, in the order in which they ran."""

    def __init__(self, path: str, kind: NumberFormat, model: nn.Module, saving: Saving | None) -> None:
        self.selections: list[OwnSelection] = []
        # number of selections whose rows are not tokens, by module and shape
        self.others: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._path = path
        self._kind = kind
        self._causal = causal_modules(model)
        self._saving = saving
        self._found: dict[tuple[str, int, str, int], OwnSelection] = {}
        self._tokens = Tokens(0, frozenset(), {})
        self._ids: Tensor | None = None
        self._other_tokens = False  # than those of the batch before
        self._samples = 0  # in the batches before
        self.calls = 0
        self.chose: Counter[str] = Counter()  # in how many calls a module did
        self._failure: Exception | None = None  # ours, not the model's
        self._stages = StageRecorder()
        self._reused = ReusedChoices()

    @property
    def donors(self) -> dict[str, str]:
        """The module whose choice a layer uses, by layer, where it has no indexer of its own; empty: unknown."""
        return self._reused.donors

    def run(self, model: nn.Module, batch: Batch) -> None:
        """Take what a model selects on a batch; exceptions of semdiag's own code are raised as they are."""
        self._samples += self._tokens.samples
        self._tokens = tokens_of(model, batch)
        before = self._ids
        self._ids = next(iter(token_ids(batch).values()), None)
        self._other_tokens = before is not None and self._ids is not None and not torch.equal(before, self._ids)
        self.calls += 1
        try:
            with self._watched_stages(model), self._reused.watch(model), watch_selections(model, self._consume):
                batching.call(model, batch)
        except InputError:
            raise
        except Exception as error:  # whatever the model raises
            if error is self._failure:
                raise
            message = " ".join(str(error).split())[:200]
            raise InputError(
                f"{self._path} cannot be run on these inputs ({type(error).__name__}: {message})."
            ) from error

    def _watched_stages(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext() if self._saving is None else self._stages.watch(model)

    def _consume(self, name: str, module: nn.Module, selected: list[Selected]) -> None:
        text = f"{name} {type(module).__name__}".lower()
        self.chose[name] += 1
        try:
            joint = joined_queries(selected, block_rule(module), self._tokens)
            for number, (chosen, group) in enumerate(in_stages(joint)):
                self._add(name, number, module, text, chosen, group)
        except InputError as error:
            self._failure = InputError(f"{self._path}: {name}: {error}")
            raise self._failure from None
        except Exception as error:
            self._failure = error
            raise

    def _add(
        self, name: str, number: int, module: nn.Module, text: str, chosen: Selected, group: Selected | None
    ) -> None:
        shape = tuple(chosen.scores.shape)
        rows_and_choices = own_rows(
            text, name in self._causal, self._tokens, chosen, group, self._kind, block_rule(module)
        )
        if rows_and_choices is None:
            self.others[name, shape] += 1
            return
        rows, choices = rows_and_choices
        layer = re.search(r"\d+", name)
        key = name, number, rows.kind, shape[-1] if rows.kind == "experts" else 0
        entry = OwnSelection(name, int(layer[0]) if layer else None)
        self._found.setdefault(key, entry).take(rows, choices, self._samples, self._other_tokens)
        # not positions in a table of other choices, or what is outside all parts
        if self._saving is not None and name and not chosen.positions:
            outputs = self._stages.outputs.get(name)
            indexer = None
            if outputs is not None and rows.kind == "keys":
                real = choices.real.view(*choices.shape)
                indexer = recorded_indexer(name, module, outputs, chosen.scores, real, rows.k)
            self._saving.add(name, number, choices, None if self._ids is None else self._ids.cpu(), indexer)

    def finish(self) -> None:
        """Leave out selections outside the model's parts: one for a loss, say, decides nothing in a layer."""
        if self._saving is not None:
            for layer, donor in self.donors.items():
                self._saving.reuse(layer, donor)
        inside = [entry for entry in self._found.values() if entry.module]
        for entry in self._found.values() if inside else ():
            if not entry.module:
                self.others["", (entry.parts[0].choices,)] += len(entry.parts)
        self.selections = inside or list(self._found.values())
