"""Probes and their subjects; percentiles of tables, and rows without a size limit as totals and a sample."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Remark
from semdiag.capturing.batches import Batch, first_samples
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring import PROBE_SOURCES
from semdiag.measuring.table import ALL, CALLS, HEADS, REMARKS, SKIPPED, Table, columns_of
from semdiag.measuring.training_runs import RUNS
from semdiag_models import InputError

P = TypeVar("P")


class Watcher(Protocol):
    """Looks on while a model makes its clean pass, so that a probe need not repeat the pass."""

    def watched(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return the context of the pass, for the module that runs."""

    def start(self, samples: int) -> None:
        """Start a batch of this many samples."""

    def add(self, call: AttentionCall) -> None:
        """Observe a call while its tensors are alive."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under survey, as probes see it."""

    model: LoadedModel  # model to measure
    batches: list[Batch]  # inputs of the model
    labels: Tensor | None  # (N,) classes; None if unknown
    seed: int  # random seed for all draws
    batch_size: int  # samples at a time
    device: torch.device  # device on which to run
    dtype: torch.dtype  # dtype in which the model runs and scores are computed
    queries: int | None = None  # number drawn per sample and head; None means all
    few: int | None = None  # number of samples for costly probes; None means all
    after_point: Callable[[int], None] = lambda points: None  # called with the number of finished steps
    expect: Callable[[int], None] = lambda steps: None  # called with the number of steps that becomes known later
    missing: dict[str, Remark] = field(default_factory=dict)  # reason why something is not available, by its name
    said: list[Remark] = field(default_factory=list)  # other remarks on how the model was measured
    watchers: dict[str, Watcher] = field(default_factory=dict)  # observer of the clean pass by name of its probe

    def note(self, name: str, why: str, where: str = "") -> None:
        """Note that something is not available for this model."""
        what = f"{name} of {where}" if where else name
        code = f"no-{name.lower().replace(' ', '-')}{'-there' * bool(where)}"
        self.missing[what] = Remark("", f"{what} not available, because {why}", code)

    def remark(self, text: str, code: str) -> None:
        """Note something about how this model was measured."""
        self.said.append(Remark("", text, code))

    def watch(self, probe: "Probe", plan: Any, prepared: Any) -> None:
        """Let a probe observe the clean pass that follows, if it would make the same one."""
        if (watcher := probe.watch(self, plan, prepared)) is not None:
            self.watchers[probe.name] = watcher

    @property
    def remarks(self) -> pd.DataFrame:
        """Table ``remarks``: what is not available for this model, and further notes."""
        every = [*self.missing.values(), *self.said]
        return REMARKS.of_rows({"model": self.model.path, **each.to_dict(), "times": 1} for each in every)

    @property
    def tokens(self) -> Tensor:
        """Tokens (N, L), int64, of an encoder of semdiag_models."""
        return torch.cat([batch for batch in self.batches if isinstance(batch, Tensor)])

    @property
    def first(self) -> tuple[list[Batch] | Tensor, Tensor | None]:
        """Few inputs for costly probes, and their labels."""
        labels = None if self.labels is None else self.labels[: self.few]
        if self.model.external:
            return (list(first_samples(self.batches, self.few)) if self.few else self.batches), labels
        return self.tokens[: self.few], labels


@dataclass(frozen=True)
class ReportOptions:
    """Options of ``semdiag report`` that concern probes."""

    noise: tuple[float, ...]  # levels of noise
    seed: int  # random seed for all draws
    k: int | None = None  # smallest k that was requested; None means none
    thorough: bool = False  # whether minutes per model may be spent
    rerun_seconds: float | None = None  # for running an external model with masks; None means the default
    lengths: tuple[int, ...] = ()  # of the pieces on which an external model is run with masks, too


def _none(*known: Any) -> Any:
    return {}


@dataclass(frozen=True)
class Probe:
    """A measurement that belongs to a question, whose record names it."""

    name: str  # name in messages
    plan: type  # frozen dataclass of its options; a survey finds the probe by the type of a plan
    tables: tuple[Table, ...]  # tables that it makes
    measure: Callable[[Subject, Any, Any], Mapping[str, pd.DataFrame]]  # of a plan, and what ``prepare`` returned
    # makes an observer of the clean pass from the arguments of ``measure``; None for no observer
    watch: Callable[[Subject, Any, Any], Watcher | None] = lambda subject, plan, prepared: None
    prepare: Callable[[Any, Any], Any] = _none
    check: Callable[[LoadedModel, Any, Any], object] = _none
    steps: Callable[[Any], int] = lambda plan: 0  # for one encoder, from the plan, for the progress bar
    # what to record, from the plan, the largest number of samples of a model, and the number of few
    provenance: Callable[[Any, int, int], dict[str, Any]] = _none
    draws: bool = False  # whether it works on drawn queries; other probes need every query
    reported: Callable[[ReportOptions], Any] = lambda options: None  # plan that ``semdiag report`` measures


def plan_of(kind: type[P], plan: P | None) -> P:
    """Return the plan of a probe, or its default plan for None."""
    if plan is not None and not isinstance(plan, kind):
        raise InputError(f"The plan must be a {kind.__name__}. Got {plan!r}.")
    return kind() if plan is None else plan


PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
COLUMNS = ("queries", "mean", *(f"p{p}" for p in PERCENTILES), "undefined", "not_positive")


def percentiles(values: ArrayLike) -> dict[str, float | int]:
    """Return count, mean and percentiles of the finite values, linearly interpolated."""
    numbers = summaries(torch.from_numpy(np.array(values, dtype=np.float64).reshape(1, -1)))[0].tolist()
    counts = ("queries", "undefined", "not_positive")
    return {n: int(x) if n in counts else x for n, x in zip(COLUMNS, numbers, strict=True)}


def summaries(values: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Return the COLUMNS of each row of (rows, n), float64, of which the first ``sizes`` count; None: all."""
    rows, length = values.shape
    sizes = torch.full((rows,), length, device=values.device) if sizes is None else sizes
    finite = values.isfinite() & (torch.arange(length, device=values.device) < sizes[:, None])
    known = finite.sum(1)
    ordered = values.where(finite, math.inf) if length else values.new_full((rows, 1), math.inf)
    if values.device.type == "cpu":  # many times faster there
        ordered = torch.from_numpy(np.sort(ordered.numpy(), 1))
    else:
        ordered = ordered.sort(1).values
    last = (known - 1).clamp(min=0)[:, None]
    place = torch.tensor([p / 100 for p in PERCENTILES], dtype=torch.float64, device=values.device) * last
    below = place.floor().long()
    low, high, part = ordered.gather(1, below), ordered.gather(1, torch.minimum(below + 1, last)), place - below
    # Interpolate from the nearer end: bit for bit as numpy.percentile does.
    cuts = torch.where(part < 0.5, low + (high - low) * part, high - (high - low) * (1 - part))
    mean = values.where(finite, 0).sum(1) / known
    ends = torch.stack([sizes - known, (finite & (values <= 0)).sum(1)], 1)
    return torch.cat([torch.stack([sizes, mean], 1), cuts.masked_fill(known[:, None] == 0, math.nan), ends], 1)


def rank_error(drawn: int) -> float:
    """Return by how much the ranks of percentiles of a sample may be off, all at once, with 99% confidence."""
    return min(1.0, math.sqrt(math.log(2 / 0.01) / (2 * drawn)))  # Dvoretzky, Kiefer, Wolfowitz and Massart


def percentile_rows(rows: pd.DataFrame, quantity: str, *by: str) -> pd.DataFrame:
    """Return percentiles of a quantity in every group of rows, in the order of their first rows."""
    groups = rows.groupby([*by], sort=False)[quantity]
    return pd.DataFrame([{**dict(zip(by, key, strict=True)), **percentiles(group)} for key, group in groups])


SKETCHES = Table(
    "sketches",
    "One row per quantity, layer and head (ALL: pooled) of a model with more queries or keys than are kept row by "
    "row: numbers, mean and extremes (p0, p100) are exact; the other percentiles may be those of a rank that is "
    "off by rank_error (with 99% confidence).",
    columns_of(
        f"model quantity str; layer head queries int64; mean {' '.join(f'p{p}' for p in PERCENTILES)} float64; "
        "undefined not_positive int64; rank_error float64"
    ),
)


# Totals of a stream of numbers, and how those of two streams are joined; counts are of finite numbers.
_TOTALS = {"count": "sum", "min": "min", "max": "max", "sum": "sum", "undefined": "sum", "not_positive": "sum"}


class KeptRows:
    """Rows that arrive in parts: columns of equal length, all of one layer."""

    def __init__(self, limit: int, places: Sequence[str], seed: int = 0) -> None:
        self.parts: list[dict[str, np.ndarray]] = []
        self.share = 1.0  # probability with which a row is kept
        self._limit, self._places, self._rows = limit, places, 0
        self._rng = np.random.default_rng(seed)
        self._totals: list[pd.DataFrame] = []  # one row per head, of one part and quantity

    def add(self, part: dict[str, np.ndarray]) -> None:
        """Add rows."""
        if self.share < 1:
            self._count(part)
            part = self._thinned(part, self.share)
        self.parts.append(part)
        self._rows += len(part["layer"])
        while self._rows > self._limit:
            for earlier in self.parts if self.share == 1 else ():
                self._count(earlier)
            self.share /= 2
            self.parts = [self._thinned(earlier, 0.5) for earlier in self.parts]
            self._rows = sum(len(earlier["layer"]) for earlier in self.parts)

    def _thinned(self, part: dict[str, np.ndarray], share: float) -> dict[str, np.ndarray]:
        chosen = self._rng.random(len(part["layer"])) < share
        return {name: column[chosen] for name, column in part.items()}

    def _count(self, part: dict[str, np.ndarray]) -> None:
        if not len(part["layer"]):
            return
        for name in part.keys() - set(self._places):
            values = pd.Series(part[name].astype(np.float64)).replace([np.inf, -np.inf], np.nan)
            table = values.groupby(part["head"]).agg(["count", "min", "max", "sum", "size"])
            table["undefined"] = table.pop("size") - table["count"]
            table["not_positive"] = (values <= 0).groupby(part["head"]).sum()
            self._totals.append(table.assign(quantity=name, layer=int(part["layer"][0])))

    def sketched(self) -> Iterator[dict[str, Any]]:
        """Yield rows of the table ``sketches``: by layer and head, by layer, and pooled; none below the limit."""
        if not self._totals:
            return
        table = pd.concat(self._totals).rename_axis("head").reset_index()
        levels = [table, table.assign(head=ALL), table.assign(layer=ALL, head=ALL)]
        totals = pd.concat(levels).groupby(["quantity", "layer", "head"]).agg(_TOTALS)
        for row in totals.reset_index().to_dict("records"):
            drawn = self._sample(row["quantity"], row["layer"], row["head"])
            inner = PERCENTILES[1:-1]
            ends = [
                row["min"],
                *(np.percentile(drawn, inner) if len(drawn) else [math.nan] * len(inner)),
                row["max"],
            ]
            yield {
                **{name: row[name] for name in ("quantity", "layer", "head", "undefined", "not_positive")},
                "queries": row["count"] + row["undefined"],
                "mean": row["sum"] / row["count"] if row["count"] else math.nan,
                **{f"p{p}": float(cut) for p, cut in zip(PERCENTILES, ends, strict=True)},
                "rank_error": rank_error(len(drawn)) if len(drawn) else 1.0,
            }

    def _sample(self, name: str, layer: int, head: int) -> np.ndarray:
        numbers = [np.empty(0)]
        for part in self.parts:
            if len(part["layer"]) and layer in (ALL, part["layer"][0]):
                values = part[name] if head == ALL else part[name][part["head"] == head]
                numbers.append(values[np.isfinite(values)].astype(np.float64))
        return np.concatenate(numbers)


@cache
def probes() -> dict[type, Probe]:
    """Return the probe of every plan, in the order of the questions."""
    return {probe.plan: probe for source in PROBE_SOURCES for probe in source()}


EVERYWHERE = (CALLS, HEADS, REMARKS, SKIPPED, SKETCHES)  # tables of every forward pass, whatever is asked


@cache
def optional_tables() -> dict[str, Table]:
    """Return the declared tables by name: those of every forward pass, of probes, and of training runs."""
    probed = [table for probe in probes().values() for table in probe.tables]
    return {table.name: table for table in (*EVERYWHERE, *probed, RUNS)}
