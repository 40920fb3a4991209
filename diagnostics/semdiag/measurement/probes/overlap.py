"""The probe ``overlap``: whether layers, heads and successive queries keep the same keys."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pandas as pd
import scipy
import torch
from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.attention_kinds import DENSE
from semdiag.capturing.batches import Batch, samples_of, split
from semdiag.capturing.loading import LoadedModel
from semdiag.measurement.calls.batch_rows import check_rows
from semdiag.measurement.calls.running import running, unnamed
from semdiag.measurement.calls.scored_rows import scored_rows
from semdiag.measurement.probe import Probe, Subject, plan_of
from semdiag.measurement.table import Table
from semdiag_models import InputError

OVERLAP = Table(
    "overlap",
    "One row per sample and pair of places: two heads of one or of two layers for the same query (kind pair), or "
    "one head for a query and the one before it (kind previous). queries: that drop a key at both places.",
    {
        "model": "str",
        "kind": "str",
        **dict.fromkeys(("sample", "layer", "head", "other_layer", "other_head", "queries"), "int32"),
        **dict.fromkeys(("jaccard", "chance"), "float64"),
    },
)
SUPPOSED_K = 5
_ENTRIES = 2**26  # of the masks that are compared at a time


@dataclass(frozen=True)
class OverlapPlan:
    """Which masks are compared.

    Raises:
        InputError: if k is illegal.
    """

    k: int = SUPPOSED_K  # of the mask that a model without a selection of its own would choose

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"k must be at least 1. Got {self.k}.")


def mask_overlap(
    model: LoadedModel | nn.Module,
    inputs: Batch | Iterable[Batch],
    plan: OverlapPlan | None = None,
    *,
    batch_size: int = 20,
    device: torch.device | str | None = None,
) -> pd.DataFrame:
    """Compare the kept keys of every two heads, and of every query with those of the query before.

    Jaccard index |S ∩ S'| / |S ∪ S'| of two sets of kept keys, averaged over the queries of a sample that drop a
    key at both places. ``chance`` is its expectation if both sets were drawn at random, of the same sizes, from
    the query's allowed keys: what two unrelated heads would have in common.

    Source: not in the paper; asked for by designs that share one selection among several layers.

    Args:
        model: from :func:`semdiag.load`, or any module; one that keeps every key is asked what top-k would keep.
        inputs: what :func:`~semdiag.measurement.measure.measure` takes.
        plan: k of such a model.
        batch_size: samples at a time.
        device: where to run; None: where the model is.

    Returns:
        The table ``overlap``. Places whose queries or keys differ in number (self- and cross-attention) are not
        compared.

    Raises:
        NotAvailableError: if the model has attention sinks, or attention that does not keep the samples apart
            (heads or windows in its batch axis).

    Example:
        >>> from semdiag_models import Encoder, ModelConfig
        >>> sizes = {"vocabulary_size": 3, "classes": 2, "length": 8, "blocks": 2}
        >>> encoder = Encoder(ModelConfig(**sizes, attention="block", k=4))
        >>> table = mask_overlap(encoder, torch.tensor([[0, 1, 1, 0, 0, 0, 1, 1]]))
        >>> table[["kind", "layer", "other_layer", "queries", "jaccard"]].values.tolist()[0]
        ['pair', 0, 1, 8, 1.0]
    """
    plan = plan_of(OverlapPlan, plan)
    loaded = model if isinstance(model, LoadedModel) else unnamed(model)
    dense = loaded.external or loaded.encoder.config.attention in DENSE
    kept = _Kept(plan.k if dense else None)
    parts: list[pd.DataFrame] = []
    done = 0
    with running(loaded, kept.add, device) as run:
        for batch in split(inputs, batch_size):
            kept.samples = samples_of(batch)
            run(batch)
            parts += [part.assign(model=loaded.path) for part in _compared(kept, done)]
            kept.calls.clear()
            done += kept.samples
    return OVERLAP.of_parts(parts)


@dataclass
class _Kept:
    """The kept keys of every layer of one forward pass: (B, H, L, Lk) bool, queries that drop none empty."""

    k: int | None
    samples: int = 0  # of the running batch
    calls: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, call: AttentionCall) -> None:
        check_rows(call, self.samples)
        rows = scored_rows(replace(call, selected=None) if self.k is not None else call)
        keys = torch.isfinite(rows.scores).sum(-1)
        if self.k is None:
            chosen = rows.selected
        else:
            best = rows.scores.topk(min(self.k, rows.scores.shape[-1]), -1).indices
            chosen = torch.zeros_like(rows.selected).scatter_(-1, best, True) & rows.selected
        self.calls[call.layer] = chosen & (keys > chosen.sum(-1))[..., None], keys


def _compared(kept: _Kept, before: int) -> Iterable[pd.DataFrame]:
    """Rows of one batch, whose first sample has the number ``before``."""
    shapes: dict[tuple[int, ...], list[int]] = {}
    for layer, (chosen, _) in kept.calls.items():
        shapes.setdefault((chosen.shape[0], *chosen.shape[2:]), []).append(layer)
    for layers in shapes.values():
        places = [(layer, head) for layer in layers for head in range(kept.calls[layer][0].shape[1])]
        masks = torch.cat([kept.calls[layer][0] for layer in layers], 1)  # (B, P, L, Lk)
        keys = torch.cat([kept.calls[layer][1] for layer in layers], 1)
        for sample, (own, numbers) in enumerate(zip(masks, keys, strict=True)):
            sizes = own.sum(-1)  # (P, L); 0 where nothing is dropped
            for table in (_pairs(own, sizes, numbers, places), _previous(own, sizes, numbers, places)):
                yield table[table["queries"] > 0].assign(sample=before + sample)


def _pairs(masks: Tensor, sizes: Tensor, keys: Tensor, places: list[tuple[int, int]]) -> pd.DataFrame:
    """Every two places: number of queries, mean Jaccard index, and that of random sets."""
    count, length, width = masks.shape
    total = torch.zeros(count, count, dtype=torch.float64)
    queries = torch.zeros(count, count, dtype=torch.int64)
    strip = max(1, _ENTRIES // (count * max(width, count)))
    for start in range(0, length, strip):
        part = masks[:, start : start + strip].transpose(0, 1).float()  # (l, P, Lk)
        size = sizes[:, start : start + strip].T.float()
        common = part @ part.transpose(1, 2)
        counted = (size[:, :, None] > 0) & (size[:, None] > 0)
        index = common / (size[:, :, None] + size[:, None] - common).clamp(min=1)
        total += (index * counted).double().sum(0).cpu()
        queries += counted.sum(0).cpu()
    at, to = torch.triu_indices(count, count, 1)
    # Mostly all places have as many keys and keep as many of them: chance is worked out once for all of these.
    kinds, kind = torch.stack([sizes, keys], 1).cpu().unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
    chance = torch.tensor([[_chance(one[0], other[0], one[1]) for other in kinds] for one in kinds])
    return _table(
        "pair", [places[i] for i in at.tolist()], [places[i] for i in to.tolist()],
        queries[at, to], total[at, to] / queries[at, to].clamp(min=1), chance[kind[at], kind[to]],
    )  # fmt: skip


def _previous(masks: Tensor, sizes: Tensor, keys: Tensor, places: list[tuple[int, int]]) -> pd.DataFrame:
    """Every place: each query against the one before it."""
    common = (masks[:, 1:] & masks[:, :-1]).sum(-1)
    counted = (sizes[:, 1:] > 0) & (sizes[:, :-1] > 0)
    index = (common / (sizes[:, 1:] + sizes[:, :-1] - common).clamp(min=1)).double()
    queries = counted.sum(1)
    chance = [_chance(sizes[at, 1:], sizes[at, :-1], keys[at, 1:]) for at in range(len(places))]
    mean = (index * counted).sum(1) / queries.clamp(min=1)
    return _table("previous", places, places, queries.cpu(), mean.cpu(), torch.tensor(chance))


def _table(
    kind: str,
    places: list[tuple[int, int]],
    others: list[tuple[int, int]],
    queries: Tensor,
    jaccard: Tensor,
    chance: Tensor,
) -> pd.DataFrame:
    columns = [*zip(*places, strict=True), *zip(*others, strict=True)] or [()] * 4
    ends = zip(("layer", "head", "other_layer", "other_head"), columns, strict=True)
    return pd.DataFrame(
        {
            **dict(ends),
            "kind": kind,
            "queries": queries.numpy(),
            "jaccard": jaccard.numpy(),
            "chance": chance.numpy(),
        }
    )


def _chance(first: Tensor, second: Tensor, keys: Tensor) -> float:
    """Mean expected Jaccard index of random sets of these sizes among so many keys; NaN if no query counts."""
    some = (first > 0) & (second > 0)
    if not bool(some.any()):
        return math.nan
    triples = torch.stack([first[some], second[some], keys[some]]).cpu()
    kinds, counts = triples.unique(dim=1, return_counts=True)  # type: ignore[no-untyped-call]
    means = [expected_jaccard(*map(int, kind)) for kind in kinds.T]
    return float(torch.tensor(means, dtype=torch.float64) @ counts.double() / counts.sum())


@cache
def expected_jaccard(first: int, second: int, keys: int) -> float:
    """E |S ∩ S'| / |S ∪ S'| of two sets drawn at random from the same keys: |S ∩ S'| is hypergeometric.

    Args:
        first: |S|.
        second: |S'|.
        keys: to draw from, at least as many.

    Returns:
        In (0, 1].

    Example:
        >>> expected_jaccard(1, 1, 4), expected_jaccard(3, 3, 3)
        (0.25, 1.0)
    """
    common = range(max(0, first + second - keys), min(first, second) + 1)
    law = scipy.stats.hypergeom(keys, first, second)
    return float(sum(law.pmf(x) * x / (first + second - x) for x in common))


def _measure(subject: Subject, plan: OverlapPlan, prepared: Any) -> Mapping[str, pd.DataFrame]:
    inputs, _ = subject.first
    return {"overlap": mask_overlap(subject.model, inputs, plan, device=subject.device)}


def _provenance(plan: OverlapPlan, samples: int, few: int) -> dict[str, Any]:
    return {"overlap_k": plan.k, "probe_samples": few}


MASK_OVERLAP = Probe("overlap", OverlapPlan, (OVERLAP,), _measure, provenance=_provenance)
