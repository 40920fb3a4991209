"""Within one model, for every k at once: what its scores would be if each query kept its k largest ones."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.attention_kinds import SCORED
from semdiag.capturing.batches import Batch, first_samples, longest, samples_of, split, without_first
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.paper_stability import paper_heavy_hitter_stability
from semdiag.mathematics.query_draws import PER_STRATUM
from semdiag.mathematics.sampled_intervals import TARGETS, sampled_estimates
from semdiag.mathematics.softmax_stability import fixed_mask_stability, heavy_hitter_stability
from semdiag.measurement.calls.counted_rows import counted_rows
from semdiag.measurement.calls.query_draws import QueryDraws
from semdiag.measurement.calls.running import running, unnamed
from semdiag.measurement.percentiles import percentiles
from semdiag.measurement.probe import Probe, Subject
from semdiag.measurement.probes.key_budgets import (
    BUDGET_TABLE,
    BY_MASS,
    GREEDY,
    NeededKeys,
    Place,
    budget_name,
    greedy,
    rules,
)
from semdiag.measurement.probes.rerun import (
    NO_MASK,
    RERUN_TABLE,
    TOLERANCES,
    TOP_K,
    masks_of,
    measure_of,
    rerun,
    rerun_ks,
    upper_change,
)
from semdiag.measurement.table import ALL, Table
from semdiag_models import InputError

K_SWEEP_TABLE = Table(
    "sweep",
    "One row per k, layer, head (ALL: pooled) and quantity: percentiles within a model.",
    {
        "model": "str",
        **dict.fromkeys(("layer", "head", "k"), "int64"),
        "quantity": "str",
        "queries": "int64",
        "mean": "float64",
        **{f"p{p}": "float64" for p in (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)},
        **dict.fromkeys(("undefined", "not_positive"), "int64"),
    },
)

SWEEP_ESTIMATES = Table(
    "sweep_estimates",
    "One row per k, quantity, statistic and target of a k-sweep whose queries were drawn, layers and heads "
    "pooled: the estimate with its 95 % interval (empty where too few were drawn).",
    {
        "model": "str",
        "k": "int64",
        **dict.fromkeys(("quantity", "statistic", "target"), "str"),
        **dict.fromkeys(("estimate", "low", "high"), "float64"),
    },
)
_TABLES = (K_SWEEP_TABLE, SWEEP_ESTIMATES, RERUN_TABLE, BUDGET_TABLE)
_ESTIMATED = ("dispersion", "ratio", "separation", "mass")

LARGEST_K = 48
_MOST_RUNS = 200  # while a budget is looked for
_MOST_NUMBERS = 200_000_000  # top scores held at once: 800 MB


@dataclass(frozen=True)
class KSweepPlan:
    """Which k are looked at.

    Raises:
        InputError: if a value is illegal.
    """

    max_k: int | None = None  # None: 48, or one less than the inputs' length
    rerun: bool = False  # whether the model is run with real masks
    tolerance: float | None = None  # change of the loss that is still no loss; None: see TOLERANCES
    budget: bool = False  # whether budgets by layer and head are looked for; takes reruns
    ks: tuple[int, ...] = ()  # of the reruns; none named: up to max_k in growing steps

    def __post_init__(self) -> None:
        if self.max_k is not None and self.max_k < 1:
            raise InputError(f"The largest k must be at least 1. Got {self.max_k}.")
        if self.tolerance is not None and not self.tolerance > 0:
            raise InputError(f"The tolerated change must be above 0. Got {self.tolerance}.")
        if any(k < 1 for k in self.ks):
            raise InputError(f"k must be at least 1. Got k={min(self.ks)}.")
        if self.budget and not self.rerun:
            raise InputError("Budgets are tested by running the model: they take --rerun.")


def k_sweep(
    model: LoadedModel | nn.Module,
    tokens: Batch | Iterable[Batch],
    labels: Tensor | None = None,
    plan: KSweepPlan | None = None,
    *,
    batch_size: int = 100,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    min_keys: int = 1,
    queries: int | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Ask of one model's scores, for every k up to K in one pass, what top-k attention would make of them.

    A within-model comparison: nothing is trained anew, and a model trained with that k has other scores.
    The model itself is not changed.

    Source: docs/theory.md#k-sweep. Deviation: not in the paper, which compares trained models.

    Args:
        model: from :func:`semdiag.load`, or any module; of our encoders those with full or top-k attention.
        tokens: (N, L) int64, or what :func:`~semdiag.measurement.measure.measure` takes.
        labels: (N,) classes, for the loss of reruns; None: what the batches say (``labels``), else the next token
            of a causal language model.
        plan: the largest k; whether the model is run again with real masks.
        batch_size: samples at a time.
        device: where to run.
        dtype: of the model and of the scores: float32 or float64.
        min_keys: queries with fewer keys are left out.
        queries: how many are drawn per sample and head, as by :func:`~semdiag.measurement.measure.measure`; None:
            every query is looked at. Extremes and loads are then those of the drawn queries.
        seed: of the draws.

    Returns:
        The table ``sweep``: one row per k, layer and head (ALL, -1: pooled) and quantity, with the columns of
        :func:`~semdiag.measurement.percentiles.percentiles`. Quantities: dispersion δ_h(k), ratio
        δ_h(k)/δ_s, separation Δ_h(k), mass (attention weight of the k largest scores, over queries with more than
        k keys; the others are counted as undefined), share (k in their keys), load, ln_sound and ln_paper (ξ of
        the heavy-hitter mask), sound_better (share of queries whose sound ξ is below that of full attention);
        after a rerun accuracy and same_prediction. k = 0: all keys kept; there also evenness, the entropy of the
        weights in that of uniform ones. Empty for a mask that does not depend on the input.

    Raises:
        InputError: if K is not below the inputs' length, or there are too many queries for K; on a rerun, what
            :func:`~semdiag.measurement.probes.rerun.rerun` raises.

    Example:
        >>> from semdiag_models import Encoder, ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
        >>> sweep = k_sweep(encoder, torch.tensor([[0, 1, 1, 0]]))
        >>> sweep[(sweep["quantity"] == "mass") & (sweep["layer"] == -1)]["k"].tolist()
        [1, 2, 3]
    """
    how: dict[str, Any] = {"batch_size": batch_size, "device": device, "dtype": dtype, "min_keys": min_keys}
    return k_sweep_tables(model, tokens, labels, plan, **how, draws=QueryDraws(queries, seed))["sweep"]


def k_sweep_tables(
    model: LoadedModel | nn.Module,
    tokens: Batch | Iterable[Batch],
    labels: Tensor | None = None,
    plan: KSweepPlan | None = None,
    *,
    batch_size: int = 100,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    min_keys: int = 1,
    seed: int = 0,
    draws: QueryDraws | None = None,
    after_run: Callable[[], None] = lambda: None,
) -> dict[str, pd.DataFrame]:
    """All tables of a k-sweep; see :func:`k_sweep`.

    Args:
        model: as there.
        tokens: as there.
        labels: as there.
        plan: as there.
        batch_size: as there.
        device: as there.
        dtype: as there.
        min_keys: as there.
        seed: of the random control of reruns.
        draws: which queries are looked at; None: all. Budgets look at all.
        after_run: called after each run of a batch with a mask.

    Returns:
        ``sweep``; ``sweep_estimates``, empty unless queries were drawn; ``rerun`` and ``budgets``, empty unless
        the plan asks for them.
    """
    plan = KSweepPlan() if plan is None else plan
    loaded = model if isinstance(model, LoadedModel) else unnamed(model)
    found = {table.name: table.empty() for table in _TABLES}
    if not loaded.external and loaded.encoder.config.attention not in SCORED:
        return found
    batches = split(tokens, batch_size)
    largest = _largest_k(plan, batches)
    draws = QueryDraws(None, seed) if draws is None else draws
    draws.expect(max(map(longest, batches), default=1))
    collected, needed = _Collector(largest, draws, min_keys), NeededKeys(min_keys)

    def add(call: AttentionCall) -> None:
        collected.add(call)
        if plan.budget:
            needed.add(call)

    with running(loaded, add, device, dtype) as run:
        for batch in batches:
            run(batch)
    rows = list(collected.rows())
    if plan.rerun:
        masks = masks_of(plan.ks or rerun_ks(largest), seed)
        again = rerun(loaded, batches, labels, masks, device, dtype, after_run)
        found["rerun"] = again
        rows += _said(again)
        if plan.budget:
            budgets, tests = _budgets(loaded, batches, labels, plan, needed, device, dtype)
            found |= {"budgets": budgets, "rerun": RERUN_TABLE.of_parts([again, tests])}
    if draws.share < 1:
        estimates = ({"model": loaded.path, **row} for row in collected.estimates())
        found["sweep_estimates"] = SWEEP_ESTIMATES.of_rows(estimates)
    found["sweep"] = K_SWEEP_TABLE.of_rows({"model": loaded.path, **row} for row in rows)
    return found


def _said(again: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Accuracy and same predictions for every k of a rerun, over samples."""
    own = again[again["mask"].isin((NO_MASK, TOP_K))]
    for k, rows in own.groupby("k"):
        for quantity, part, whole in (
            ("accuracy", "correct", "targets"),
            ("same_prediction", "changed", "predictions"),
        ):
            some = rows[rows[whole] > 0]
            if len(some):
                share = some[part] / some[whole]
                values = share if quantity == "accuracy" else 1 - share
                yield {"layer": ALL, "head": ALL, "k": int(str(k)), "quantity": quantity, **percentiles(values)}


def _budgets(
    loaded: LoadedModel,
    batches: list[Batch],
    labels: Tensor | None,
    plan: KSweepPlan,
    needed: NeededKeys,
    device: torch.device | str,
    dtype: torch.dtype,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Budgets, found on the first half of the samples, and what the model says with them on the second."""
    samples = sum(map(samples_of, batches))
    first = list(first_samples(batches, (samples + 1) // 2))
    head = sum(map(samples_of, first))
    second = without_first(batches, head) or first
    known = (None, None) if labels is None else (labels[:head], labels[head:])

    def cost(budget: Mapping[Place, Sequence[int]]) -> float:
        again = rerun(loaded, first, known[0], [("budget", -1, rules(budget))], device, dtype)
        return upper_change(again, "budget", -1)

    measure = measure_of(rerun(loaded, first, known[0], [], device, dtype))
    tolerance = plan.tolerance or TOLERANCES[measure]
    named: dict[tuple[str, int], Mapping[Place, Sequence[int]]] = {}
    for level in BY_MASS:
        for block in needed.blocks:
            named[budget_name(level, block), block] = needed.smallest(level, block)
    best = greedy(needed, cost, tolerance, _MOST_RUNS)
    if best is not None:
        named[GREEDY, 1] = best
    masks = [(name, -1, rules(budget, block)) for (name, block), budget in named.items()]
    tests = rerun(loaded, second, known[0] if second is first else known[1], masks, device, dtype)
    shifted = tests.assign(sample=tests["sample"] + (0 if second is first else head))
    return needed.table(loaded.path, named), shifted[shifted["mask"] != NO_MASK]


def _largest_k(plan: KSweepPlan, batches: Sequence[Batch]) -> int:
    length = max((longest(batch) for batch in batches), default=1)
    if plan.max_k is not None and plan.max_k >= max(length, 2):
        raise InputError(
            f"The largest k must be below the length of the inputs, {length}: then nothing is dropped. "
            f"Got {plan.max_k}."
        )
    return plan.max_k or max(1, min(LARGEST_K, length - 1))


@dataclass
class _Collector:
    """Keeps of every query its top scores, range, number of keys and log-sum-exp; of every key its loads."""

    largest: int
    draws: QueryDraws
    min_keys: int = 1
    parts: dict[tuple[int, int], list[dict[str, NDArray[Any]]]] = field(default_factory=dict)
    numbers: int = 0
    samples: Counter[int] = field(default_factory=Counter)  # of each layer so far

    def add(self, call: AttentionCall) -> None:
        places = self.draws.places(call)
        self.numbers += (call.q[..., 0] if places is None else places).numel() * (self.largest + 1)
        if self.numbers > _MOST_NUMBERS:
            raise InputError(
                f"More than {_MOST_NUMBERS:,} top scores are too many to hold. Use fewer samples, --queries or "
                "a smaller --max-k."
            )
        rows = counted_rows(replace(call, selected=None), self.largest, places)
        found, keys = rows.statistics, rows.keys
        for head in range(call.q.shape[1]):
            own = rows.attending[:, head] & (found.keys[:, head] >= self.min_keys)
            part = {
                "entropy": found.entropy[:, head][own],
                "top": found.top[:, head][own].T,
                "range": (found.maximum - found.minimum)[:, head][own],
                "keys": found.keys[:, head][own],
                "log_sum_exp": found.log_sum_exp[:, head][own],
                "load": found.top_load[:, :, head][:, keys[:, head]],
            }
            if places is not None:
                sample = self.samples[call.layer] + torch.arange(len(own), device=own.device)[:, None].expand_as(
                    own
                )
                stratum = torch.arange(own.shape[1], device=own.device).expand_as(own) // PER_STRATUM
                part |= {"sample": sample[own], "stratum": stratum[own]}
            self.parts.setdefault((call.layer, head), []).append({n: v.cpu().numpy() for n, v in part.items()})
        self.samples[call.layer] += len(call.q)

    def _places(self) -> dict[tuple[int, int], dict[str, NDArray[Any]]]:
        return {
            place: {name: np.concatenate([part[name] for part in parts], -1) for name in parts[0]}
            for place, parts in sorted(self.parts.items())
        }

    def estimates(self) -> Iterator[dict[str, Any]]:
        """Rows of the table of estimates, all layers and heads together; of drawn queries alone."""
        places = self._places()
        together = _joined(places.values())
        numbers = np.concatenate([np.full_like(p["sample"], at) for at, p in enumerate(places.values())])
        key = np.stack([numbers, together["sample"], together["stratum"]], 1)
        strata = np.unique(key, axis=0, return_inverse=True)[1].ravel()
        for k, quantity, values in _quantities(together, self.largest):
            if quantity not in _ESTIMATED:
                continue
            for found in sampled_estimates(values, together["sample"], strata, self.draws.share, (5, 50, 95)):
                for target, (low, high) in zip(TARGETS, (found.these, found.such), strict=True):
                    row = {"k": k, "quantity": quantity, "statistic": found.statistic, "target": target}
                    yield {**row, "estimate": found.estimate, "low": low, "high": high}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of the table: each layer and head, then all together."""
        places = self._places()
        places[ALL, ALL] = _joined(places.values())
        for (layer, head), place in places.items():
            for k, quantity, values in _quantities(place, self.largest):
                yield {"layer": layer, "head": head, "k": k, "quantity": quantity, **percentiles(values)}


def _joined(places: Collection[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([p[name] for p in places], -1) for name in next(iter(places))}


def _quantities(place: dict[str, NDArray[Any]], largest: int) -> Iterator[tuple[int, str, NDArray[Any]]]:
    """Every quantity of every k, over the queries (or keys) of one layer and head."""
    top, whole, keys = place["top"].astype(np.float64), place["range"].astype(np.float64), place["keys"]
    kept_mass = np.logaddexp.accumulate(top[:largest], axis=0) - place["log_sum_exp"]
    full = fixed_mask_stability(_tensor(whole), _tensor(keys)).log_value.numpy()
    yield 0, "dispersion", whole
    yield 0, "ln_sound", full
    several = np.where(keys > 1, np.log(np.maximum(keys, 2)), np.nan)
    yield 0, "evenness", place["entropy"] / several
    for k in range(1, largest + 1):
        drops = keys > k  # elsewhere the entries of ``top`` may be -inf
        lowest, following = (np.where(drops, top[at], 0.0) for at in (k - 1, k))
        dispersion = np.where(drops, top[0] - lowest, whole)
        separation = np.where(drops, lowest - following, np.inf)
        kept = np.minimum(keys, k)
        row = _tensor(dispersion), _tensor(separation), _tensor(kept)
        sound = heavy_hitter_stability(*row).log_value.numpy()
        yield k, "dispersion", dispersion
        yield k, "ratio", np.divide(dispersion, whole, out=np.full_like(whole, np.nan), where=whole > 0)
        yield k, "separation", separation
        yield k, "mass", np.where(drops, np.minimum(np.exp(kept_mass[k - 1]), 1.0), np.nan)
        yield k, "share", np.where(drops, k / keys, np.nan)
        yield k, "load", place["load"][k - 1]
        yield k, "ln_sound", sound
        yield k, "ln_paper", paper_heavy_hitter_stability(*row).log_value.numpy()
        yield k, "sound_better", (sound < full).astype(np.float64)


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.float64))


def _measure(subject: Subject, plan: KSweepPlan, prepared: int | None) -> Mapping[str, pd.DataFrame]:
    inputs, labels = subject.first
    how: dict[str, Any] = {"batch_size": subject.batch_size, "device": subject.device, "dtype": subject.dtype}
    how |= {"min_keys": prepared or 1, "seed": subject.seed, "draws": QueryDraws(subject.queries, subject.seed)}
    return k_sweep_tables(subject.model, inputs, labels, plan, **how)


def _provenance(plan: KSweepPlan, samples: int, few: int) -> dict[str, Any]:
    return {"probe_samples": few, **({"tolerance": plan.tolerance} if plan.tolerance else {})}


K_SWEEP = Probe(
    "k-sweep",
    KSweepPlan,
    _TABLES,
    _measure,
    prepare=lambda plan, conditions: conditions.min_keys,
    provenance=_provenance,
    draws=True,
)
