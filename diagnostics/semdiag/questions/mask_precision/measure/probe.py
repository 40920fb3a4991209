"""The probe ``mask-precision``: masks of queries and keys in float64 against those of a number format."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch, samples_of, split
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.selections.number_formats import FORMATS, number_format
from semdiag.measuring.calls.batch_rows import SampleNumbers
from semdiag.measuring.calls.running import running, unnamed
from semdiag.measuring.calls.scored_rows import NotAvailableError
from semdiag.measuring.probe import Probe, Subject, plan_of
from semdiag.measuring.table import Table
from semdiag.questions.mask_precision.measure.rounded_rows import RoundedRows, rounded_rows
from semdiag.questions.mask_stability.measure.mask_rows import Selection, selection_of
from semdiag.questions.mask_stability.measure.probe import SUPPOSED_K
from semdiag_models import InputError

_COUNTS = ("queries", "not_covered", "changed", "tied", "changed_or_tied", "certified", "certified_changed")
ROUNDED_MASKS = Table(
    "rounded_masks",
    "One row per number format, sample, layer and head: how many of its queries drop a key, and how many of these "
    "the error model does not cover, and why. Of the others, how many have other keys among the k largest scores "
    "once queries, keys and scores are rounded, however ties are broken (changed); equal k-th and next scores "
    "(tied); a certified set; a certified set that changed or tied, which is a fault.",
    {
        **dict.fromkeys(("model", "format", "why"), "str"),
        **dict.fromkeys(("sample", "layer", "head", "kept", *_COUNTS), "int32"),
    },
)
LOST_WEIGHTS = Table(
    "lost_weights",
    "One row per number format and query whose keys changed: the attention weight over all allowed keys, in "
    "float64, of the keys dropped minus that of the keys gained (lost).",
    {
        **dict.fromkeys(("model", "format"), "str"),
        **dict.fromkeys(("sample", "layer", "head", "query"), "int32"),
        "lost": "float64",
    },
)


@dataclass(frozen=True)
class PrecisionPlan:
    """In which number formats masks are compared with those in float64.

    Raises:
        InputError: if a format is unknown or is float64, or k is below 1.
    """

    formats: tuple[str, ...] = ("bfloat16",)  # short names or torch's; stored as torch's, each once
    k: int = SUPPOSED_K  # of the mask that top-k would choose in a model without a selection of its own

    def __post_init__(self) -> None:
        names = tuple(dict.fromkeys(number_format(name).name for name in self.formats))
        coarser = [name for name, kind in FORMATS.items() if kind.digits <= FORMATS["float32"].digits]
        if not names or not {*names} <= {*coarser}:
            got = ", ".join(map(str, self.formats)) or "none"
            raise InputError(f"Masks are compared in {', '.join(coarser)} against float64. Got {got}.")
        if self.k < 1:
            raise InputError(f"k must be at least 1. Got {self.k}.")
        object.__setattr__(self, "formats", names)


def mask_precision(
    model: LoadedModel | nn.Module,
    inputs: Batch | Iterable[Batch],
    plan: PrecisionPlan | None = None,
    *,
    batch_size: int = 100,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    min_keys: int = 1,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compare the mask of every query in float64 with that of its rounded query, keys and scores.

    The queries and keys of a clean forward pass are taken as exact: rounding is not passed on from layer to layer.
    A full-attention model has no mask: the one that top-k would choose from its scores stands in.

    Source: docs/theory.md#rounded-operands. Deviation: not in the paper.

    Args:
        model: from :func:`semdiag.load`, or any module.
        inputs: what :func:`~semdiag.measuring.measure.measure` takes.
        plan: the formats, and k of a model without a mask; by default bfloat16.
        batch_size: samples at a time.
        device: where to run; None: where the model is.
        dtype: of the model; None: its own.
        min_keys: queries with fewer keys are left out.

    Returns:
        The tables ``rounded_masks`` and ``lost_weights``; no rows for a mask that does not depend on the input.

    Raises:
        NotAvailableError: if the scores alone do not say which keys are kept.

    Example:
        >>> from semdiag_models import Encoder, ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, attention="topk", k=2, blocks=1))
        >>> masks, lost = mask_precision(encoder, torch.tensor([[0, 1, 1, 0]]))
        >>> masks[["format", "kept", "queries", "not_covered", "certified_changed"]].values.tolist()
        [['bfloat16', 2, 4, 0, 0]]
    """
    plan = plan_of(PrecisionPlan, plan)
    loaded = unnamed(model)
    kind = "full" if loaded.external else loaded.encoder.config.attention
    selection = selection_of(kind)
    if selection is None:
        return ROUNDED_MASKS.empty(), LOST_WEIGHTS.empty()
    if not selection.ranked:
        raise NotAvailableError(f"the scores alone do not say which keys {kind} attention keeps")
    collected = _Collector(loaded.path, plan, selection, min_keys)
    with running(loaded, collected.add, device, dtype) as run:
        for batch in split(inputs, batch_size):
            collected.numbers.start(samples_of(batch))
            run(batch)
    return ROUNDED_MASKS.of_parts(collected.masks), LOST_WEIGHTS.of_parts(collected.lost)


@dataclass
class _Collector:
    """Collects the rows of both tables, call by call."""

    model: str
    plan: PrecisionPlan
    selection: Selection
    min_keys: int
    numbers: SampleNumbers = field(default_factory=SampleNumbers)
    masks: list[pd.DataFrame] = field(default_factory=list)
    lost: list[pd.DataFrame] = field(default_factory=list)

    def add(self, call: AttentionCall) -> None:
        """Reduce one attention call."""
        formats = [number_format(name) for name in self.plan.formats]
        rows = rounded_rows(call, self.plan.k, self.selection, formats)
        samples = self.numbers.of(len(call.q))
        self.masks.append(self._counts(rows, samples, call.layer))
        enough = rows.keys >= self.min_keys
        places = (rows.changed & enough).nonzero()
        which, sample, head, query = places.cpu().numpy().T
        columns = {"sample": samples[sample], "head": head, "query": query, "layer": call.layer}
        names = np.array(self.plan.formats)[which]
        lost = rows.lost[tuple(places.T)].cpu().numpy()
        self.lost.append(pd.DataFrame({**columns, "format": names, "lost": lost, "model": self.model}))

    def _counts(self, rows: RoundedRows, samples: NDArray[np.int32], layer: int) -> pd.DataFrame:
        enough = rows.keys >= self.min_keys
        counted = (rows.counted & enough).expand_as(rows.covered)
        both = rows.changed | rows.tied
        of_rows = {
            "queries": counted, "not_covered": counted & ~rows.covered, "changed": rows.changed, "tied": rows.tied,
            "changed_or_tied": both, "certified": rows.certified, "certified_changed": rows.certified & both,
        }  # fmt: skip
        counts = {name: (values & enough).sum(-1).flatten().cpu().numpy() for name, values in of_rows.items()}
        at = np.indices(rows.covered.shape[:3]).reshape(3, -1)
        places = {"sample": samples[at[1]], "head": at[2], "layer": layer, "kept": rows.kept, "model": self.model}
        table = pd.DataFrame({**places, **counts, "format": np.array(self.plan.formats)[at[0]]})
        return table.assign(why=np.where(table["not_covered"] > 0, rows.why, ""))[table["queries"] > 0]


def _measure(subject: Subject, plan: PrecisionPlan, prepared: Any) -> Mapping[str, pd.DataFrame]:
    masks, lost = mask_precision(
        subject.model,
        subject.first[0],
        plan,
        batch_size=subject.batch_size,
        device=subject.device,
        dtype=subject.dtype,
        min_keys=prepared or 1,
    )
    return {"rounded_masks": masks, "lost_weights": lost}


def _provenance(plan: PrecisionPlan, samples: int, few: int) -> dict[str, Any]:
    return {
        "mask_formats": list(plan.formats),
        "mask_k": plan.k,
        "probe_samples": few,
    }


MASK_PRECISION = Probe(
    "mask precision",
    PrecisionPlan,
    (ROUNDED_MASKS, LOST_WEIGHTS),
    _measure,
    prepare=lambda plan, conditions: conditions.min_keys,
    provenance=_provenance,
)
