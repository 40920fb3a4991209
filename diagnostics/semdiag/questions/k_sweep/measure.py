"""Within one model, for many k at once: what its scores would be if each query kept its k largest."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pandas as pd

from semdiag.capturing.attention_call import SCORED
from semdiag.capturing.batches import Batch, first_samples, longest, samples_of, split
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.capture import longest_call
from semdiag.measuring.calls.collector import QueryDraws
from semdiag.measuring.calls.running import running
from semdiag.measuring.outputs import masked_language
from semdiag.measuring.subject import Subject
from semdiag.measuring.table import Table, columns_of
from semdiag.measuring.words import counted
from semdiag.questions.k_sweep import LARGEST_K, KSweepPlan
from semdiag.questions.k_sweep.budgets import BUDGET_TABLE, EXTERNAL_KINDS, OWN_KINDS, halves, masks_of, search
from semdiag.questions.k_sweep.rerun import (
    LENGTHS_TABLE,
    RERUN_FAILED,
    RERUN_TABLE,
    few_ks,
    packed,
    rerun,
    rerun_ks,
)
from semdiag.questions.k_sweep.top_scores import TopScores
from semdiag_files import InputError


def _clean_pass(subject: Subject, plan: KSweepPlan) -> TopScores:
    loaded, size = subject.model, subject.batch_size
    batches = split(subject.first[0], size)
    longest, keys = longest_call(loaded, batches, subject.device, subject.dtype)
    largest = _largest_k(plan, keys)
    if plan.budget:
        halves(batches)  # refused before minutes are spent
    if plan.lengths and not loaded.external:
        raise InputError("--lengths takes external models; for a run of semdiag train see experiments/lengths.py.")
    pieces = {n: packed(batches, n, max(1, size * keys // n)) for n in plan.lengths}
    draws = QueryDraws(subject.queries, subject.seed)
    draws.expect(longest)
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
    labels = subject.first[1]
    tables = {table.name: table.empty() for table in TABLES}
    if not _scored(loaded):
        return tables
    whole = 0  # samples of a pass that is made here
    seen: Any = subject.watchers.pop(KSweepPlan.name, None)
    if seen is None:
        seen = _clean_pass(subject, plan)
        whole = sum(map(samples_of, seen.batches))
        subject.progress.expect(whole)
        with running(loaded, seen.add, subject.device, subject.dtype) as run, seen.watched(run.module):
            for batch in seen.batches:
                seen.start(samples_of(batch))
                run(batch)
                subject.progress.advance(samples_of(batch))
    draws = seen.draws
    for text in draws.remarks:
        subject.remark(f"k-sweep: {text}", "k-sweep-queries-drawn")
    if seen.thinned:
        subject.remark(seen.thinned, "k-sweep-thinned")
    if plan.reruns(loaded.external) or (plan.seconds and loaded.external):
        tables |= _reruns(subject, seen, plan, whole)
    if plan.budget:
        how = subject.min_keys, subject.device, subject.dtype
        budgets, tests = search(loaded, seen.batches, labels, plan.tolerance, *how)
        tables |= {"budgets": budgets, "rerun": RERUN_TABLE.of_parts([tables["rerun"], tests])}
    if draws.share < 1:
        estimates = ({"model": loaded.path, **row} for row in seen.estimates())
        tables["sweep_estimates"] = SWEEP_ESTIMATES.of_rows(estimates)
    tables["sweep"] = K_SWEEP_TABLE.of_parts([seen.table().assign(model=loaded.path)])
    return tables


def _scored(loaded: LoadedModel) -> bool:
    return loaded.external or loaded.encoder.config.attention in SCORED


def _reruns(subject: Subject, seen: TopScores, plan: KSweepPlan, whole: int) -> dict[str, pd.DataFrame]:
    loaded, labels, seed = subject.model, subject.first[1], subject.seed
    most = max(1, seen.most_keys - 1)
    usual = rerun_ks(min(seen.largest, most)) if seen.every_k else few_ks(most + 1)
    kinds, wanted = plan.kinds or (EXTERNAL_KINDS if loaded.external else OWN_KINDS), plan.reruns(loaded.external)
    how: dict[str, Any] = {"device": subject.device, "dtype": subject.dtype, "remark": subject.remark}
    how |= {"optional": () if plan.kinds else EXTERNAL_KINDS[1:], "jobs": plan.jobs}
    masks = masks_of(plan.ks or usual, seed, kinds, plan.kinds, None if plan.ks else subject.remark)
    batches, pieces = [*seen.batches], seen.pieces
    if labels is None:
        batches = masked_language(loaded, batches, seed, subject.remark)
    limit = plan.seconds or 0
    chosen = batches if wanted else _fitting(batches, seen.seconds, len(masks), limit, subject.remark)
    of_length = {n: masks_of(plan.ks or few_ks(n), seed, kinds) for n in pieces}
    tokens = max(map(longest, batches)) if pieces else 1
    few, every = (sum(map(samples_of, some)) for some in (chosen, batches))
    uncut = tokens in pieces and labels is None and every == sum(map(samples_of, pieces[tokens]))
    if uncut and [each[:2] for each in masks] == [each[:2] for each in of_length[tokens]]:
        pieces = {n: cut for n, cut in pieces.items() if n != tokens}
    if few < every:  # as much of the pieces
        pieces = {n: list(first_samples(cut, max(1, few * tokens // n))) for n, cut in pieces.items()}
    steps = {n: max(1, round(n / tokens)) for n in pieces}  # what a piece takes, in samples
    more = sum((1 + len(of_length[n])) * steps[n] * sum(map(samples_of, cut)) for n, cut in pieces.items())
    subject.progress.expect(whole + (1 + len(masks)) * few + more)
    labels = labels if labels is None or wanted else labels[:few]

    try:
        again = rerun(loaded, chosen, labels, masks, after_batch=subject.progress.advance, **how)
    except InputError as error:
        if plan.reruns(external=False):  # the user asked for it
            raise
        subject.remark(f"not run with masks: {str(error).removesuffix('.')}", RERUN_FAILED)
        again = RERUN_TABLE.empty()
    if plan.lengths and not again["predictions"].sum():
        why = f"of {loaded.path} the outputs are compared"
        raise InputError(f"--lengths is for models that predict tokens, and {why}.")
    cuts = [again.assign(length=tokens)] if tokens in {*plan.lengths} - {*pieces} else []
    for n, cut in pieces.items():
        count = partial(lambda step, samples: subject.progress.advance(step * samples), steps[n])
        passes = rerun(loaded, cut, None, of_length[n], after_batch=count, **how)
        cuts.append(passes.assign(length=n))
    return {"rerun": again, "rerun_lengths": LENGTHS_TABLE.of_parts(cuts)}


_MASK = 0.5  # what a mask takes at most of a watched pass: 1.1 to 2.2 forwards where that takes about 4


def _fitting(
    batches: list[Batch], seconds: float, masks: int, limit: float, remark: Callable[[str, str], None]
) -> list[Batch]:
    whole = sum(map(samples_of, batches))
    samples = max(1, int(limit / (seconds / whole * (1 + _MASK * masks))))
    if samples >= whole:
        return batches
    remark(
        f"run with masks on the first {samples:,} of {counted(whole, 'sample')}, as many as fit in about "
        f"{limit / 60:g} min",
        "rerun-samples",
    )
    return list(first_samples(batches, samples))


def watch_scores(subject: Subject, plan: KSweepPlan) -> TopScores | None:
    """Return what observes the clean pass; None if that has other batches, or the model has no scores to sweep."""
    inputs = split(subject.first[0], subject.batch_size)
    same_batches = [*map(samples_of, inputs)] == [*map(samples_of, subject.batches)]
    if same_batches and _scored(subject.model):
        return _clean_pass(subject, plan)
    return None
