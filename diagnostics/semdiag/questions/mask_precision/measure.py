"""Compare masks of queries and keys in float64 against those of a number format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import samples_of, split
from semdiag.mathematics.mask_stability import TopSet, kept_in_common, score_rounding, top_set
from semdiag.mathematics.rounding import (
    NumberFormat,
    number_format,
    rounded_scores,
    score_error,
    survives_rounding,
)
from semdiag.measuring.calls.collector import SampleNumbers
from semdiag.measuring.calls.running import running
from semdiag.measuring.subject import Subject
from semdiag.measuring.table import Table, columns_of
from semdiag.questions.mask_precision import PrecisionPlan
from semdiag.questions.mask_stability.mask_rows import Selection, selection_of

_STRIP = 2**21  # scores held at a time (or one query of every sample and head)
BEYOND = "scores that are no numbers, or beyond float32"
OTHER_KEYS = "a model that keeps other keys than those with the largest scores"


@dataclass(frozen=True, eq=False)
class RoundedRows:
    """What F number formats do to each row; (B, H, L), with the formats in front where they differ."""

    counted: Tensor  # bool: queries that keep a key and drop one; below, other queries mean nothing
    keys: Tensor  # int, how many the query may attend to
    covered: Tensor  # (F, B, H, L) bool: rows that the error model covers; below, others are false
    changed: Tensor  # (F, B, H, L) bool: however ties are broken, the k largest rounded scores are of another set
    tied: Tensor  # (F, B, H, L) bool: the k-th and the next rounded score are equal
    certified: Tensor  # (F, B, H, L) bool
    lost: Tensor  # (F, B, H, L) float64, weight of the keys dropped minus that of the keys gained
    set_size: int  # k
    why: str  # what is not covered, if anything is


def rounded_rows(
    call: AttentionCall, k: int, selection: Selection, formats: Sequence[NumberFormat]
) -> RoundedRows:
    """Compare the set of every row, from its scores in float64, with that of its rounded scores."""
    length = call.k.shape[2]
    set_size = call.selected.shape[-1] if selection.by_model and call.selected is not None else min(k, length)
    outside = _outside_the_model(call)
    step = max(1, _STRIP // (call.q.shape[0] * call.q.shape[1] * length))
    parts = []
    for start in range(0, call.q.shape[2], step):
        part = call.part(queries=slice(start, start + step))
        parts.append(_strip(part, set_size, selection, formats, covered=not outside))
    joined = {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}
    follows = joined.pop("follows")
    covered = joined["covered"]
    reasons = {
        OTHER_KEYS: not outside and bool((joined["counted"] & ~follows).any()),
        BEYOND: not outside and bool((joined["counted"] & follows & ~covered).any()),
    }
    return RoundedRows(
        **joined, set_size=set_size, why=outside or " and ".join(why for why, true in reasons.items() if true)
    )


def _outside_the_model(call: AttentionCall) -> str:
    if call.softcap is not None:
        return "scores that are capped"
    if call.sinks is not None:
        return "a softmax with attention sinks"
    if call.bias is not None and bool(call.bias.count_nonzero()):
        return "scores with a bias"
    return ""


def _strip(
    part: AttentionCall, set_size: int, selection: Selection, formats: Sequence[NumberFormat], covered: bool
) -> dict[str, Tensor]:
    """Return the attributes of :class:`RoundedRows` for some queries, and whether their sets follow the scores."""
    keys = part.k.double().repeat_interleave(part.q.shape[1] // part.k.shape[1], 1)
    q = part.q.double()
    scale = selection.sign * part.scale
    scores = scale * (q @ keys.mT)
    if part.allowed is not None:
        scores = scores.masked_fill(~part.allowed, -torch.inf)
    allowed = torch.ones_like(scores, dtype=torch.bool) if part.allowed is None else part.allowed.expand_as(scores)
    number = allowed.sum(-1)
    columns = {"counted": part.counted & (number > set_size), "keys": number}
    before = top_set(scores, set_size)
    columns["follows"] = columns["counted"] & covered & _follows(part, keys, scores, selection)
    by_format: dict[str, list[Tensor]] = {}
    for kind in formats:
        error = score_error(q, keys, scale, kind)
        judged = columns["follows"] & (~allowed | (error.isfinite() & scores.isfinite())).all(-1)
        later = rounded_scores(q, keys, scale, kind).masked_fill(~allowed, -torch.inf)
        changed = judged & (kept_in_common(later[None], before)[0] < set_size)
        of_format = {
            "covered": judged,
            "changed": changed,
            "tied": judged & (top_set(later, set_size).separation == 0),
            "certified": judged & survives_rounding(scores, error, before),
            "lost": _weight_lost(scores, later, before, changed, selection.sign),
        }
        for name, values in of_format.items():
            by_format.setdefault(name, []).append(values)
    return columns | {name: torch.stack(values) for name, values in by_format.items()}


def _follows(part: AttentionCall, keys: Tensor, scores: Tensor, selection: Selection) -> Tensor:
    """Return whether the model selects the keys with the largest scores, up to the rounding of its scores."""
    if not selection.by_model or part.selected is None:
        return torch.ones_like(part.counted)
    separation = top_set(scores, part.selected.shape[-1], part.selected).separation
    room = score_rounding(part.q.double(), keys, part.scale, torch.finfo(part.q.dtype).eps)
    return separation >= -2 * room


def _weight_lost(scores: Tensor, later: Tensor, before: TopSet, changed: Tensor, sign: int) -> Tensor:
    """Return the weight of the keys dropped minus that of the keys gained: the least that ties allow."""
    lost = torch.full(changed.shape, torch.nan, dtype=torch.float64, device=scores.device)
    z = scores[changed]
    after = later[changed]
    weights = (sign * z).masked_fill(z == -torch.inf, -torch.inf).softmax(-1)
    inside = torch.zeros_like(z, dtype=torch.bool).scatter_(-1, before.positions[changed], True)
    # Among equal rounded scores the keys that were kept come first, then those with the larger score.
    order = z.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, inside.gather(-1, order).byte().argsort(dim=-1, descending=True, stable=True))
    later_set = after.gather(-1, order).argsort(dim=-1, descending=True, stable=True)[
        :, : before.positions.shape[-1]
    ]
    kept_later = torch.zeros_like(inside).scatter_(-1, order.gather(-1, later_set), True)
    dropped, gained = ((weights * keys).sum(-1) for keys in (inside & ~kept_later, kept_later & ~inside))
    lost[changed] = dropped - gained
    return lost


ROUNDED_MASKS = Table(
    "rounded_masks",
    "One row per number format, sample, layer and head: how many of its queries drop a key, and how many of these "
    "the error model does not cover, and why. Of the others, how many have other keys among the k largest scores "
    "once queries, keys and scores are rounded, however ties are broken (changed); equal k-th and next scores "
    "(tied); a certified set; a certified set that changed or tied, which is a fault.",
    columns_of(
        "model format why str; sample layer head kept queries not_covered changed tied changed_or_tied certified "
        "certified_changed int32"
    ),
)
LOST_WEIGHTS = Table(
    "lost_weights",
    "One row per number format and query whose keys changed: the attention weight over all allowed keys, in "
    "float64, of the keys dropped minus that of the keys gained (lost).",
    columns_of("model format str; sample layer head query int32; lost float64"),
)


@dataclass
class _Collector:
    model: str
    plan: PrecisionPlan
    selection: Selection
    min_keys: int
    numbers: SampleNumbers = field(default_factory=SampleNumbers)
    masks: list[pd.DataFrame] = field(default_factory=list)
    lost: list[pd.DataFrame] = field(default_factory=list)

    def add(self, call: AttentionCall) -> None:
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
        places = {
            "sample": samples[at[1]],
            "head": at[2],
            "layer": layer,
            "kept": rows.set_size,
            "model": self.model,
        }
        table = pd.DataFrame({**places, **counts, "format": np.array(self.plan.formats)[at[0]]})
        return table.assign(why=np.where(table["not_covered"] > 0, rows.why, ""))[table["queries"] > 0]


def measure_precision(subject: Subject, plan: PrecisionPlan) -> Mapping[str, pd.DataFrame]:
    """Return the tables of a plan."""
    loaded = subject.model
    kind = "full" if loaded.external else loaded.encoder.config.attention
    selection = selection_of(kind)
    if selection is None:
        return {"rounded_masks": ROUNDED_MASKS.empty(), "lost_weights": LOST_WEIGHTS.empty()}
    collected = _Collector(loaded.path, plan, selection, subject.min_keys)
    with running(loaded, collected.add, subject.device, subject.dtype) as run:
        for batch in split(subject.first[0], subject.batch_size):
            collected.numbers.start(samples_of(batch))
            run(batch)
    return {
        "rounded_masks": ROUNDED_MASKS.of_parts(collected.masks),
        "lost_weights": LOST_WEIGHTS.of_parts(collected.lost),
    }
