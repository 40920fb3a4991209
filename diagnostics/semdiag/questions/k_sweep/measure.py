"""Within one model, for many k at once: what its scores would be if each query kept its k largest."""

import time
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from semdiag.capturing.attention_call import SCORED
from semdiag.capturing.batches import Batch, each, longest, only_token_ids, real_tokens, samples_of
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.capture import longest_call
from semdiag.measuring.calls.collector import QueryDraws, SampleNumbers
from semdiag.measuring.calls.running import running
from semdiag.measuring.measure import measure
from semdiag.measuring.outputs import Streams
from semdiag.measuring.subject import Subject
from semdiag.measuring.survey import has_diverged
from semdiag.measuring.table import Table, columns_of
from semdiag.questions.k_sweep import LARGEST_K, KSweepPlan
from semdiag.questions.k_sweep.budgets import BUDGET_TABLE, halves, search
from semdiag.questions.k_sweep.rerun import LENGTHS_TABLE, RERUN_TABLE, packed, rerun_ks
from semdiag.questions.k_sweep.reruns import number_of_samples, run_with_masks
from semdiag.questions.k_sweep.top_scores import TopScores
from semdiag_files import InputError


def _clean_pass(subject: Subject, plan: KSweepPlan) -> TopScores:
    loaded = subject.model
    size = subject.batch_size
    batches = subject.batches
    most_queries, keys = longest_call(loaded, batches, subject.device, subject.dtype)
    largest = _largest_k(plan, keys)
    if plan.budget:
        halves(batches)  # refused before minutes are spent
    if plan.lengths and not loaded.external:
        raise InputError("--lengths takes external models; for a run of semdiag train see experiments/lengths.py.")
    pieces = {n: packed(batches, n, max(1, size * keys // n)) for n in plan.lengths}
    draws = QueryDraws(subject.queries, subject.seed)
    draws.expect(most_queries)
    return TopScores(
        largest,
        draws,
        subject.min_keys,
        not loaded.external or plan.max_k is not None,
        plan.reruns(loaded.external),
        plan.ks or tuple(rerun_ks(largest)),
        batches,
        pieces,
    )


def _largest_k(plan: KSweepPlan, keys: int) -> int:
    most = max(keys, *plan.lengths, 2)
    if plan.ks and max(plan.ks) > most:
        raise InputError(f"k must lie in 1 … {most}, the most keys of a query here. Got k={max(plan.ks)}.")
    if plan.max_k is not None and plan.max_k >= max(keys, 2):
        raise InputError(
            f"The largest k must be below the number of keys, at most {keys} here: otherwise nothing is dropped. "
            f"Got {plan.max_k}."
        )
    largest = plan.max_k or max(1, min(LARGEST_K, keys - 1))
    return max(largest, min(max(plan.ks, default=1), keys - 1))  # what is run is measured, too


K_SWEEP_TABLE = Table(
    "sweep",
    "One row per k, layer, head (ALL: pooled) and quantity: percentiles within a model.",
    {
        "model": "str", **dict.fromkeys(("layer", "head", "k"), "int64"), "quantity": "str", "queries": "int64",
        "mean": "float64", **{f"p{p}": "float64" for p in (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)},
        **dict.fromkeys(("undefined", "not_positive"), "int64"),
    },
)  # fmt: skip

SWEEP_ESTIMATES = Table(
    "sweep_estimates",
    "One row per k, quantity, statistic and target of a k-sweep whose queries were drawn, layers and heads "
    "pooled: the estimate with its 95% interval (empty where too few were drawn).",
    columns_of("model str; k int64; quantity statistic target str; estimate low high float64"),
)
TABLES = (K_SWEEP_TABLE, SWEEP_ESTIMATES, RERUN_TABLE, LENGTHS_TABLE, BUDGET_TABLE)


def measure_sweep(subject: Subject, plan: KSweepPlan) -> Mapping[str, pd.DataFrame]:
    """Return the tables of a plan."""
    loaded = subject.model
    tables = {table.name: table.empty() for table in TABLES}
    if not _scored(loaded):
        return tables
    extra_pass_samples = 0
    clean_pass: Any = subject.watchers.pop(KSweepPlan.name, None)
    if clean_pass is None:
        clean_pass = _clean_pass(subject, plan)
        extra_pass_samples = number_of_samples(clean_pass.batches)
        _run_clean_pass(subject, clean_pass)
    draws = clean_pass.draws
    for text in draws.remarks:
        subject.remark(f"k-sweep: {text}", "k-sweep-queries-drawn")
    if clean_pass.thinned:
        subject.remark(clean_pass.thinned, "k-sweep-thinned")
    early: EarlyRuns | None = subject.early.pop(KSweepPlan.name, None)
    if early is not None:
        tables |= early.tables
    elif plan.reruns(loaded.external):
        tables |= run_with_masks(subject, clean_pass, clean_pass.most_keys, plan, extra_pass_samples)
    if plan.budget:
        budgets, tests = search(
            loaded,
            clean_pass.batches,
            subject.labels,
            plan.tolerance,
            subject.min_keys,
            subject.device,
            subject.dtype,
        )
        tables |= {"budgets": budgets, "rerun": RERUN_TABLE.of_parts([tables["rerun"], tests])}
    if draws.share < 1:
        estimates = ({"model": loaded.path, **row} for row in clean_pass.estimates())
        tables["sweep_estimates"] = SWEEP_ESTIMATES.of_rows(estimates)
    tables["sweep"] = K_SWEEP_TABLE.of_parts([clean_pass.table().assign(model=loaded.path)])
    return tables


def _run_clean_pass(subject: Subject, clean_pass: TopScores) -> None:
    """Run the model without masks, which the survey's own pass did not do for this plan."""
    subject.progress.expect(number_of_samples(clean_pass.batches))
    with (
        running(subject.model, clean_pass.add, subject.device, subject.dtype) as run,
        clean_pass.watched(run.module),
    ):
        for batch in clean_pass.batches:
            clean_pass.start(samples_of(batch))
            run(batch)
            subject.progress.advance(samples_of(batch))


def _scored(loaded: LoadedModel) -> bool:
    return loaded.external or loaded.encoder.config.attention in SCORED


def run_before_statistics(subject: Subject, plan: KSweepPlan) -> None:
    """Run an external model with masks before its statistics, which take longer and answer less."""
    loaded = subject.model
    if not (loaded.external and plan.reruns(external=True)):
        return
    subject.progress.announce(f"{loaded.path}: runs with masks", 0)
    scores = _clean_pass(subject, plan)
    one_text = _longest_text(loaded, scores.batches)
    trial = replace(scores, draws=deepcopy(scores.draws), streams=Streams(), samples=SampleNumbers())
    start = time.perf_counter()
    try:
        statistics = measure(
            loaded,
            [one_text],
            queries=subject.queries,
            device=subject.device,
            dtype=subject.dtype,
            seed=subject.seed,
            min_keys=subject.min_keys,
            watchers=[trial],
        )
    except InputError:  # told by the statistics of all texts
        return
    if has_diverged(statistics):
        return
    share = samples_of(one_text) * longest(one_text) / _tokens(scores.batches)
    seconds = (time.perf_counter() - start) / share
    tables = run_with_masks(subject, scores, trial.most_keys, plan, statistics_seconds=seconds)
    subject.early[KSweepPlan.name] = EarlyRuns(scores, tables)


def _longest_text(loaded: LoadedModel, batches: Sequence[Batch]) -> Batch:
    """Return the sample with the most tokens that are not padding, as a batch."""
    batch = max(batches, key=longest)
    if not only_token_ids(batch) or isinstance(batch, tuple | list):
        return batch  # its tensors may depend on each other

    def tokens(sample: Batch) -> int:
        masks = real_tokens(loaded.module, sample).values()
        return min((int(mask.sum()) for mask in masks), default=longest(sample))

    return max(each(batch, 1), key=tokens)


def _tokens(batches: Iterable[Batch]) -> int:
    return sum(samples_of(batch) * longest(batch) for batch in batches)


@dataclass(frozen=True, eq=False)
class EarlyRuns:
    """What came of running a model with masks before its statistics."""

    scores: TopScores  # what will watch the statistics
    tables: Mapping[str, pd.DataFrame]


def watch_scores(subject: Subject, plan: KSweepPlan) -> TopScores | None:
    """Return what observes the clean pass; None if the model has no scores to sweep."""
    early: EarlyRuns | None = subject.early.get(KSweepPlan.name)
    if early is not None:
        return early.scores
    return _clean_pass(subject, plan) if _scored(subject.model) else None
