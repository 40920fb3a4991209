"""Measure whether layers, heads and successive queries keep the same keys."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pandas as pd
import scipy
import torch
from torch import Tensor, nn

from semdiag.capturing.attention_call import DENSE, AttentionCall
from semdiag.capturing.batches import Batch, samples_of, split
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.collector import check_rows, scored_rows
from semdiag.measuring.calls.running import running, unnamed
from semdiag.measuring.subject import Subject
from semdiag.measuring.table import Table, columns_of
from semdiag.questions.overlap import OverlapPlan

OVERLAP = Table(
    "overlap",
    "One row per sample and pair of places: two heads of one or of two layers for the same query (kind pair), or "
    "one head for a query and the one before it (kind previous). queries: how many drop a key at both places.",
    columns_of("model kind str; sample layer head other_layer other_head queries int32; jaccard chance float64"),
)
_ENTRIES = 2**26  # of the masks that are compared at a time


def key_overlaps(
    model: LoadedModel | nn.Module,
    inputs: Batch | Iterable[Batch],
    plan: OverlapPlan | None = None,
    *,
    batch_size: int = 20,
    device: torch.device | str | None = None,
) -> pd.DataFrame:
    """Compare the kept keys of every two heads, and of every query with those of the query before."""
    plan = OverlapPlan.checked(plan)
    loaded = unnamed(model)
    dense = loaded.external or loaded.encoder.config.attention in DENSE
    masks = _Kept(plan.k if dense else None)
    parts: list[pd.DataFrame] = []
    done = 0
    with running(loaded, masks.add, device) as run:
        for batch in split(inputs, batch_size):
            masks.samples = samples_of(batch)
            run(batch)
            parts += [part.assign(model=loaded.path) for part in _compared(masks, done)]
            masks.calls.clear()
            masks.allowed.clear()
            done += masks.samples
    return OVERLAP.of_parts(parts)


@dataclass
class _Kept:
    """The kept keys of every layer of one forward pass, (B, H, L, Lk) bool; none for queries that drop no key."""

    k: int | None
    samples: int = 0  # samples of the running batch
    # by layer: kept keys; index in allowed, by head
    calls: dict[int, tuple[Tensor, list[int]]] = field(default_factory=dict)
    allowed: list[Tensor] = field(default_factory=list)  # (B, L, Lk) bool, keys that heads may attend to, once

    def add(self, call: AttentionCall) -> None:
        check_rows(call, self.samples)
        rows = scored_rows(replace(call, selected=None) if self.k is not None else call)
        keys = torch.isfinite(rows.scores).sum(-1)
        if self.k is None:
            chosen = rows.selected
        else:
            best = rows.scores.topk(min(self.k, rows.scores.shape[-1]), -1).indices
            chosen = torch.zeros_like(rows.selected).scatter_(-1, best, True) & rows.selected
        allowed = call.part().allowed
        shape = len(chosen), -1, *chosen.shape[2:]
        of_heads = torch.ones_like(chosen[:, :1]) if allowed is None else allowed.expand(shape)
        views = [self._view(of_head) for of_head in of_heads.unbind(1)]
        chosen = chosen & (keys > chosen.sum(-1))[..., None]
        self.calls[call.layer] = chosen, views * (chosen.shape[1] // len(views))

    def _view(self, allowed: Tensor) -> int:
        for at, mask in enumerate(self.allowed):
            if torch.equal(mask, allowed):
                return at
        self.allowed.append(allowed)
        return len(self.allowed) - 1


def _compared(kept_keys_of_pass: _Kept, before: int) -> Iterable[pd.DataFrame]:
    shapes: dict[tuple[int, ...], list[int]] = {}
    for layer, (chosen, _) in kept_keys_of_pass.calls.items():
        shapes.setdefault((chosen.shape[0], *chosen.shape[2:]), []).append(layer)
    for layers in shapes.values():
        places = [(layer, head) for layer in layers for head in range(kept_keys_of_pass.calls[layer][0].shape[1])]
        masks = torch.cat([kept_keys_of_pass.calls[layer][0] for layer in layers], 1)  # (B, P, L, Lk)
        seen_by = [view for layer in layers for view in kept_keys_of_pass.calls[layer][1]]
        used_views = sorted(set(seen_by))
        views = [used_views.index(view) for view in seen_by]
        allowed = torch.stack([kept_keys_of_pass.allowed[at] for at in used_views], 1)  # (B, U, L, Lk)
        for sample, (kept_keys, allowed_keys) in enumerate(zip(masks, allowed, strict=True)):
            sizes = kept_keys.sum(-1)  # (P, L); 0 where nothing is dropped
            compared = kept_keys, sizes, allowed_keys, views, places
            for table in (_pairs(*compared), _previous(*compared)):
                yield table[table["queries"] > 0].assign(sample=before + sample)


def _pairs(
    masks: Tensor, sizes: Tensor, allowed: Tensor, views: list[int], places: list[tuple[int, int]]
) -> pd.DataFrame:
    """Return the number of queries, the mean Jaccard index and that of random sets, for every two heads."""
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
    # Most places have the same allowed keys and keep as many: chance is computed once for all of these.
    numbers = allowed.sum(-1).cpu()
    sizes = sizes.cpu()
    shared = [[(first & second).sum(-1).cpu() for second in allowed] for first in allowed]
    kinds, kind = torch.cat([sizes, torch.tensor(views)[:, None]], 1).unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
    sizes_and_views = [(first[:-1], int(first[-1])) for first in kinds]
    chance = torch.tensor(
        [
            [_chance(a, b, numbers[u], numbers[v], shared[u][v]) for b, v in sizes_and_views]
            for a, u in sizes_and_views
        ],
        dtype=torch.float64,
    )
    return _table(
        "pair", [places[i] for i in at.tolist()], [places[i] for i in to.tolist()],
        queries[at, to], total[at, to] / queries[at, to].clamp(min=1), chance[kind[at], kind[to]],
    )  # fmt: skip


def _previous(
    masks: Tensor, sizes: Tensor, allowed: Tensor, views: list[int], places: list[tuple[int, int]]
) -> pd.DataFrame:
    """Return the same for each query and the one before it, for every head."""
    common = (masks[:, 1:] & masks[:, :-1]).sum(-1)
    counted = (sizes[:, 1:] > 0) & (sizes[:, :-1] > 0)
    index = (common / (sizes[:, 1:] + sizes[:, :-1] - common).clamp(min=1)).double()
    queries = counted.sum(1)
    numbers = allowed.sum(-1)
    shared = (allowed[:, 1:] & allowed[:, :-1]).sum(-1)
    chance = [
        _chance(kept_count[1:], kept_count[:-1], numbers[at, 1:], numbers[at, :-1], shared[at])
        for kept_count, at in zip(sizes, views, strict=True)
    ]
    mean = (index * counted).sum(1) / queries.clamp(min=1)
    return _table("previous", places, places, queries.cpu(), mean.cpu(), torch.tensor(chance, dtype=torch.float64))


def _table(
    kind: str,
    places: list[tuple[int, int]],
    other_places: list[tuple[int, int]],
    queries: Tensor,
    jaccard: Tensor,
    chance: Tensor,
) -> pd.DataFrame:
    columns = [*zip(*places, strict=True), *zip(*other_places, strict=True)] or [()] * 4
    ends = zip(("layer", "head", "other_layer", "other_head"), columns, strict=True)
    return pd.DataFrame(
        {
            **dict(ends), "kind": kind, "queries": queries.numpy(), "jaccard": jaccard.numpy(),
            "chance": chance.numpy(),
        }
    )  # fmt: skip


def _chance(first: Tensor, second: Tensor, keys: Tensor, other_keys: Tensor, shared: Tensor) -> float:
    """Return the mean expected Jaccard index of random sets of these sizes; NaN if no query counts."""
    counted = (first > 0) & (second > 0)
    if not bool(counted.any()):
        return math.nan
    numbers = torch.stack([values[counted] for values in (first, second, keys, other_keys, shared)]).cpu()
    kinds, counts = numbers.unique(dim=1, return_counts=True)  # type: ignore[no-untyped-call]
    means = [expected_jaccard(*map(int, kind)) for kind in kinds.T]
    return float(torch.tensor(means, dtype=torch.float64) @ counts.double() / counts.sum())


@cache
def expected_jaccard(
    first: int, second: int, keys: int, other_keys: int | None = None, shared: int | None = None
) -> float:
    """Return E |S ∩ S'| / |S ∪ S'| of two random sets, S drawn from the keys A and S' from the keys A'."""
    other_keys = keys if other_keys is None else other_keys
    shared = keys if shared is None else shared
    in_both = np.arange(max(0, first + shared - keys), min(first, shared) + 1)
    common = np.arange(min(in_both[-1], second) + 1)
    at_random = scipy.stats.hypergeom.pmf(common, other_keys, in_both[:, None], second)
    law = scipy.stats.hypergeom.pmf(in_both, keys, shared, first) @ at_random
    return float(law @ (common / (first + second - common)))


def measure_overlap(subject: Subject, plan: OverlapPlan) -> Mapping[str, pd.DataFrame]:
    """Return the tables of a plan."""
    inputs, _ = subject.first
    return {"overlap": key_overlaps(subject.model, inputs, plan, device=subject.device)}
