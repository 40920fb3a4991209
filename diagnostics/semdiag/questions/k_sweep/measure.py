"""Within one model, for many k at once: what its scores would be if each query kept its k largest."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
from torch import Tensor

from semdiag.capturing.attention_call import SCORED
from semdiag.capturing.batches import Batch, first_samples, longest, samples_of, split
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.rules import Keep
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
    loaded = subject.model
    size = subject.batch_size
    batches = split(subject.first[0], size)
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
        extra_pass_samples = _samples(clean_pass.batches)
        _run_clean_pass(subject, clean_pass)
    draws = clean_pass.draws
    for text in draws.remarks:
        subject.remark(f"k-sweep: {text}", "k-sweep-queries-drawn")
    if clean_pass.thinned:
        subject.remark(clean_pass.thinned, "k-sweep-thinned")
    if plan.reruns(loaded.external) or (plan.seconds and loaded.external):
        tables |= _reruns(subject, clean_pass, plan, extra_pass_samples)
    if plan.budget:
        budgets, tests = search(
            loaded,
            clean_pass.batches,
            subject.first[1],
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
    subject.progress.expect(_samples(clean_pass.batches))
    with (
        running(subject.model, clean_pass.add, subject.device, subject.dtype) as run,
        clean_pass.watched(run.module),
    ):
        for batch in clean_pass.batches:
            clean_pass.start(samples_of(batch))
            run(batch)
            subject.progress.advance(samples_of(batch))


def _samples(batches: Iterable[Batch]) -> int:
    return sum(map(samples_of, batches))


def _scored(loaded: LoadedModel) -> bool:
    return loaded.external or loaded.encoder.config.attention in SCORED


Mask = tuple[str, int, Keep]  # name, k and rule


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The inputs cut into pieces of one length, and the masks with which these run."""

    length: int  # tokens of a piece
    batches: Sequence[Batch]
    masks: list[Mask]
    steps: int  # what a piece takes, in samples of the inputs

    def work(self) -> int:
        """Return what all runs take, in samples of the inputs."""
        return (1 + len(self.masks)) * self.steps * _samples(self.batches)

    def first(self, number: int) -> "_Pieces":
        """Return the first of the pieces."""
        return replace(self, batches=list(first_samples(self.batches, max(1, number))))


def _reruns(
    subject: Subject, clean_pass: TopScores, plan: KSweepPlan, extra_pass_samples: int
) -> dict[str, pd.DataFrame]:
    """Run the model with masks, on its inputs and on pieces of them."""
    loaded = subject.model
    labels = subject.first[1]
    kinds = plan.kinds or (EXTERNAL_KINDS if loaded.external else OWN_KINDS)
    masks = _masks(subject, clean_pass, plan, kinds)
    inputs = [*clean_pass.batches]
    if labels is None:
        inputs = masked_language(loaded, inputs, subject.seed, subject.remark)
    batches = inputs
    if not plan.reruns(loaded.external):
        batches = _fitting(inputs, clean_pass.seconds, len(masks), plan.seconds or 0, subject.remark)
        labels = None if labels is None else labels[: _samples(batches)]
    tokens = max(map(longest, inputs)) if plan.lengths else 1
    cuts = [
        _Pieces(n, pieces, masks_of(plan.ks or few_ks(n), subject.seed, kinds), max(1, round(n / tokens)))
        for n, pieces in clean_pass.pieces.items()
    ]
    uncut = [each for each in cuts if labels is None and _are_inputs(each, tokens, inputs, masks)]
    cuts = [each for each in cuts if each not in uncut]
    if _samples(batches) < _samples(inputs):  # as much of the pieces
        cuts = [each.first(_samples(batches) * tokens // each.length) for each in cuts]
    work = (1 + len(masks)) * _samples(batches) + sum(each.work() for each in cuts)
    subject.progress.expect(extra_pass_samples + work)
    with_masks = _rerun_inputs(subject, plan, batches, labels, masks)
    by_length = [with_masks.assign(length=tokens) for _ in uncut]
    by_length += [_rerun_pieces(subject, plan, each) for each in cuts]
    return {"rerun": with_masks, "rerun_lengths": LENGTHS_TABLE.of_parts(by_length)}


def _runner(subject: Subject, plan: KSweepPlan) -> Callable[..., pd.DataFrame]:
    return partial(
        rerun,
        subject.model,
        device=subject.device,
        dtype=subject.dtype,
        remark=subject.remark,
        optional=() if plan.kinds else EXTERNAL_KINDS[1:],
        jobs=plan.jobs,
    )


def _rerun_inputs(
    subject: Subject, plan: KSweepPlan, batches: list[Batch], labels: Tensor | None, masks: Sequence[Mask]
) -> pd.DataFrame:
    """Run the model on its inputs; a refusal is a remark where the user did not ask for the runs."""
    run = _runner(subject, plan)
    try:
        with_masks = run(batches, labels, masks, after_batch=subject.progress.advance)
    except InputError as error:
        if plan.reruns(external=False):  # the user asked for it
            raise
        subject.remark(f"not run with masks: {str(error).removesuffix('.')}", RERUN_FAILED)
        with_masks = RERUN_TABLE.empty()
    if plan.lengths and not with_masks["predictions"].sum():
        why = f"of {subject.model.path} the outputs are compared"
        raise InputError(f"--lengths is for models that predict tokens, and {why}.")
    return with_masks


def _rerun_pieces(subject: Subject, plan: KSweepPlan, pieces: _Pieces) -> pd.DataFrame:
    """Run the model on pieces of one length."""

    def advance(samples: int) -> None:
        subject.progress.advance(pieces.steps * samples)

    run = _runner(subject, plan)
    return run(pieces.batches, None, pieces.masks, after_batch=advance).assign(length=pieces.length)


def _masks(subject: Subject, clean_pass: TopScores, plan: KSweepPlan, kinds: Sequence[str]) -> list[Mask]:
    """Return the masks with which the inputs run."""
    if plan.ks:
        return masks_of(plan.ks, subject.seed, kinds, plan.kinds)
    most = max(1, clean_pass.most_keys - 1)
    ks = rerun_ks(min(clean_pass.largest, most)) if clean_pass.every_k else few_ks(most + 1)
    return masks_of(ks, subject.seed, kinds, plan.kinds, subject.remark)


def _are_inputs(pieces: _Pieces, tokens: int, inputs: list[Batch], masks: Sequence[Mask]) -> bool:
    """Return whether pieces are the inputs themselves, and run with the same masks."""
    same_masks = [mask[:2] for mask in pieces.masks] == [mask[:2] for mask in masks]
    return pieces.length == tokens and same_masks and _samples(pieces.batches) == _samples(inputs)


_MASK = 0.5  # what a mask takes at most of a watched pass: 1.1 to 2.2 forwards where that takes about 4


def _fitting(
    batches: list[Batch], seconds: float, masks: int, limit: float, remark: Callable[[str, str], None]
) -> list[Batch]:
    every = _samples(batches)
    samples = max(1, int(limit / (seconds / every * (1 + _MASK * masks))))
    if samples >= every:
        return batches
    remark(
        f"run with masks on the first {samples:,} of {counted(every, 'sample')}, as many as fit in about "
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
